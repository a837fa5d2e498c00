"""Conversations with a real engine are exact, of an environment and of an agent: tokens, whose they are, logprobs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from megatron_grpo.batch.generation_requests import GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.schema import ClusterConfig, EnvironmentConfig, RolloutsConfig
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.environments.environment_processes import build_environments
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.endpoint import EndpointSettings
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.rollouts.rollout import compute_sample_seed
from tests.integration.example_agent import QUESTIONS
from tests.integration.vllm_helpers import EOS, LETTERS, MAX_LENGTH, Oracle, engines, generate, make_model

pytestmark = [pytest.mark.slow, pytest.mark.ci]  # tests/unit/rollouts has turns and the endpoint without an engine

SEED, STEP, SAMPLES, TURNS = 5, 3, 6, 3
SETTINGS = SamplingSettings(max_new_tokens=12, stop_token_ids=(EOS, *range(2, 20)))
PROMPTS = [[7, 8, 9], [30], [12, 33, 5, 6]]
IDS = {letter: index + 2 for index, letter in enumerate(LETTERS)}

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
TEMPERATURE = 0.7
AGENT = EnvironmentConfig(
    type="reward_functions",
    reward_funcs=["tests.integration.example_agent.long"],
    agent_func="tests.integration.example_agent.talkative",
    num_workers=2,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a template for the agent's messages."""
    folder = make_model(tmp_path_factory.mktemp("turns") / "model", seed=11)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def generation(model: Path) -> Iterator[VllmGeneration]:
    cluster = RayCluster(ClusterConfig())
    cluster.start()
    with engines(model) as generation:
        yield generation
    cluster.shutdown()


def make_datum(idx: int, prompt: str, token_ids: list[int], task: str, **info: str) -> DatumSpec:
    return {
        "message_log": [{"role": "user", "content": prompt, "token_ids": token_ids}],
        "length": len(token_ids),
        "extra_env_info": {**info},
        "loss_multiplier": 1.0,
        "idx": idx,
        "task_name": task,
        "prompt": prompt,
    }


def collect(generation: VllmGeneration, model: Path, max_turns: int) -> list[Trajectory]:
    prompts = [make_datum(idx, "", ids, "counting") for idx, ids in enumerate(PROMPTS)]
    root = Path(__file__).parents[2]
    settings = EnvironmentSettings(tokenizer=str(model), import_folders=(str(root),))
    kind = EnvironmentConfig(
        type="tests.integration.counting_environment:CountingEnvironment", options={"turns": TURNS}
    )
    environments = build_environments({"counting": kind}, lambda _: settings)
    rollouts = RolloutPool(
        RolloutsConfig(),
        generation.engines,
        environments,
        generation_timeout_s=120.0,
        max_total_sequence_length=MAX_LENGTH,
        max_turns=max_turns,
    )
    rollouts.start()
    try:
        rollouts.wait_ready()
        groups = rollouts.collect(prompts, rollouts.make_settings(SAMPLES, SETTINGS, SEED, STEP), StepTimer())
        return [trajectory for group in rollouts.fetch(groups) for trajectory in group]
    finally:
        rollouts.shutdown()
        environments["counting"].shutdown()


def test_three_turns_are_what_was_sampled_and_nothing_else_is_learnt_from(
    generation: VllmGeneration, model: Path
) -> None:
    """Each turn is asked for again, alone, by its seed; transformers gives the log-probabilities of the whole."""
    trajectories = collect(generation, model, max_turns=TURNS)
    assert sum(trajectory.reward == TURNS for trajectory in trajectories) >= len(trajectories) // 2
    oracle = Oracle(model)
    for trajectory in trajectories:
        assert trajectory.failure is None
        prompt, tokens = PROMPTS[trajectory.prompt_idx], trajectory.token_ids.tolist()
        expected, is_own = list(prompt), [False] * len(prompt)
        for turn in range(int(trajectory.reward or 0)):
            if turn:
                letters = [IDS[letter] for letter in f"x{turn}y"]
                expected += letters
                is_own += [False] * len(letters)
            request = GenerationRequest(
                prompt_ids=np.array(expected, np.int32),
                seed=compute_sample_seed(SEED, STEP, trajectory.prompt_idx, trajectory.sample, turn),
                max_new_tokens=MAX_LENGTH - len(expected),
            )
            (output,) = generate(generation, [request], SETTINGS)
            expected += output.token_ids.tolist()
            is_own += [True] * len(output.token_ids)
        assert tokens == expected
        mask = np.zeros(len(tokens), bool)
        for span in trajectory.spans:
            mask[span.start : span.end] = True
        assert mask.tolist() == is_own
        expected_logprobs = np.array(oracle.logprobs(prompt, tokens[len(prompt) :]))
        np.testing.assert_allclose(trajectory.logprobs, expected_logprobs[mask[len(prompt) :]], atol=2e-5)


