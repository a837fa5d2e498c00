"""GPU memory of each distinct rank by phase, from dry runs and an explicit reserve."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_grpo.config.schema import Config
from megatron_grpo.planning.trace import RankTrace, name_phase_before_refit
from megatron_grpo.platform.hardware import Hardware
from megatron_grpo.preflight.refit_memory import NCCL_SENDING, estimate_nccl_bytes

if TYPE_CHECKING:
    from megatron_grpo.planning.dry_run import DryReport

GIB = 2**30
GRAPHS_GIB = 1.0
"""Assumed memory of an engine's CUDA graphs, which stay on the GPU while it sleeps; vLLM logs the figure of a run."""
STATIC = ("weights", "gradients", "optimizer", "FP8 weights")
"""Kinds of tensors that a rank holds throughout a step."""
_SET_UP = ("build", "first step")  # phases that hold less than the step after them


@dataclass(frozen=True, slots=True)
class Holder:
    """Tensors of one kind at the peak."""

    kind: str
    bytes: int
    layers: int
    """Layers of the rank."""
    bytes_per_layer: int | None
    """Bytes that each layer adds; the rest belongs to no layer. None: not known, since the rank ran at full depth."""

    def as_dict(self) -> dict[str, Any]:
        """Convert to JSON; sizes in GiB."""
        layer_bytes = self.bytes_per_layer
        split = {} if layer_bytes is None else {"layers": self.layers, "gib_per_layer": round(layer_bytes / GIB, 4)}
        return {"kind": self.kind, "gib": round(self.bytes / GIB, 3), **split}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """GPU memory of a rank of policy or value model, in bytes."""

    stage: int
    rank: int
    layers: int
    expert_skew: float
    phases: dict[str, int]
    """Most bytes of tensors in each phase."""
    parts: dict[str, dict[str, int]]
    """Most bytes in each phase, by kind of tensor; kinds of STATIC, and "other tensors" for all others."""
    reserve: int
    """Bytes besides tensors: CUDA's context, cuBLAS, NCCL, fragmentation, and a sleeping engine."""
    holders: list[Holder]
    """Tensors at the peak, the largest first."""
    asleep: int
    """Bytes of tensors that stay on the GPU during the engines' turn; 0: this phase was not run."""
    model: str = "policy"
    """Model of the rank: policy, or value model."""

    @property
    def phase(self) -> str:
        """The phase with the peak."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peak(self) -> int:
        """Most bytes at once, the reserve included."""
        return self.phases[self.phase] + self.reserve

    @property
    def static(self) -> int:
        """Bytes of weights, gradients and the optimizer's state at the peak."""
        return sum(holder.bytes for holder in self.holders if holder.kind in STATIC)

    def as_dict(self) -> dict[str, Any]:
        """Convert to JSON; sizes in GiB."""
        return {
            "model": self.model,
            "stage": self.stage,
            "rank": self.rank,
            "layers": self.layers,
            "expert_skew": self.expert_skew,
            "peak_gib": round(self.peak / GIB, 3),
            "reserve_gib": round(self.reserve / GIB, 3),
            "phases": {name: round(size / GIB, 3) for name, size in self.phases.items()},
            "holders": [holder.as_dict() for holder in self.holders],
        }


def build_rank_memory(
    config: Config,
    trace: RankTrace,
    hardware: Hardware,
    engine_weights: int = 0,
    *,
    model: str = "policy",
    beside: int = 0,
) -> RankMemory:
    """Build the memory of a traced rank's GPU.

    Args:
        config: the run's configuration.
        trace: the rank's dry run.
        hardware: the GPU and its reserve.
        engine_weights: bytes of an engine rank's weights, and of a layer's conversion, which are on a shared GPU
            during a refit.
        model: policy, or value model.
        beside: bytes that the other model holds on the same GPU.
    """
    report = trace.report
    phases = {name: size for name, size in report.phases.items() if name not in _SET_UP}
    if config.plan.workload == "pretrain":
        phases = {"train": phases["train"]}
    elif config.generation.is_colocated and "refit" in phases:
        # Gradients and optimizer are off the GPU by then; the dry run sends the weights with everything in place.
        before = report.end_bytes[name_phase_before_refit(report)]
        weights = _list_parts(report, "onload", before).get("weights", 0)
        phases = {**phases, "refit": phases["refit"] - before + weights + engine_weights}
    peak = max(phases.values())
    return RankMemory(
        stage=trace.stage,
        rank=trace.rank,
        layers=trace.layers,
        expert_skew=trace.expert_skew,
        phases=phases,
        parts={name: _list_parts(report, name, size) for name, size in phases.items()},
        reserve=sum(list_reserve_parts(config, peak, hardware, model=model).values()) + beside,
        holders=_list_holders(trace, phases),
        asleep=report.end_bytes.get("offload", 0),
        model=model,
    )


def _list_holders(trace: RankTrace, phases: Container[str]) -> list[Holder]:
    """List tensors of 1 MiB or more at the peak, largest first."""
    moments = (sizes for (phase, _, _), sizes in trace.report.moments.items() if phase in phases)
    fullest = max(moments, key=lambda sizes: sum(sizes.values()))
    return [
        Holder(_name_kind(kind), size, trace.layers, trace.per_layer.get(kind, 0) if trace.per_layer else None)
        for kind, size in sorted(fullest.items(), key=lambda item: -item[1])
        if size >= 2**20
    ]


def _list_parts(report: DryReport, phase: str, size: int) -> dict[str, int]:
    """List the bytes of a phase by kind."""
    # A refit of an extrapolated rank has no moments, so the phase before it stands for it.
    phases = (phase, name_phase_before_refit(report))
    moments = [moment for (name, _, _), moment in report.moments.items() if name in phases]
    fullest = min(moments, key=lambda moment: abs(sum(moment.values()) - size), default={})
    sizes = {kind: fullest[kind] for kind in STATIC if fullest.get(kind)}
    return {**sizes, "other tensors": size - sum(sizes.values())}


def _name_kind(kind: str) -> str:
    # Tensors that belong to no kernel are counted under the phase that made them.
    return f"other tensors of {kind}" if kind in ("build", "logprobs", "reference", "train", "refit") else kind


def list_reserve_parts(config: Config, tensors: int, hardware: Hardware, *, model: str = "policy") -> dict[str, int]:
    """List bytes that a rank needs besides its tensors, by purpose."""
    parts = {
        "CUDA context, cuBLAS, process groups": int(hardware.reserve_gib * GIB),
        "fragmentation": int(hardware.fragmentation * tensors),
    }
    if not config.needs_generation:
        return parts
    engines = config.generation.parallel
    peers = engines.ranks_per_engine * engines.data
    if model == "policy":
        parts["NCCL of the refit"] = estimate_nccl_bytes(config, peers, NCCL_SENDING)
    if config.generation.is_colocated:
        parts["sleeping engine"] = count_sleeping_engine(config, hardware)
    return parts


def count_sleeping_engine(config: Config, hardware: Hardware) -> int:
    """Count the bytes of a sleeping engine: its CUDA context and graphs."""
    graphs = 0.0 if config.generation.engine.enforce_eager else GRAPHS_GIB
    return int((hardware.reserve_gib + graphs) * GIB)
