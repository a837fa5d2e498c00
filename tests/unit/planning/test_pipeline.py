"""Replayed schedules and traces: closed forms, a simulation by processes, many layers from two."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatron_grpo.config.schema import Config, LoraConfig
from megatron_grpo.models.shape import ExpertShape, ModelShape
from megatron_grpo.planning.dry.tracker import GRANULE
from megatron_grpo.planning.dry_run import DryReport, run_dry
from megatron_grpo.planning.pipeline import order_passes, run_schedule
from megatron_grpo.planning.trace import _list_depths, extrapolate_report, find_distinct_stages
from tests.unit.planning.test_dry_run import DENSE, EXPERTS, needs_no_gpu, small_run


def simulate_schedule(
    forward: list[list[float]], backward: list[list[float]], microbatches: int, send_s: float
) -> float:
    """Seconds of a schedule in ticks: at each, every idle stage begins its next pass if it can."""
    stages, chunks = len(forward), len(forward[0])
    orders = [order_passes(stages, stage, chunks, microbatches) for stage in range(stages)]
    depth = stages * chunks
    ended: dict[tuple[bool, int, int], int] = {}  # by direction, place in the model, microbatch
    busy_until, next_passes, now = [0] * stages, [0] * stages, 0
    while any(next_pass < len(order) for next_pass, order in zip(next_passes, orders, strict=True)):
        for stage in range(stages):
            if busy_until[stage] > now or next_passes[stage] == len(orders[stage]):
                continue
            slot = orders[stage][next_passes[stage]]
            model_stage = slot.chunk * stages + stage
            if slot.is_backward:
                source = (
                    (True, model_stage + 1, slot.microbatch)
                    if model_stage + 1 < depth
                    else (False, model_stage, slot.microbatch)
                )
            else:
                source = (False, model_stage - 1, slot.microbatch)
            if source[1] >= 0:
                travel = 0 if source[1] == model_stage or stages == 1 else round(send_s)
                if source not in ended or ended[source] + travel > now:
                    continue
            seconds = (backward if slot.is_backward else forward)[stage][slot.chunk]
            busy_until[stage] = now + round(seconds)
            ended[slot.is_backward, model_stage, slot.microbatch] = busy_until[stage]
            next_passes[stage] += 1
        now += 1
    return max(busy_until)


@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches"),
    [(1, 1, 3), (4, 1, 1), (4, 1, 4), (4, 1, 9), (8, 1, 32), (4, 2, 12), (4, 3, 12), (4, 4, 12)],
)
def test_even_stages_have_the_known_bubble_which_interleaving_divides(
    stages: int, chunks: int, microbatches: int
) -> None:
    schedule = run_schedule([[1.0] * chunks] * stages, [[2.0] * chunks] * stages, microbatches)
    assert schedule.seconds == pytest.approx(3.0 * (microbatches * chunks + stages - 1))
    assert schedule.busy == pytest.approx([3.0 * microbatches * chunks] * stages)


@pytest.mark.parametrize("seed", range(12))
def test_uneven_stages_take_what_a_simulation_takes(seed: int) -> None:
    draw = random.Random(seed)
    stages, chunks = draw.choice([1, 2, 3, 4]), draw.choice([1, 1, 2, 3])
    chunks = chunks if stages > 1 else 1
    microbatches = stages * draw.randint(1, 4) if chunks > 1 else draw.randint(1, 9)
    forward, backward = ([[draw.randint(1, 9) * 1.0 for _ in range(chunks)] for _ in range(stages)] for _ in range(2))
    send = float(draw.randint(0, 3))
    expected = simulate_schedule(forward, backward, microbatches, send)
    assert run_schedule(forward, backward, microbatches, send_s=send).seconds == expected


def test_a_stage_has_every_pass_once_and_holds_as_many_microbatches_as_stages_follow() -> None:
    for stage in range(4):
        order = order_passes(4, stage, 3, 8)
        passes = {(slot.is_backward, slot.chunk, slot.microbatch) for slot in order}
        assert len(order) == len(passes) == 2 * 3 * 8
        in_flight = most_in_flight = 0
        for slot in order_passes(4, stage, 1, 9):
            in_flight += -1 if slot.is_backward else 1
            most_in_flight = max(most_in_flight, in_flight)
        assert most_in_flight == 4 - stage


def test_forward_passes_alone_sends_that_block_and_uneven_interleaving() -> None:
    assert run_schedule([[1.0]] * 4, [], 6, forward_only=True).seconds == pytest.approx(6 + 3)
    schedule = run_schedule([[1.0]] * 2, [[2.0]] * 2, 3, send_s=0.5, blocking=True)
    assert schedule.busy == pytest.approx([3 * (1.5 + 2.5)] * 2)
    with pytest.raises(ValueError, match="4 stages takes no 6"):
        run_schedule([[1.0] * 2] * 4, [[1.0] * 2] * 4, 6)


def deep(shape: ModelShape, layers: int, dense: int = 0) -> ModelShape:
    """The shape with this many layers, of which the first `dense` have no experts."""
    experts = shape.experts
    if experts is not None:
        experts = replace(experts, layers=(False,) * dense + (True,) * (layers - dense))
    return replace(shape, layers=layers, experts=experts)


def keep_settings(config: Config) -> None:
    pass


def recompute(config: Config) -> None:
    config.policy.activation_checkpointing = True


def use_adapters_and_reference(config: Config) -> None:
    config.policy.lora = LoraConfig(rank=4)
    config.loss_fn.reference_policy_kl_penalty = 0.1


def flops_by_kind(report: DryReport) -> Counter[tuple[str, str]]:
    """Operations in the phases whose seconds are planned from them; those of a refit depend on its messages."""
    flops: Counter[tuple[str, str]] = Counter()
    for work, times in report.work.items():
        if work.phase in ("logprobs", "reference", "train"):
            flops[work.phase, work.kind] += round(times * work.flops)
    return flops


@needs_no_gpu
@pytest.mark.parametrize(
    ("shape", "parallel", "stage", "change"),
    [
        pytest.param(
            deep(DENSE, 7),
            {"tensor": 2, "sequence": True, "data": 2},
            0,
            keep_settings,
            id="tensor",
            marks=pytest.mark.slow,
        ),
        pytest.param(deep(DENSE, 12), {"pipeline": 2}, 1, recompute, id="last_stage_recompute", marks=pytest.mark.slow),
        pytest.param(
            deep(DENSE, 24),
            {"pipeline": 2, "virtual_pipeline": 2},
            0,
            keep_settings,
            id="virtual",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            deep(DENSE, 7), {"context": 2}, 0, use_adapters_and_reference, id="adapters", marks=pytest.mark.slow
        ),
        pytest.param(
            deep(EXPERTS, 8, dense=2), {"expert": 2, "data": 2}, 0, keep_settings, id="experts", marks=pytest.mark.slow
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
    low, high = (run_dry(depth.config, depth.shape, rank) for depth in depths)
    step = depths[1].layers - depths[0].layers
    report, per_layer = extrapolate_report(low, high, (len(layers) - depths[0].layers) // step)
    full_report = run_dry(config, shape, rank)
    # Buckets of gradients, which are padded, and scalars in reference cycles differ by less than these bytes.
    close = 64 * GRANULE
    assert report.peak_bytes == pytest.approx(full_report.peak_bytes, abs=close)
    assert report.phases == pytest.approx(full_report.phases, abs=close)
    assert report.end_bytes == pytest.approx(full_report.end_bytes, abs=close)
    assert sum(report.holders.values()) == report.peak_bytes
    assert per_layer["weights"] > 0
    assert flops_by_kind(report) == pytest.approx(flops_by_kind(full_report), rel=1e-9)
    assert report.passes == full_report.passes


@needs_no_gpu
def test_windows_and_single_layers_run_at_their_full_depth() -> None:
    config = small_run()
    assert len(_list_depths(config, DENSE, range(DENSE.layers))) == 1
    windowed = replace(deep(DENSE, 8), window=16, windowed=(True, False) * 4)
    assert [depth.layers for depth in _list_depths(config, windowed, range(8))] == [8]


@needs_no_gpu
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