def test_turns_end_a_rollout_too(generation: VllmGeneration, model: Path) -> None:
    trajectories = collect(generation, model, max_turns=2)
    assert {trajectory.reward for trajectory in trajectories} <= {1.0, 2.0}
    assert all(trajectory.spans[-1].end == len(trajectory.token_ids) for trajectory in trajectories), (
        "nothing follows the last turn"
    )


def test_an_agents_calls_are_trained_on_as_they_were_sampled(generation: VllmGeneration, model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    oracle = Oracle(model)
    with _rollouts(generation, model) as pool:
        good, second_group = _collect(pool, ["hi", "yo"])
        for prompt, trajectories in (("hi", good), ("yo", second_group)):
            for trajectory in trajectories:
                assert trajectory.failure is None
                _check(trajectory, prompt, tokenizer, oracle)
        assert len({tuple(trajectory.token_ids.tolist()) for trajectory in good}) > 1, (
            "every sample has a seed of its own"
        )
        again, edited = _collect(pool, ["hi", "edits"])
        assert [trajectory.token_ids.tolist() for trajectory in again] == [
            trajectory.token_ids.tolist() for trajectory in good
        ]
        for trajectory in edited:
            assert trajectory.failure is None
            first, *branches = trajectory.split_segments()
            _check(replace(first, reward=first.response_tokens), "edits", tokenizer, oracle)
            assert trajectory.reward == trajectory.response_tokens, "every sampled token is in the loss once"
            prompt = tokenizer("uedits<eos>ae<eos>ux1<eos>a", add_special_tokens=False)["input_ids"]
            for branch in branches:
                begin = branch.spans[0].start
                assert branch.token_ids[:begin].tolist() == prompt
                tokens = branch.token_ids.tolist()
                expected = oracle.logprobs(prompt, tokens[begin:], TEMPERATURE)
                assert branch.logprobs.tolist() == pytest.approx(expected, abs=1e-4)
            assert len(branches) == 2


def _check(trajectory: Trajectory, prompt: str, tokenizer: AutoTokenizer, oracle: Oracle) -> None:
    """What was given is the template's, what was sampled has the model's log-probabilities, turn by turn."""
    tokens = trajectory.token_ids.tolist()
    assert trajectory.reward == trajectory.response_tokens, "the agent was told of the same tokens"
    logprobs, position = trajectory.logprobs.tolist(), 0
    assert len(trajectory.spans) == len(QUESTIONS)
    for question, span in zip(QUESTIONS, trajectory.spans, strict=True):
        prompt_tokens = tokens[position : span.start]
        ended = position > 0 and tokens[position - 1] == EOS  # the model's last message, by the model itself
        text = f"u{question or prompt}<eos>a" if position == 0 or ended else f"<eos>u{question}<eos>a"
        assert prompt_tokens == tokenizer(text, add_special_tokens=False)["input_ids"]
        sampled = tokens[span.start : span.end]
        expected = oracle.logprobs(tokens[: span.start], sampled, TEMPERATURE)
        assert [logprobs.pop(0) for _ in sampled] == pytest.approx(expected, abs=1e-4)
        position = span.end
    assert position == len(tokens)
    assert not logprobs


@contextmanager
def _rollouts(generation: VllmGeneration, model: Path) -> Iterator[RolloutPool]:
    endpoint = EndpointSettings(host="127.0.0.1", port=0, token="secret", tokenizer=str(model))
    environments = build_environments({"task": AGENT})
    pool = RolloutPool(
        RolloutsConfig(max_failed_fraction=1.0),
        generation.engines,
        environments,
        generation_timeout_s=120.0,
        max_total_sequence_length=MAX_LENGTH,
        endpoint=endpoint,
    )
    pool.start()
    try:
        pool.wait_ready()
        yield pool
    finally:
        pool.shutdown()


def _collect(pool: RolloutPool, prompts: list[str]) -> list[list[Trajectory]]:
    data = [make_datum(idx, prompt, [2], "task", answer="1") for idx, prompt in enumerate(prompts)]
    settings = SamplingSettings(max_new_tokens=8, temperature=TEMPERATURE, stop_token_ids=(EOS,))
    groups = pool.collect(data, pool.make_settings(3, settings, run_seed=1, generation_batch=0), StepTimer())
    return pool.fetch(groups)
