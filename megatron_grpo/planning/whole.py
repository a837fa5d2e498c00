"""The plan of a run: memory by rank and engine, seconds by phase, and the assumptions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import exchange_head
from megatron_grpo.models.heads import VALUE
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import find_folder_shape, find_value_shape
from megatron_grpo.planning.device_memory import GIB, RankMemory, build_rank_memory, list_reserve_parts
from megatron_grpo.planning.engine_layouts import find_room_problems
from megatron_grpo.planning.estimates import count_replayed_bytes
from megatron_grpo.planning.generation_cost import EngineSize, find_lengths, size_engine
from megatron_grpo.planning.operation import (
    RAY_SHARE,
    CheckpointPlan,
    compare_host,
    find_host_memory,
    list_host_parts,
    plan_checkpoints,
    time_start,
)
from megatron_grpo.planning.policy_layouts import count_idle_gpus, has_own_engines
from megatron_grpo.planning.step import StepTimes, build_step_times
from megatron_grpo.planning.trace import PendingTrace, RankTrace, submit_traces
from megatron_grpo.platform.hardware import Hardware, find_hardware, list_profiles
from megatron_grpo.preflight.refit_memory import count_token_bytes, estimate_open_bytes, list_refit_parts


@dataclass(frozen=True, slots=True)
class Advice:
    """Keys with which a run fits, or the reason that nothing fits."""

    text: str
    overrides: tuple[str, ...] = ()
    """The keys that make the run fit; empty: none were found."""
    peak_gib: float | None = None
    """GiB of the fullest GPU with these keys."""
    tried: int = 0
    """Plans that were made."""

    def as_dict(self) -> dict[str, Any]:
        """Convert to JSON."""
        return {
            "fits": bool(self.overrides),
            "overrides": list(self.overrides),
            "peak_gib": None if self.peak_gib is None else round(self.peak_gib, 3),
            "text": self.text,
            "plans_tried": self.tried,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory and time of a run on given hardware."""

    config: Config
    shape: ModelShape
    hardware: Hardware
    ranks: list[RankMemory]
    """Distinct ranks of the policy, with balanced and with skewed experts."""
    engine: EngineSize | None
    """An engine's fullest rank; None: the step has no engines."""
    times: StepTimes | None
    """Seconds by phase; None: engines have no room for a sequence."""
    traces: list[RankTrace]
    """The dry runs of the ranks."""
    planned_s: float
    """Seconds that the plan took."""
    value_ranks: list[RankMemory] = field(default_factory=list)
    """Distinct ranks of the value model."""
    value_traces: list[RankTrace] = field(default_factory=list)
    """The dry runs of the value model's ranks."""
    teacher_ranks: list[RankMemory] = field(default_factory=list)
    """Distinct ranks of the teachers."""
    teacher_traces: list[tuple[Config, list[RankTrace]]] = field(default_factory=list)
    """For each teacher the configuration, with the teacher as the policy, and the dry runs of its ranks."""
    advice: Advice | None = None
    """Advice for a run that does not fit; None: it fits, or there was no search."""

    def time_on(self, gpu: Hardware) -> StepTimes:
        """Compute seconds by phase on other hardware.

        Raises:
            ValueError: an engine has no room for a sequence.
        """
        balanced = [trace for trace in self.traces if trace.expert_skew == 1.0]
        lengths, workload = find_lengths(self.config), self.config.plan.workload
        value = [trace for trace in self.value_traces if trace.expert_skew == 1.0]
        teachers = self.teacher_traces
        return build_step_times(
            self.config, self.shape, balanced, gpu, lengths, workload=workload, value_ranks=value, teachers=teachers
        )

    @property
    def all_ranks(self) -> list[RankMemory]:
        """Distinct ranks of all models."""
        return [*self.ranks, *self.value_ranks, *self.teacher_ranks]

    @property
    def fullest(self) -> RankMemory:
        """The rank with the highest peak."""
        return max(self.all_ranks, key=lambda rank: rank.peak)

    @property
    def gpus(self) -> int:
        """GPUs of the run's nodes."""
        return self.config.cluster.num_nodes * self.config.cluster.gpus

    @property
    def idle(self) -> int:
        """GPUs of the run's nodes that nothing uses."""
        return count_idle_gpus(self.config)

    @property
    def verdict(self) -> str:
        """Whether the run fits, and how many of its GPUs are idle."""
        idle = f", {self.idle} of {self.gpus} idle" if self.idle else ""
        return ("does not fit" if self.problems else "fits") + idle

    @property
    def shortages(self) -> list[str]:
        """Why the run does not fit: GPUs of models, engines, hosts."""
        worst, memory_gib, shortages = self.fullest, self.hardware.memory_gib, list(self._find_engine_shortages())
        if worst.peak > memory_gib * GIB:
            skew = f" with {worst.expert_skew:g} times the mean tokens of an expert" if worst.expert_skew > 1 else ""
            of = "" if worst.model == "policy" else f" of the {worst.model}"
            usage = f"{worst.peak / GIB:.1f} of {memory_gib:.1f} GiB in {worst.phase}{skew}"
            shortages.insert(0, f"rank {worst.rank}{of} (pipeline stage {worst.stage}) takes {usage}")
        needed, available = self.host
        if available is not None and needed > available:
            keeps = f"keeps {needed:.0f} GiB ({self._describe_host()}), and Ray lets processes have {available:.0f} GiB"
            shortages.append(f"a node's host {keeps} ({RAY_SHARE:.0%} of plan.host_memory_gib)")
        return shortages

    @property
    def problems(self) -> list[str]:
        """Reasons why the run does not fit, the first with the advice."""
        first, *further = self.shortages or [""]
        if not first:
            return []
        return [f"{first}; {self.advice.text}" if self.advice is not None else first, *further]

    def _find_engine_shortages(self) -> Iterator[str]:
        """Find engines without room for a sequence, or for models beside them."""
        if self.engine is None:
            return
        yield from (
            f"{problem.subject} {problem.text}"
            for problem in find_room_problems(self.config, self.shape, self.hardware)
        )
        if not self.config.generation.is_colocated:
            return
        # When vLLM wakes it takes its share of all the GPU's memory, whatever else is there.
        share, memory_gib = self.config.generation.engine.gpu_memory_utilization, self.hardware.memory_gib
        if share * memory_gib * GIB + self.beside_engine > memory_gib * GIB:
            yield (
                f"an engine that is awake takes generation.engine.gpu_memory_utilization={share:g} of "
                f"{memory_gib:.1f} GiB, and offloaded models keep {self.beside_engine / GIB:.1f} GiB of the GPU"
            )

    @property
    def beside_engine(self) -> float:
        """Bytes that offloaded models and CUDA contexts keep of a shared GPU."""
        models = [self.ranks, *([self.value_ranks] if self.value_ranks else [])]
        return sum(max(rank.asleep for rank in ranks) + self.hardware.reserve_gib * GIB for ranks in models)

    @property
    def host(self) -> tuple[float, float | None]:
        """GiB of a node's host memory: needed, and usable (None: unknown)."""
        return compare_host(self.config, self.shape, self.hardware)

    def _describe_host(self) -> str:
        parts = list_host_parts(self.config, self.shape).items()
        return ", ".join(f"{name} {size:.0f}" for name, size in parts if size >= 0.5)

    @property
    def checkpoints(self) -> CheckpointPlan | None:
        """Checkpoints; None: the run writes none, or its steps are not planned."""
        if self.times is None:
            return None
        return plan_checkpoints(self.config, self.shape, self.hardware, self.times.step_s)

    def as_dict(self) -> dict[str, Any]:
        """Convert to JSON; figures are null where engines have no room."""
        times, checkpoints = self.times, self.checkpoints
        return {
            "fits": not self.problems,
            "problems": self.problems,
            "advice": None if self.advice is None else self.advice.as_dict(),
            "gpus": self.gpus,
            "idle_gpus": self.idle,
            "host_gib": round(self.host[0], 1),
            "host_parts_gib": {name: round(size, 1) for name, size in list_host_parts(self.config, self.shape).items()},
            "host_memory_gib": find_host_memory(self.config, self.hardware),
            "routed_bytes_per_token": count_token_bytes(self.config, self.shape),
            "routed_gib": round(count_replayed_bytes(self.config, self.shape) / GIB, 3),
            "peak_gib": round(self.fullest.peak / GIB, 3),
            "ranks": [rank.as_dict() for rank in self.all_ranks],
            "step_s": None if times is None else round(times.step_s, 3),
            "phase_s": None if times is None else {name: round(seconds, 3) for name, seconds in times.phase_s.items()},
            "tokens_per_s_per_gpu": None if times is None else round(times.tokens_per_s_per_gpu, 1),
            "refit_s": None if times is None else round(times.refit_s, 4),
            "refit_bytes": None if times is None else times.refit_bytes,
            "checkpoints": checkpoints and checkpoints.as_dict(),
            "start_s": round(time_start(self.config, self.shape), 1),
            "assumptions": self.assumptions,
        }

    @property
    def assumptions(self) -> list[str]:
        """Assumptions behind the figures, besides the configuration."""
        worst = self.fullest
        parts = list_reserve_parts(self.config, worst.phases[worst.phase], self.hardware, model=worst.model)
        unexplained = worst.reserve - sum(parts.values())
        # On a shared GPU the other model keeps memory too, which is in `reserve` but is no part of the list.
        parts |= {"the other model on the GPU": unexplained} if unexplained else {}
        reserve = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        tokens = self.config.policy.microbatch_tokens
        assumptions = [
            f"{self.hardware.name}: {self.hardware.memory_gib:g} GiB a GPU",
            f"reserve besides tensors, in GiB: {reserve}",
            f"microbatches are full, {tokens} tokens each, and all tokens are in the loss",
        ]
        if self.shape.experts is not None:
            assumptions.append(
                f"experts of the fullest rank get {self.config.plan.expert_skew:g} x the mean of the tokens"
            )
        servers = [name for name, teacher in self.config.named_teachers.items() if teacher.server_url is not None]
        if servers:
            assumptions.append(f"servers of {', '.join(servers)} are left out: their GPUs are not known")
        if not self.hardware.nvlink_bytes_per_s:
            speed = self.hardware.local_bytes_per_s / 1e9
            assumptions.append(
                f"{self.hardware.name} has no NVLink: GPUs of a node exchange messages over PCIe, {speed:g} GB/s"
            )
        needed, available = self.host
        of = "host memory not known, plan.host_memory_gib" if available is None else f"of {available:.0f} GiB"
        assumptions.append(f"host memory, in GiB of a node: {self._describe_host()}; {needed:.0f} {of}")
        if token_bytes := count_token_bytes(self.config, self.shape):
            total = count_replayed_bytes(self.config, self.shape) / GIB
            assumptions.append(
                f"recorded experts: {token_bytes} bytes a token, {total:.1f} GiB in host memory over all nodes"
            )
        if self.engine is not None:
            assumptions.append(
                f"an engine's GPU has {self.engine.weight_bytes / GIB:.1f} GiB of weights, "
                f"{self.engine.activation_bytes / GIB:.1f} GiB of activations and graphs, and a cache of "
                f"{self.engine.cache_tokens} tokens"
            )
            refit = list_refit_parts(self.config, self.shape, self.hardware)
            sizes = ", ".join(f"{name} {size / GIB:.1f}" for name, size in refit.items() if size)
            assumptions.append(f"a refit takes of an engine's GPU, in GiB: {sizes}")
        return assumptions + ([] if self.times is None else self.times.assumptions)


