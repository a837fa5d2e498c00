"""Where routing can be replayed or kept, before any process starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.preflight import refit_memory
from megatron_grpo.preflight.layout_checks import find_layout_problems
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.refit_memory import count_routed_bytes, find_routed_remarks
from tests.support.config_problems import SMALL
from tests.support.hf_configs import QWEN3_MOE

REPLAY = "policy.moe.replay_routing=true"
ON_GPUS = ["cluster.gpus_per_node=8"]


def problems(base_overrides: list[str], *overrides: str, shape: ModelShape | None = None) -> dict[str, str]:
    """Subject -> text, of a model with experts unless another is given; the file of the run's model has none."""
    config = compose_config([*base_overrides, *(override for override in overrides if override != REPLAY)])
    config.policy.moe.replay_routing = REPLAY in overrides
    return {
        override.subject: override.text
        for override in find_layout_problems(config, shape or parse_model_shape(QWEN3_MOE))
    }


def test_frozen_routers_learn_nothing_from_losses(base_overrides: list[str]) -> None:
    config = compose_config(base_overrides)
    config.policy.moe.freeze_router, config.policy.moe.z_loss_coeff = True, 0.1
    (problem,) = find_layout_problems(config, parse_model_shape(QWEN3_MOE))
    assert problem.subject == "policy.moe.z_loss_coeff=0.1"
    assert "policy.moe.freeze_router=true leaves as they are; use 0" in problem.text
    config.policy.moe.z_loss_coeff = 0.0
    assert not list(find_layout_problems(config, parse_model_shape(QWEN3_MOE)))
    (problem,) = find_layout_problems(config, parse_model_shape(SMALL))
    assert problem.subject == "policy.moe.freeze_router=True"


def test_a_model_without_experts_replays_nothing(base_overrides: list[str]) -> None:
    dense = parse_model_shape(SMALL)
    assert problems(base_overrides, REPLAY, shape=dense) == {
        "policy.moe.replay_routing=True": "the model has no experts; use false"
    }
    assert problems(base_overrides, shape=dense) == {}


@pytest.mark.parametrize(
    ("overrides", "subject", "text"),
    [
        ([], "generation.engine.enforce_eager=False", "only without compilation; use true"),
        (
            [*ON_GPUS, "generation.engine.enable_prefix_caching=false"],
            "generation.engine.enable_prefix_caching=False",
            "with prefix caching only; use true",
        ),
        ([*ON_GPUS, "generation.parallel.pipeline=2"], "generation.parallel.pipeline=2", "from a pipeline; use 1"),
        (
            ["generation.engine.enforce_eager=true", "generation.parallel.pipeline=2"],
            "generation.parallel.pipeline=2",
            "from a pipeline; use 1",
        ),
    ],
)
def test_settings_with_which_engines_do_not_record(
    base_overrides: list[str], overrides: list[str], subject: str, text: str
) -> None:
    assert problems(base_overrides, *overrides) == {}
    ((problem, message),) = problems(base_overrides, REPLAY, *overrides).items()
    assert problem == subject
    assert text in message
    assert "policy.moe.replay_routing" in message


def test_settings_with_which_they_do(base_overrides: list[str]) -> None:
    speculative = "generation.engine.speculative={method: ngram, num_speculative_tokens: 2}"
    assert problems(base_overrides, REPLAY, *ON_GPUS, "generation.parallel.tensor=2", speculative) == {}
    eager = "generation.engine.enforce_eager=true"
    assert problems(base_overrides, REPLAY, eager, "generation.engine.enable_prefix_caching=false") == {}


def test_bytes_on_hosts_are_those_of_every_copy(base_overrides: list[str]) -> None:
    """Two layers with experts, 2 of 8 chosen in 6 bits: a byte a layer."""
    config = compose_config([*base_overrides, "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=3"])
    config.policy.moe.replay_routing = True
    shape = parse_model_shape({**QWEN3_MOE, "mlp_only_layers": [0, 2]})
    assert count_routed_bytes(config, shape, 100) == 2 * 100 * 12 * (1 + 1 + 1), "rollouts, partitions, one rank"
    config.policy.parallel.tensor, config.policy.parallel.pipeline = 2, 2
    assert count_routed_bytes(config, shape, 100) == 2 * 100 * 12 * (1 + 1 + 2), "stages have different layers"
    config.grpo.async_grpo.enabled, config.grpo.async_grpo.max_trajectory_age_steps = True, 3
    assert count_routed_bytes(config, shape, 100) == 2 * 100 * 12 * (4 + 1 + 2), "three batches are sampled ahead"
    config.policy.moe.replay_routing = False
    assert count_routed_bytes(config, shape, 100) == 0


def test_what_a_machine_cannot_hold_is_said(base_overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config, shape = compose_config(base_overrides), parse_model_shape(QWEN3_MOE)
    config.policy.moe.replay_routing = True
    needed = count_routed_bytes(config, shape, config.policy.max_total_sequence_length)
    assert needed > 0
    for total, is_told in ((needed, False), (needed - 1, True)):
        monkeypatch.setattr(
            refit_memory, "psutil", SimpleNamespace(virtual_memory=lambda total=total: SimpleNamespace(total=total))
        )
        remarks = list(find_routed_remarks(config, shape))
        assert [remark.subject for remark in remarks] == ["policy.moe.replay_routing=True"] * is_told
        assert all("bytes a token" in remark.text for remark in remarks)
