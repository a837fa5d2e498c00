"""Arithmetic of a layout before any dry run, against dry runs."""

from __future__ import annotations

import pytest

from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.dry_run import run_dry
from megatron_grpo.planning.estimates import (
    count_host_bytes,
    count_replayed_bytes,
    count_static_bytes,
    estimate_activation_bytes,
    estimate_step_s,
)
from megatron_grpo.planning.generation_cost import find_lengths
from megatron_grpo.platform.hardware import load_hardware
from tests.support.hf_configs import QWEN3_MOE
from tests.unit.planning.test_dry_run import DENSE, EXPERTS, needs_no_gpu, small_run
from tests.unit.planning.test_layouts import recipe


@needs_no_gpu
@pytest.mark.parametrize(
    ("shape", "parallel", "precision", "optimizer"),
    [
        (DENSE, {"tensor": 2, "sequence": True, "data": 4}, "bfloat16", "adamw"),
        (DENSE, {"data": 2}, "float32", "adamw"),
        (EXPERTS, {"expert": 2, "data": 4}, "bfloat16", "adamw"),
        (DENSE, {"pipeline": 2}, "bfloat16", "adamw"),
        (DENSE, {"tensor": 2, "sequence": True}, "bfloat16", "muon"),
        (EXPERTS, {"expert": 2, "data": 2}, "bfloat16", "muon"),
    ],
)
def test_static_bytes_are_those_of_a_dry_run(
    shape: ModelShape, parallel: dict[str, int | bool], precision: str, optimizer: str
) -> None:
    config = small_run(**parallel)
    config.policy.precision = precision  # type: ignore[assignment]
    config.policy.optimizer.name = optimizer  # type: ignore[assignment]
    holders = run_dry(config, shape, 0, moves=False).holders
    counted = sum(holders.get(kind, 0) for kind in ("weights", "gradients", "optimizer"))
    assert count_static_bytes(config, shape) == pytest.approx(counted, rel=0.06)  # norms and padding are left out


def test_adapters_have_no_reference_of_their_own() -> None:
    config = small_run()
    config.policy.lora.rank = 8
    alone = count_static_bytes(config, DENSE)
    config.loss_fn.reference_policy_kl_penalty = 0.1
    assert count_static_bytes(config, DENSE) == alone


def test_activations_shrink_with_recomputation_context_and_tensor_parallel_ranks() -> None:
    config = small_run(data=4)
    plain = estimate_activation_bytes(config, DENSE)
    for changed in (small_run(context=2, data=2), small_run(tensor=2, sequence=True, data=2)):
        assert estimate_activation_bytes(changed, DENSE) < plain
    config.policy.activation_checkpointing = True
    assert estimate_activation_bytes(config, DENSE) < plain


def test_host_memory_is_what_is_kept_off_the_gpus() -> None:
    config = small_run(data=4)
    assert count_host_bytes(config, DENSE) == 0
    numbers = count_static_bytes(small_run(), DENSE) / 18
    config.policy.optimizer.cpu_offload = 1.0
    assert count_host_bytes(config, DENSE) == pytest.approx(16 * numbers)  # of all replicas together
    config.loss_fn.reference_policy_kl_penalty, config.reference.offload = 0.1, True
    assert count_host_bytes(config, DENSE) == pytest.approx((16 + 4 * 2) * numbers)
    config.generation.placement, config.generation.parallel.data = "colocated", 2
    assert count_host_bytes(config, DENSE) == pytest.approx((16 + 4 * 2 + 4 * 2 + 2 * 2) * numbers)


def test_host_memory_has_the_experts_of_replayed_tokens() -> None:
    config, shape = small_run(data=4), parse_model_shape({**QWEN3_MOE, "num_hidden_layers": 4})
    before = count_host_bytes(config, shape)
    config.policy.moe.replay_routing = True
    added = count_host_bytes(config, shape) - before
    assert added == count_replayed_bytes(config, shape) > 0
    tokens = find_lengths(config).totals.mean() * config.samples_per_step
    assert added == pytest.approx(4 * tokens * 3), "a byte a layer: rollouts, partitions, ranks"
    config.plan.workload = "pretrain"
    assert count_replayed_bytes(config, shape) == 0


def test_estimates_grow_with_recomputation_and_bubbles() -> None:
    config, gpu = recipe(), load_hardware("h100")
    config.policy.parallel.data, config.policy.parallel.pipeline = 2, 4
    plain = estimate_step_s(config, DENSE, gpu)
    config.policy.activation_checkpointing = True
    assert estimate_step_s(config, DENSE, gpu) > plain
    config.policy.activation_checkpointing = False
    config.policy.parallel.data, config.policy.parallel.pipeline = 8, 1
    assert estimate_step_s(config, DENSE, gpu) < plain
