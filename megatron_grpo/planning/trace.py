"""Dry runs of a layout's distinct ranks, in processes of their own; two shallow ones replace a deep one if exact."""

from __future__ import annotations

import logging
import multiprocessing
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_grpo.cluster.phases import phase
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.paths import read_family_environment, set_family_environment
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import split_policy

if TYPE_CHECKING:
    from megatron_grpo.planning.dry.work import Work
    from megatron_grpo.planning.dry_run import DryReport

_SHALLOW = 2
"""Layers of each model chunk in the shallower of two dry runs. With one, tensors of a layer would never be alive
together with those of the next."""


_REFIT = "refit"
"""The phase whose buffers depend on buckets of bytes, not on layers. It is taken from the deeper run, whose buckets are
full if those of the model are."""


class LateError(RunError):
    """A dry run is not done by its deadline."""


@dataclass(frozen=True, slots=True)
class RankTrace:
    """The dry run of one rank, for all ranks like it."""

    stage: int
    """Number of the rank's pipeline stage."""
    rank: int
    layers: int
    """Layers of the rank."""
    expert_skew: float
    """Tokens of each of the rank's experts, relative to their mean over all experts."""
    report: DryReport
    per_layer: Mapping[str, int]
    """Bytes of each kind at the peak that a layer adds; empty: the rank ran at its full depth."""


@dataclass(frozen=True, slots=True)
class _Depth:
    """A dry run of a rank with this many layers."""

    layers: int
    config: Config
    shape: ModelShape


def find_distinct_stages(config: Config, shape: ModelShape, *, few: bool = False) -> dict[int, tuple[int, ...]]:
    """Find pipeline stages that differ in layers, embedding or head.

    Returns the layer numbers of each; of stages that are alike, the first. With `few`, an inner stage with the layers
    of the first one is left out, since that takes more memory: it has the embedding and one more microbatch.
    """
    parallel = config.policy.parallel
    ranks_per_stage = parallel.world_size // parallel.pipeline
    stages: dict[tuple[Any, ...], tuple[int, tuple[int, ...]]] = {}
    for stage, shard in enumerate(split_policy(parallel, shape)[::ranks_per_stage]):
        kinds = tuple((shape.list_kinds(layer), layer in _find_bf16_layers(config, shape)) for layer in shard.layers)
        # Of stages that are alike the first holds activations of the most microbatches.
        stages.setdefault((shard.has_embedding and not few, shard.has_output, kinds), (stage, shard.layers))
    return dict(stages.values())


def _find_bf16_layers(config: Config, shape: ModelShape) -> frozenset[int]:
    # Some layers at either end compute in bfloat16 although the others compute in FP8.
    fp8 = config.policy.fp8
    if not fp8.is_on_device:
        return frozenset()
    return frozenset((*range(fp8.first_layers_bf16), *range(shape.layers - fp8.last_layers_bf16, shape.layers)))


def _list_depths(config: Config, shape: ModelShape, layers: Sequence[int]) -> list[_Depth]:
    """Choose a stage's dry runs: two shallow ones, or a full one."""
    # The bytes alive at a given moment are linear in the number of layers, as long as these are alike and equally many
    # in each chunk: two shallow runs give the line. Dense layers before those with experts stay in both runs. All
    # stages of a shallow model are like the stage of the rank, which never sees another stage's layers.
    parallel, chunks, full = config.policy.parallel, config.policy.parallel.virtual_pipeline, len(layers)
    with_experts = [shape.has_experts(layer) for layer in layers]
    dense = with_experts.index(True) if True in with_experts else 0
    alike = len({shape.list_kinds(layer) for layer in layers[dense:]}) == 1
    share = config.policy.optimizer.cpu_offload
    uneven = chunks > 1 and (dense or parallel.count_embedding or parallel.count_loss)
    differ = shape.windowed or _find_bf16_layers(config, shape)
    irregular = uneven or not alike or differ or share not in (0.0, 1.0)
    if irregular or full - dense <= (_SHALLOW + 2) * chunks:
        return [_Depth(full, config, shape)]
    even = replace(parallel, first_stage_layers=None, last_stage_layers=None, count_embedding=False, count_loss=False)
    depths = []
    for depth in (_SHALLOW, _SHALLOW + 1):
        shallow = with_experts[: dense + depth * chunks]
        experts = shape.experts
        if experts is not None:
            experts = replace(experts, layers=tuple(shallow) * parallel.pipeline)
        small = replace(shape, layers=len(shallow) * parallel.pipeline, experts=experts)
        depths.append(_Depth(len(shallow), replace(config, policy=replace(config.policy, parallel=even)), small))
    return depths