def find_profile(config: Config) -> Hardware:
    """Find the hardware that a plan assumes: plan.hardware, else cluster.gpu.

    Raises:
        ValueError: neither is given, or the file holds no profile.
    """
    gpu = find_hardware(config)
    if gpu is None:
        raise ValueError(f"a plan needs the GPU: give cluster.gpu={', '.join(list_profiles())}")
    # A node may have fewer GPUs than NVLink could join, such as four of eight; a rack's domain reaches over nodes.
    domain = gpu.gpus_per_domain
    per_node = config.cluster.gpus or domain
    return replace(gpu, gpus_per_domain=min(domain, per_node)) if domain <= _MOST_OF_NODE else gpu


_MOST_OF_NODE = 16
"""Most GPUs that NVLink joins within one node; larger domains are racks of nodes."""


def find_fp8_problems(config: Config, gpu: Hardware) -> Iterator[Problem]:
    """Find FP8 recipes for which the planned GPU has no units."""
    fp8, capability = config.policy.fp8, tuple(int(part) for part in f"{gpu.capability:.1f}".split("."))
    if fp8.is_on_device and gpu.capability and capability < fp8.least_capability:
        least = ".".join(map(str, fp8.least_capability))
        fix = "off" if capability < (8, 9) else "recipe=tensorwise"
        text = (
            f"recipe={fp8.recipe} needs GPUs of compute capability {least}, and {gpu.name} has {gpu.capability:.1f}; "
        )
        yield Problem(f"policy.fp8.format={fp8.format}", f"{text}use {fix}")


