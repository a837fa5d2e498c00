"""Pipeline schedules, 1F1B and interleaved 1F1B, replayed from the seconds of every stage's passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """A pass in a stage's schedule."""

    is_backward: bool
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A replayed schedule."""

    seconds: float
    """From the first pass of any stage to the end of the last one."""
    busy: tuple[float, ...]
    """Seconds that each stage computes."""


def order_passes(stages: int, stage: int, chunks: int, microbatches: int, *, forward_only: bool = False) -> list[Slot]:
    """Order a stage's passes as Megatron-Core does: 1F1B, or interleaved with chunks.

    Narayanan et al. 2021, sections 2.2.1 and 2.2.2. Interleaved, the number of microbatches is a multiple of the number
    of stages.
    """
    # 1F1B: as many forward passes as stages come after this one, then a forward and a backward pass in turn, then the
    # remaining backward passes. Interleaved: as many microbatches as there are stages pass the first chunk, then the
    # second and so on, then the next microbatches do; and the warm-up of stages differs by two passes.
    total, round_passes = microbatches * chunks, stages * chunks

    def make_slot(number: int, is_backward: bool) -> Slot:
        within = number % round_passes
        chunk = within // stages
        if chunks == 1:
            return Slot(is_backward, 0, number)
        microbatch = number // round_passes * stages + within % stages
        return Slot(is_backward, chunks - 1 - chunk if is_backward else chunk, microbatch)

    if forward_only:
        return [make_slot(number, False) for number in range(total)]
    ahead = stages - stage - 1
    warm = min(ahead if chunks == 1 else 2 * ahead + (chunks - 1) * stages, total)
    order = [make_slot(number, False) for number in range(warm)]
    for number in range(total - warm):
        order += [make_slot(warm + number, False), make_slot(number, True)]
    return order + [make_slot(number, True) for number in range(total - warm, total)]


def run_schedule(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    microbatches: int,
    *,
    send_s: float = 0.0,
    blocking: bool = False,
    forward_only: bool = False,
) -> Timeline:
    """Replay the schedule: a pass waits for its stage and its input.

    Args:
        forward: seconds of a forward pass, by stage and chunk.
        backward: seconds of a backward pass, by stage and chunk; not read with `forward_only`.
        microbatches: number of microbatches of a replica.
        send_s: seconds that a tensor takes between stages.
        blocking: whether a stage computes nothing while it sends, as without overlapped sends.
        forward_only: whether there are no backward passes.

    Raises:
        ValueError: the interleaved schedule needs a multiple of the number of stages.
    """
    stages, chunks = len(forward), len(forward[0])
    if chunks > 1 and microbatches % stages:
        raise ValueError(f"an interleaved pipeline of {stages} stages takes no {microbatches} microbatches")
    orders = [order_passes(stages, stage, chunks, microbatches, forward_only=forward_only) for stage in range(stages)]
    # The stages take turns: each goes on through its order of passes until it needs an input that is not there yet.
    ends: dict[tuple[int, Slot], float] = {}
    free, busy, positions = [0.0] * stages, [0.0] * stages, [0] * stages
    waiting = list(range(stages))
    while waiting:
        progressed = False
        for stage in list(waiting):
            order = orders[stage]
            while positions[stage] < len(order):
                slot = order[positions[stage]]
                ready = _find_input_time(ends, stage, slot, stages, chunks, send_s)
                if ready is None:
                    break
                seconds = (backward if slot.is_backward else forward)[stage][slot.chunk]
                seconds += send_s if blocking and stages > 1 else 0.0
                free[stage] = max(free[stage], ready) + seconds
                busy[stage] += seconds
                ends[stage, slot] = free[stage]
                positions[stage] += 1
                progressed = True
            if positions[stage] == len(order):
                waiting.remove(stage)
        assert progressed, "a stage waits for a pass that never comes"
    return Timeline(max(free), tuple(busy))


def _find_input_time(
    ends: dict[tuple[int, Slot], float], stage: int, slot: Slot, stages: int, chunks: int, send_s: float
) -> float | None:
    """Find when a pass's input arrives; None: not yet known."""
    # Chunks go round the pipeline: stage 0 of chunk 1 follows the last stage of chunk 0.
    step = -1 if not slot.is_backward else 1
    neighbour, chunk = stage + step, slot.chunk
    if neighbour in (-1, stages):  # the neighbouring chunk is on the other end of the pipeline
        neighbour, chunk = neighbour % stages, chunk + step
    if chunk in (-1, chunks):
        if not slot.is_backward:
            return 0.0
        return ends.get((stage, Slot(False, slot.chunk, slot.microbatch)))  # the loss follows the last forward pass
    end = ends.get((neighbour, Slot(slot.is_backward, chunk, slot.microbatch)))
    return None if end is None else end + (send_s if neighbour != stage else 0.0)
