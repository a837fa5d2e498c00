"""Traces: a rank with many layers follows to the byte from two with few, and so does its work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_grpo.config.schema import Config, LoraConfig
from megatron_grpo.models.shape import ExpertShape, ModelShape
from megatron_grpo.planning.dry.tracker import GRANULE
from megatron_grpo.planning.dry_run import DryReport, run_dry
from megatron_grpo.planning.trace import _list_depths, extrapolate_report, find_distinct_stages
from tests.unit.planning.test_dry_run import DENSE, EXPERTS, needs_no_gpu, small_run

pytestmark = needs_no_gpu


def deep(shape: ModelShape, layers: int, dense: int = 0) -> ModelShape:
    """The shape with this many layers, of which the first `dense` have no experts."""
    experts = shape.experts
    if experts is not None:
        experts = replace(experts, layers=(False,) * dense + (True,) * (layers - dense))
    return replace(shape, layers=layers, experts=experts)


def plain(config: Config) -> None:
    pass


def recompute(config: Config) -> None:
    config.policy.activation_checkpointing = True


def adapters_and_reference(config: Config) -> None:
    config.policy.lora = LoraConfig(rank=4)
    config.loss_fn.reference_policy_kl_penalty = 0.1


def flops_by_kind(report: DryReport) -> Counter[tuple[str, str]]:
    """Operations in the phases whose seconds are planned from them; those of a refit depend on its messages."""
    found: Counter[tuple[str, str]] = Counter()
    for work, times in report.work.items():
        if work.phase in ("logprobs", "reference", "train"):
            found[work.phase, work.kind] += round(times * work.flops)
    return found


@pytest.mark.parametrize(
    ("shape", "parallel", "stage", "change"),
    [
        pytest.param(
            deep(DENSE, 7), {"tensor": 2, "sequence": True, "data": 2}, 0, plain, id="tensor", marks=pytest.mark.slow
        ),
        pytest.param(deep(DENSE, 12), {"pipeline": 2}, 1, recompute, id="last_stage_recompute", marks=pytest.mark.slow),
        pytest.param(
            deep(DENSE, 24), {"pipeline": 2, "virtual_pipeline": 2}, 0, plain, id="virtual", marks=pytest.mark.slow
        ),
        pytest.param(deep(DENSE, 7), {"context": 2}, 0, adapters_and_reference, id="adapters", marks=pytest.mark.slow),
        pytest.param(
            deep(EXPERTS, 8, dense=2), {"expert": 2, "data": 2}, 0, plain, id="experts", marks=pytest.mark.slow
        ),
    ],
)
def test_two_depths_give_a_third_exactly(
    shape: ModelShape, parallel: dict[str, int | bool], stage: int, change: Callable[[Config], None]
) -> None:
    config = small_run(**parallel)
    config.refit.bucket_mib = 0.02  # few layers fill the buffers of a refit, as those of a large model do
    change(config)
    rank = stage * config.policy.parallel.world_size // config.policy.parallel.pipeline
    layers = find_distinct_stages(config, shape)[stage]
    depths = _list_depths(config, shape, layers)
    assert len(depths) == 2, "the rank is deep enough"
    low, high = (run_dry(one.config, one.shape, rank) for one in depths)
    step = depths[1].layers - depths[0].layers
    found, per_layer = extrapolate_report(low, high, (len(layers) - depths[0].layers) // step)
    whole = run_dry(config, shape, rank)
    # Buckets of gradients, which are padded, and scalars in reference cycles differ by less than these bytes.
    close = 64 * GRANULE
    assert found.peak_bytes == pytest.approx(whole.peak_bytes, abs=close)
    assert found.phases == pytest.approx(whole.phases, abs=close)
    assert found.end_bytes == pytest.approx(whole.end_bytes, abs=close)
    assert sum(found.holders.values()) == found.peak_bytes
    assert per_layer["weights"] > 0
    assert flops_by_kind(found) == pytest.approx(flops_by_kind(whole), rel=1e-9)
    assert found.passes == whole.passes


def test_windows_and_single_layers_run_at_their_full_depth() -> None:
    config = small_run()
    assert len(_list_depths(config, DENSE, range(DENSE.layers))) == 1
    windowed = replace(deep(DENSE, 8), window=16, windowed=(True, False) * 4)
    assert [one.layers for one in _list_depths(config, windowed, range(8))] == [8]


def test_stages_differ_by_embedding_head_and_layers() -> None:
    config = small_run(pipeline=4)
    assert find_distinct_stages(config, deep(DENSE, 8)) == {0: (0, 1), 1: (2, 3), 3: (6, 7)}
    some = replace(deep(EXPERTS, 8), experts=replace(_experts(EXPERTS), layers=(False,) * 3 + (True,) * 5))
    assert list(find_distinct_stages(config, some)) == [0, 1, 2, 3]
    config.policy.fp8.format, config.policy.fp8.last_layers_bf16 = "hybrid", 3
    assert list(find_distinct_stages(config, deep(DENSE, 8))) == [0, 1, 2, 3]


def _experts(shape: ModelShape) -> ExpertShape:
    assert shape.experts is not None
    return shape.experts