def as_planned(config: Config) -> Config:
    """Adapt a configuration to plan.workload: pretrain has its own lengths, no reference."""
    plan, policy = config.plan, config.policy
    if plan.workload == "rl":
        return config
    longest = plan.sequence_length or policy.max_total_sequence_length
    return replace(
        config,
        policy=replace(policy, max_total_sequence_length=longest),
        loss_fn=replace(config.loss_fn, reference_policy_kl_penalty=0.0),
    )


@dataclass(frozen=True, slots=True)
class PendingPlan:
    """A plan whose dry runs are not yet done."""

    config: Config
    shape: ModelShape
    hardware: Hardware
    traces: list[PendingTrace]
    value_traces: list[PendingTrace]
    teacher_traces: list[tuple[Config, list[PendingTrace]]]
    began: float

    def wait(self, deadline: float) -> Plan:
        """Wait for the dry runs until `deadline`, of time.monotonic.

        Raises:
            LateError: a dry run is not done.
            RunError: a dry run failed.
            ValueError: plan.lengths_from has no rollouts.
        """
        config, shape, gpu = self.config, self.shape, self.hardware
        traces = [pending.wait(deadline) for pending in self.traces]
        value_traces = [pending.wait(deadline) for pending in self.value_traces]
        teachers = [(teacher, [pending.wait(deadline) for pending in ranks]) for teacher, ranks in self.teacher_traces]
        has_engines = has_own_engines(config)
        engine = size_engine(config, shape, gpu) if has_engines else None
        beside = 0 if engine is None else engine.weight_bytes + estimate_open_bytes(config, shape, gpu)
        # Models that share GPUs with engines also share them with each other, and are there together while they learn.
        together = config.generation.is_colocated and has_engines
        of_policy, of_value = (
            max((trace.report.end_bytes["train"] for trace in traced_ranks), default=0) if together else 0
            for traced_ranks in (traces, value_traces)
        )
        of_teachers = sum(
            max(trace.report.end_bytes["teacher"] for trace in ranks) if together else 0 for _, ranks in teachers
        )
        ranks = [build_rank_memory(config, trace, gpu, beside, beside=of_value + of_teachers) for trace in traces]
        value = config if config.value_model is None else replace(config, policy=config.value_model)
        values = [build_rank_memory(value, trace, gpu, model="value model", beside=of_policy) for trace in value_traces]
        plan = Plan(
            config=config,
            shape=shape,
            hardware=gpu,
            ranks=ranks,
            engine=engine,
            times=None,
            traces=traces,
            planned_s=time.monotonic() - self.began,
            value_ranks=values,
            value_traces=value_traces,
            teacher_ranks=[
                build_rank_memory(teacher, trace, gpu, model="teacher", beside=of_policy)
                for teacher, traced_ranks in teachers
                for trace in traced_ranks
            ],
            teacher_traces=teachers,
        )
        has_room = engine is None or engine.count_sequences(float(find_lengths(config).totals.mean()))
        return replace(plan, times=plan.time_on(gpu) if has_room else None)


