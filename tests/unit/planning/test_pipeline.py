"""Replayed schedules: closed forms, and a simulation written as processes that exchange messages."""

from __future__ import annotations

import random

import pytest

from megatron_grpo.planning.pipeline import order_passes, run_schedule


def simulated(forward: list[list[float]], backward: list[list[float]], microbatches: int, send_s: float) -> float:
    """Seconds of a schedule in small steps of time: at each tick every idle stage begins its next pass if it can."""
    stages, chunks = len(forward), len(forward[0])
    orders = [order_passes(stages, stage, chunks, microbatches) for stage in range(stages)]
    depth = stages * chunks
    ended: dict[tuple[bool, int, int], int] = {}  # by direction, place in the model, microbatch
    busy_until, places, now = [0] * stages, [0] * stages, 0
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        for stage in range(stages):
            if busy_until[stage] > now or places[stage] == len(orders[stage]):
                continue
            slot = orders[stage][places[stage]]
            place = slot.chunk * stages + stage
            if slot.is_backward:
                source = (True, place + 1, slot.microbatch) if place + 1 < depth else (False, place, slot.microbatch)
            else:
                source = (False, place - 1, slot.microbatch)
            if source[1] >= 0:
                travel = 0 if source[1] == place or stages == 1 else round(send_s)
                if source not in ended or ended[source] + travel > now:
                    continue
            seconds = (backward if slot.is_backward else forward)[stage][slot.chunk]
            busy_until[stage] = now + round(seconds)
            ended[slot.is_backward, place, slot.microbatch] = busy_until[stage]
            places[stage] += 1
        now += 1
    return max(busy_until)


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 1), (4, 4), (4, 9), (8, 32)])
def test_even_stages_have_the_known_bubble(stages: int, microbatches: int) -> None:
    found = run_schedule([[1.0]] * stages, [[2.0]] * stages, microbatches)
    assert found.seconds == pytest.approx(3.0 * (microbatches + stages - 1))
    assert found.busy == pytest.approx([3.0 * microbatches] * stages)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_interleaving_divides_the_bubble(chunks: int) -> None:
    stages, microbatches = 4, 12
    found = run_schedule([[1.0] * chunks] * stages, [[2.0] * chunks] * stages, microbatches)
    assert found.seconds == pytest.approx(3.0 * (microbatches * chunks + stages - 1))


@pytest.mark.parametrize("seed", range(12))
def test_uneven_stages_take_what_a_simulation_takes(seed: int) -> None:
    draw = random.Random(seed)
    stages, chunks = draw.choice([1, 2, 3, 4]), draw.choice([1, 1, 2, 3])
    chunks = chunks if stages > 1 else 1
    microbatches = stages * draw.randint(1, 4) if chunks > 1 else draw.randint(1, 9)
    forward, backward = ([[draw.randint(1, 9) * 1.0 for _ in range(chunks)] for _ in range(stages)] for _ in range(2))
    send = float(draw.randint(0, 3))
    expected = simulated(forward, backward, microbatches, send)
    assert run_schedule(forward, backward, microbatches, send_s=send).seconds == expected


def test_every_pass_is_in_the_schedule_once() -> None:
    for stage in range(4):
        order = order_passes(4, stage, 3, 8)
        passes = {(slot.is_backward, slot.chunk, slot.microbatch) for slot in order}
        assert len(order) == len(passes) == 2 * 3 * 8


def test_a_stage_holds_as_many_microbatches_as_stages_follow() -> None:
    for stage in range(4):
        held = most = 0
        for slot in order_passes(4, stage, 1, 9):
            held += -1 if slot.is_backward else 1
            most = max(most, held)
        assert most == 4 - stage


def test_forward_passes_alone_fill_the_pipeline_once() -> None:
    assert run_schedule([[1.0]] * 4, [], 6, forward_only=True).seconds == pytest.approx(6 + 3)


def test_sends_that_block_a_stage_lengthen_its_passes() -> None:
    found = run_schedule([[1.0]] * 2, [[2.0]] * 2, 3, send_s=0.5, blocking=True)
    assert found.busy == pytest.approx([3 * (1.5 + 2.5)] * 2)


def test_an_interleaved_schedule_needs_a_multiple_of_the_stages() -> None:
    with pytest.raises(ValueError, match="4 stages takes no 6"):
        run_schedule([[1.0] * 2] * 4, [[1.0] * 2] * 4, 6)
