"""Conversations with a real engine are exact: the tokens, whose they are, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.schema import ClusterConfig, EnvironmentConfig, RolloutsConfig
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.responses import GenerationRequest, SamplingSettings
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.environments.pool import build_environments
from megatron_grpo.environments.settings import EnvironmentSettings
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.rollouts.plan import sample_seed
from megatron_grpo.rollouts.pool import RolloutPool
from tests.integration.vllm_helpers import EOS, LETTERS, MAX_LENGTH, Oracle, engines, generate, make_model

SEED, STEP, SAMPLES, TURNS = 5, 3, 6, 3
SETTINGS = SamplingSettings(max_new_tokens=12, stop_token_ids=(EOS, *range(2, 20)))
PROMPTS = [[7, 8, 9], [30], [12, 33, 5, 6]]
IDS = {letter: index + 2 for index, letter in enumerate(LETTERS)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("multi_turn") / "model", seed=11)


@pytest.fixture(scope="module")
def generation(model: Path) -> Iterator[VllmGeneration]:
    cluster = RayCluster(ClusterConfig())
    cluster.start()
    with engines(model) as generation:
        yield generation
    cluster.shutdown()


def collected(generation: VllmGeneration, model: Path, max_turns: int) -> list[Trajectory]:
    prompts: list[DatumSpec] = [
        {
            "message_log": [{"role": "user", "content": "", "token_ids": ids}],
            "length": len(ids),
            "extra_env_info": {},
            "loss_multiplier": 1.0,
            "idx": idx,
            "task_name": "counting",
            "prompt": "",
        }
        for idx, ids in enumerate(PROMPTS)
    ]
    root = Path(__file__).parents[2]
    settings = EnvironmentSettings(tokenizer=str(model), import_folders=(str(root),))
    kind = EnvironmentConfig(
        type="tests.integration.counting_environment:CountingEnvironment", options={"turns": TURNS}
    )
    environments = build_environments({"counting": kind}, settings)
    rollouts = RolloutPool(
        RolloutsConfig(),
        generation.engines,
        environments,
        max_total_sequence_length=MAX_LENGTH,
        max_turns=max_turns,
        generation_timeout_s=120.0,
    )
    rollouts.start()
    try:
        rollouts.wait_ready()
        groups = rollouts.collect(
            prompts, samples_per_prompt=SAMPLES, settings=SETTINGS, run_seed=SEED, step=STEP, timer=StepTimer()
        )
        return [one for group in rollouts.fetch(groups) for one in group]
    finally:
        rollouts.shutdown()
        environments["counting"].shutdown()


def test_three_turns_are_what_was_sampled_and_nothing_else_is_learnt_from(
    generation: VllmGeneration, model: Path
) -> None:
    """Each turn is asked for again, alone, by its seed; transformers gives the log-probabilities of the whole."""
    trajectories = collected(generation, model, max_turns=TURNS)
    assert sum(one.reward == TURNS for one in trajectories) >= len(trajectories) // 2
    oracle = Oracle(model)
    for one in trajectories:
        assert one.failure is None
        prompt, tokens = PROMPTS[one.prompt_idx], one.token_ids.tolist()
        expected, own = list(prompt), [False] * len(prompt)
        for turn in range(int(one.reward or 0)):
            if turn:
                said = [IDS[letter] for letter in f"x{turn}y"]
                expected += said
                own += [False] * len(said)
            request = GenerationRequest(
                prompt_ids=np.array(expected, np.int32),
                seed=sample_seed(SEED, STEP, one.prompt_idx, one.sample, turn),
                max_new_tokens=MAX_LENGTH - len(expected),
            )
            (output,) = generate(generation, [request], SETTINGS)
            expected += output.token_ids.tolist()
            own += [True] * len(output.token_ids)
        assert tokens == expected
        mask = np.zeros(len(tokens), bool)
        for span in one.spans:
            mask[span.start : span.end] = True
        assert mask.tolist() == own
        whole = np.array(oracle.logprobs(prompt, tokens[len(prompt) :]))
        np.testing.assert_allclose(one.logprobs, whole[mask[len(prompt) :]], atol=2e-5)


def test_turns_end_a_rollout_too(generation: VllmGeneration, model: Path) -> None:
    trajectories = collected(generation, model, max_turns=2)
    assert {one.reward for one in trajectories} <= {1.0, 2.0}
    assert all(one.spans[-1].end == len(one.token_ids) for one in trajectories), "nothing follows the last turn"