def submit_plan(config: Config, shape: ModelShape, pool: ProcessPoolExecutor, *, brief: bool = False) -> PendingPlan:
    """Begin the dry runs of a plan.

    Args:
        config: the run's configuration, which has passed the run's checks.
        shape: sizes of its model.
        pool: processes of `trace.start_trace_pool`.
        brief: leave out slow parts that rarely change the verdict: the phases between training and generation,
            skewed experts, and the stages between the first and the last if they have the same layers.

    Raises:
        ValueError: there is no profile of the hardware.
    """
    began = time.monotonic()
    gpu, config = find_profile(config), as_planned(config)
    problems = list(find_fp8_problems(config, gpu))
    if problems:
        raise ConfigError(problems)
    models = [(config, shape)]
    if config.value_model is not None and config.plan.workload == "rl":
        value_shape = find_value_shape(config) if config.value.model.path is not None else shape
        if value_shape is None:
            text = "is not on this machine; give a folder with its config.json"
            raise ConfigError([Problem(f"value.model.path={config.value.model.path}", text)])
        models.append((replace(config, policy=config.value_model), exchange_head(value_shape, VALUE)))
    traces = []
    for model_config, size in models:
        of_model = submit_traces(pool, model_config, size, moves=not brief and config.plan.workload == "rl", few=brief)
        if size.experts is not None and config.plan.expert_skew > 1 and not brief:
            of_model += submit_traces(pool, model_config, size, expert_skew=config.plan.expert_skew, moves=False)
        traces.append(of_model)
    value_traces = traces[1] if len(traces) > 1 else []
    teachers = [
        (teacher, submit_traces(pool, teacher, size, is_teacher=True, few=brief))
        for teacher, size in _list_teachers(config)
    ]
    return PendingPlan(config, shape, gpu, traces[0], value_traces, teachers, began)


def _list_teachers(config: Config) -> Iterator[tuple[Config, ModelShape]]:
    """Iterate over configurations with a teacher as the policy, and its sizes."""
    for section, teacher in config.teacher_models.items():
        shape = find_folder_shape(config, teacher.model.path)
        if shape is None:
            text = "is not on this machine; give a folder with its config.json"
            raise ConfigError([Problem(f"{section}.model.path={teacher.model.path}", text)])
        yield replace(config, policy=teacher), shape
