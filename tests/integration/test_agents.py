"""Rollouts whose turns an agent makes over the endpoint: trained on as sampled, checked against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from megatron_grpo.config.schema import EnvironmentConfig, RolloutsConfig
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.responses import SamplingSettings
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.environments.pool import build_environments
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.rollouts.endpoint import EndpointSettings
from megatron_grpo.rollouts.pool import RolloutPool
from tests.integration.example_agent import QUESTIONS
from tests.integration.test_refit import ray_cluster
from tests.integration.vllm_helpers import EOS, Oracle, engines, make_model

__all__ = ["ray_cluster"]  # a fixture of every test here

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
TEMPERATURE, LENGTH = 0.7, 64
ENVIRONMENT = EnvironmentConfig(
    type="reward_functions",
    reward_funcs=["tests.integration.example_agent.long"],
    agent_func="tests.integration.example_agent.talkative",
    num_workers=2,
)


def test_an_agents_calls_are_trained_on_as_they_were_sampled(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", seed=0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(model)
    oracle = Oracle(model)
    with _rollouts(model) as pool:
        good, other = _collect(pool, ["hi", "yo"])
        for prompt, trajectories in (("hi", good), ("yo", other)):
            for one in trajectories:
                assert one.failure is None
                _check(one, prompt, tokenizer, oracle)
        assert len({tuple(one.token_ids.tolist()) for one in good}) > 1, "every sample has a seed of its own"
        again, bad = _collect(pool, ["hi", "bad"])
        assert [one.token_ids.tolist() for one in again] == [one.token_ids.tolist() for one in good]
        for one in bad:
            assert one.failure is not None
            assert "does not continue the rollout's conversation" in one.failure
            assert one.reward is None


def _check(one: Trajectory, prompt: str, tokenizer: AutoTokenizer, oracle: Oracle) -> None:
    """What was given is the template's, what was sampled has the model's log-probabilities, turn by turn."""
    tokens = one.token_ids.tolist()
    assert one.reward == one.response_tokens, "the agent was told of the same tokens"
    logprobs, position = one.logprobs.tolist(), 0
    assert len(one.spans) == len(QUESTIONS)
    for question, span in zip(QUESTIONS, one.spans, strict=True):
        given = tokens[position : span.start]
        ended = position > 0 and tokens[position - 1] == EOS  # the model's last message, by the model itself
        text = f"u{question or prompt}<eos>a" if position == 0 or ended else f"<eos>u{question}<eos>a"
        assert given == tokenizer(text, add_special_tokens=False)["input_ids"]
        sampled = tokens[span.start : span.end]
        expected = oracle.logprobs(tokens[: span.start], sampled, TEMPERATURE)
        assert [logprobs.pop(0) for _ in sampled] == pytest.approx(expected, abs=1e-4)
        position = span.end
    assert position == len(tokens)
    assert not logprobs


@contextmanager
def _rollouts(model: Path) -> Iterator[RolloutPool]:
    with engines(model, max_length=LENGTH) as generation:
        pool = RolloutPool(
            RolloutsConfig(max_failed_fraction=1.0),
            generation.engines,
            build_environments({"task": ENVIRONMENT}),
            max_total_sequence_length=LENGTH,
            generation_timeout_s=120.0,
            endpoint=EndpointSettings(host="127.0.0.1", port=0, token="secret", model_path=str(model)),
        )
        pool.start()
        try:
            pool.wait_ready()
            yield pool
        finally:
            pool.shutdown()


def _collect(pool: RolloutPool, prompts: list[str]) -> list[list[Trajectory]]:
    data: list[DatumSpec] = [
        {
            "message_log": [{"role": "user", "content": prompt, "token_ids": [2]}],
            "length": 1,
            "extra_env_info": {"answer": "1"},
            "loss_multiplier": 1.0,
            "idx": idx,
            "task_name": "task",
            "prompt": prompt,
        }
        for idx, prompt in enumerate(prompts)
    ]
    settings = SamplingSettings(max_new_tokens=8, temperature=TEMPERATURE, stop_token_ids=(EOS,))
    groups = pool.collect(data, samples_per_prompt=3, settings=settings, run_seed=1, step=0, timer=StepTimer())
    return pool.fetch(groups)