def extrapolate_report(low: DryReport, high: DryReport, factor: int) -> tuple[DryReport, dict[str, int]]:
    """Extrapolate two shallow reports to a rank with more layers.

    Args:
        low: the rank with fewer layers.
        high: the rank with one step of depth more.
        factor: steps of depth from `low` to the rank in question.

    Returns:
        The report, and the bytes of each kind that every step of depth adds to its peak.
    """
    # The peak of a phase is the maximum over many moments. Each of them is linear in the number of layers, but their
    # maximum need not be, so each is extrapolated on its own.
    moments = {
        key: _extrapolate_bytes(low.moments[key], high.moments[key], factor)
        for key in low.moments
        if key in high.moments and key[0] != _REFIT
    }
    phases: dict[str, int] = {}
    fullest = next(iter(moments))
    for key, moment in moments.items():
        phases[key[0]] = max(phases.get(key[0], 0), sum(moment.values()))
        fullest = key if sum(moment.values()) > sum(moments[fullest].values()) else fullest
    fewer, deeper = low.moments[fullest], high.moments[fullest]
    slope = {kind: deeper.get(kind, 0) - fewer.get(kind, 0) for kind in deeper}
    held_bytes = {
        name: low.end_bytes[name] + (high.end_bytes[name] - low.end_bytes[name]) * factor for name in low.end_bytes
    }
    if _REFIT in high.phases:
        before = name_phase_before_refit(high)
        phases[_REFIT] = held_bytes[before] + high.phases[_REFIT] - high.end_bytes[before]
    report = replace(
        low,
        peak_bytes=sum(moments[fullest].values()),
        phases={name: phases[name] for name in low.phases if name in phases},
        end_bytes=held_bytes,
        holders=moments[fullest],
        moments=moments,
        work=_extrapolate_work(low.work, high.work, factor),
    )
    return report, slope


def name_phase_before_refit(report: DryReport) -> str:
    """Name the phase before a refit: onload if colocated, else train."""
    return "onload" if "onload" in report.end_bytes else "train"


def _extrapolate_work(low: Counter[Work], high: Counter[Work], factor: int) -> Counter[Work]:
    # Operators of a layer occur more often in a deeper model. Others grow in size instead, such as messages of buckets
    # of gradients: their sums of operations and bytes are extrapolated, and shared by as many operators as `high` has.
    total: Counter[Work] = Counter()
    grown: dict[Work, list[float]] = {}
    for work in low.keys() | high.keys():
        before, after = low[work], high[work]
        if after >= before > 0:
            total[work] = before + (after - before) * factor
        else:
            sums = grown.setdefault(work._replace(flops=0.0, nbytes=0, sizes=(0, 0, 0, 1)), [0.0, 0.0, 0])
            weight = before + (after - before) * factor
            sums[0] += weight * work.flops
            sums[1] += weight * work.nbytes
            sums[2] += after
    for work, (flops, nbytes, number) in grown.items():
        number = max(int(number), 1)
        total[work._replace(flops=max(flops, 0.0) / number, nbytes=max(int(nbytes), 0) // number)] += number
    return total


def _extrapolate_bytes(low: Mapping[str, int], high: Mapping[str, int], factor: int) -> dict[str, int]:
    kinds = low.keys() | high.keys()
    return {kind: low.get(kind, 0) + (high.get(kind, 0) - low.get(kind, 0)) * factor for kind in kinds}


@contextmanager
def start_trace_pool(processes: int | None = None) -> Iterator[ProcessPoolExecutor]:
    """Start processes for dry runs, one a core, which see no GPU."""
    # They are forked from a server that has imported everything, because imports take longer than most dry runs.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_grpo.planning.dry_run"])
    before = multiprocessing.active_children()
    start = partial(_begin_process, read_family_environment())
    pool = ProcessPoolExecutor(processes or os.cpu_count(), mp_context=context, initializer=start)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process not in before:  # dry runs that nobody waits for any more
                process.kill()


def _begin_process(environment: dict[str, str]) -> None:
    set_family_environment(environment)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")


def _run_dry(
    config: Config, shape: ModelShape, rank: int, is_teacher: bool, expert_skew: float, moves: bool
) -> DryReport:
    import torch  # only in the processes of `start_trace_pool`

    from megatron_grpo.planning.dry_run import list_phases, run_dry

    torch.set_num_threads(1)
    phases = list_phases(config) - ({"refit"} if shape.head.is_scalar else set())
    return run_dry(config, shape, rank, is_teacher=is_teacher, expert_skew=expert_skew, moves=moves, phases=phases)


@dataclass(frozen=True, slots=True)
class PendingTrace:
    """The dry runs of one rank, under way."""

    stage: int
    rank: int
    layers: int
    expert_skew: float
    depths: Sequence[int]
    futures: Sequence[Future[DryReport]]

    def wait(self, deadline: float) -> RankTrace:
        """Wait for the rank's trace until `deadline`, of time.monotonic.

        Raises:
            LateError: a dry run is not done; the text names the rank.
            RunError: a dry run failed.
        """
        where = f"the dry run of rank {self.rank} (pipeline stage {self.stage})"
        try:
            with phase(where):
                reports = [future.result(max(0.0, deadline - time.monotonic())) for future in self.futures]
        except TimeoutError:
            raise LateError(f"{where} is not done in time; plan.timeout_s is its deadline") from None
        except Exception as error:  # whatever the rank's code raises: the layout does not build
            raise RunError(f"{where} failed: {type(error).__name__}: {error}") from error
        if len(reports) == 1:
            return RankTrace(self.stage, self.rank, self.layers, self.expert_skew, reports[0], {})
        low, high = self.depths
        step = high - low
        shallow, deep = reports
        report, slope = extrapolate_report(shallow, deep, (self.layers - low) // step)
        per_layer = {kind: size // step for kind, size in slope.items() if size > 0}
        return RankTrace(self.stage, self.rank, self.layers, self.expert_skew, report, per_layer)


def submit_traces(
    pool: ProcessPoolExecutor,
    config: Config,
    shape: ModelShape,
    *,
    is_teacher: bool = False,
    expert_skew: float = 1.0,
    moves: bool = True,
    few: bool = False,
) -> list[PendingTrace]:
    """Start the dry runs of a rank of each distinct stage.

    `is_teacher` and `moves` are those of `run_dry`, and `few` that of `find_distinct_stages`.
    """
    ranks_per_stage = config.policy.parallel.world_size // config.policy.parallel.pipeline
    pending = []
    for stage, layers in find_distinct_stages(config, shape, few=few).items():
        depths = _list_depths(config, shape, layers)
        runs = [
            pool.submit(_run_dry, depth.config, depth.shape, stage * ranks_per_stage, is_teacher, expert_skew, moves)
            for depth in depths
        ]
        numbers = [depth.layers for depth in depths]
        pending.append(PendingTrace(stage, stage * ranks_per_stage, len(layers), expert_skew, numbers, runs))
    return pending
