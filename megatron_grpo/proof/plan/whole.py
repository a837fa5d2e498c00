"""A whole plan: memory by rank and engine, time by phase, and what was assumed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_grpo.config.errors import Problem, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.proof.plan.generation import (
    EngineSize,
    Lengths,
    engine_size,
    log_normal_lengths,
    recorded_lengths,
)
from megatron_grpo.proof.plan.hardware import Hardware, hardware
from megatron_grpo.proof.plan.memory import GIB, RankMemory, advice, rank_memory, reserve_parts
from megatron_grpo.proof.plan.step import StepTimes, step_times
from megatron_grpo.proof.plan.trace import PendingTrace, RankTrace, submit_traces, tracing
from megatron_grpo.weights.shape import ModelShape
from megatron_grpo.weights.source import known_shape


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

    def timed_on(self, gpu: Hardware) -> StepTimes:
        """Seconds by phase on other hardware; ValueError: an engine has no room for a sequence."""
        balanced = [one for one in self.traces if one.expert_skew == 1.0]
        lengths, workload = lengths_of(self.config), self.config.plan.workload
        return step_times(self.config, self.shape, balanced, gpu, lengths, workload=workload)

    @property
    def fullest(self) -> RankMemory:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda one: one.peak)

    @property
    def problems(self) -> list[str]:
        """Reasons why the run does not fit, each with a key that would help; empty: it fits."""
        worst, has, found = self.fullest, self.hardware.memory_gib, list(self._engine_problems())
        if worst.peak > has * GIB:
            skew = f" with {worst.expert_skew:g} times the mean tokens of an expert" if worst.expert_skew > 1 else ""
            text = (
                f"rank {worst.rank} (pipeline stage {worst.stage}) takes {worst.peak / GIB:.1f} of {has:.1f} GiB "
                f"in {worst.phase}{skew}; {advice(self.config, self.shape, worst)}"
            )
            found.insert(0, text)
        return found

    def _engine_problems(self) -> Iterator[str]:
        """Engines without room for one sequence, or that leave too little of shared GPUs."""
        if self.engine is None:
            return
        generation, has = self.config.generation, self.hardware.memory_gib
        longest = self.config.policy.max_total_sequence_length
        if self.engine.most_sequences(longest) < 1:
            tensor = generation.parallel.tensor
            yield (
                f"an engine's GPU has {self.engine.weight_bytes / GIB:.1f} GiB of weights and room for "
                f"{self.engine.cache_tokens} tokens, and the longest sequence has {longest}; "
                f"generation.parallel.tensor={2 * tensor} splits them over more GPUs"
            )
        if not generation.colocated:
            return
        share = generation.engine.gpu_memory_utilization
        beside = max(one.asleep for one in self.ranks) + self.hardware.reserve_gib * GIB
        if share * has * GIB + beside > has * GIB:
            yield (
                f"an engine that is awake takes {share:g} of {has:.1f} GiB, and the offloaded policy keeps "
                f"{beside / GIB:.1f} GiB; generation.engine.gpu_memory_utilization="
                f"{int(100 * (1 - beside / GIB / has)) / 100:g} leaves enough"
            )

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON; sizes in GiB and bytes, times in seconds; null where engines have no room."""
        times = self.times
        return {
            "fits": not self.problems,
            "peak_gib": round(self.fullest.peak / GIB, 3),
            "ranks": [one.as_dict() for one in self.ranks],
            "step_s": None if times is None else round(times.step_s, 3),
            "phase_s": None if times is None else {name: round(one, 3) for name, one in times.phase_s.items()},
            "tokens_per_s_per_gpu": None if times is None else round(times.tokens_per_s_per_gpu, 1),
            "refit_s": None if times is None else round(times.refit_s, 4),
            "refit_bytes": None if times is None else times.refit_bytes,
            "assumptions": self.assumptions,
        }

    @property
    def assumptions(self) -> list[str]:
        """Assumptions behind the figures, besides the configuration."""
        worst = self.fullest
        parts = reserve_parts(self.config, worst.phases[worst.phase], self.hardware)
        reserve = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
        tokens = self.config.policy.microbatch_tokens
        found = [
            f"{self.hardware.name}: {self.hardware.memory_gib:g} GiB a GPU",
            f"reserve besides tensors, in GiB: {reserve}",
            f"microbatches are full, {tokens} tokens each, and all tokens are in the loss",
        ]
        if self.shape.experts is not None:
            found.append(f"experts are balanced, or those of a rank have {self.config.plan.expert_skew:g} x the mean")
        if self.config.value_model is not None:
            found.append("the value model is left out")
        if self.engine is not None:
            found.append(
                f"an engine's GPU has {self.engine.weight_bytes / GIB:.1f} GiB of weights, "
                f"{self.engine.activation_bytes / GIB:.1f} GiB of activations and graphs, and a cache of "
                f"{self.engine.cache_tokens} tokens"
            )
        return found + ([] if self.times is None else self.times.assumptions)


def profile(config: Config) -> Hardware:
    """The hardware that a plan assumes: plan.hardware, else the profile of cluster.gpu.

    Raises:
        ValueError: neither is given, or the file holds no profile.
    """
    name = config.plan.hardware or config.cluster.gpu
    if name is None:
        raise ValueError("a plan needs the GPU: give cluster.gpu=a100, h100, h200, b200 or gb200")
    return hardware(name)


def as_planned(config: Config) -> Config:
    """The configuration with the lengths of plan.workload=pretrain, whose step has neither engines nor a reference."""
    plan, policy = config.plan, config.policy
    if plan.workload == "rl":
        return config
    longest = plan.sequence_length or policy.max_total_sequence_length
    return replace(
        config,
        policy=replace(policy, max_total_sequence_length=longest),
        loss_fn=replace(config.loss_fn, reference_policy_kl_penalty=0.0),
    )


def lengths_of(config: Config) -> Lengths:
    """Lengths of the samples of a step: those of plan.*, or of a recorded run.

    Raises:
        ValueError: plan.lengths_from has no rollouts.
    """
    plan, longest = config.plan, config.generation.max_new_tokens
    if plan.workload == "pretrain":
        tokens = config.policy.max_total_sequence_length
        number = plan.global_batch_samples or config.policy.train_global_batch_samples or config.samples_per_step
        return Lengths(0.0, np.full(number, float(tokens)), f"{number} sequences of {tokens} tokens")
    if plan.lengths_from is not None:
        try:
            return recorded_lengths(Path(plan.lengths_from), config.samples_per_step)
        except OSError as error:
            raise ValueError(f"plan.lengths_from={plan.lengths_from} has no rollouts: {error}") from None
    prompt = plan.prompt_tokens or max(config.data.max_input_seq_length // 4, 1)
    mean = plan.response_tokens or max(longest // 2, 1)
    return log_normal_lengths(mean, plan.response_sigma, config.samples_per_step, longest, prompt)


@dataclass(frozen=True, slots=True)
class PendingPlan:
    """A plan whose dry runs are not yet done."""

    config: Config
    shape: ModelShape
    hardware: Hardware
    traces: list[PendingTrace]
    began: float

    def result(self, deadline: float) -> Plan:
        """Wait for the dry runs, until `deadline` (of time.monotonic).

        Raises:
            LateError: a dry run is not done.
            RunError: a dry run failed.
            ValueError: plan.lengths_from has no rollouts.
        """
        config, shape, gpu = self.config, self.shape, self.hardware
        traces = [one.result(deadline) for one in self.traces]
        engine = None if config.plan.workload == "pretrain" else engine_size(config, shape, gpu)
        beside = 0 if engine is None else engine.weight_bytes
        ranks = [rank_memory(config, one, gpu, beside) for one in traces]
        plan = Plan(config, shape, gpu, ranks, engine, None, traces, time.monotonic() - self.began)
        has_room = engine is None or engine.most_sequences(float(lengths_of(config).totals.mean()))
        return replace(plan, times=plan.timed_on(gpu) if has_room else None)


def submit_plan(config: Config, shape: ModelShape, pool: ProcessPoolExecutor, *, brief: bool = False) -> PendingPlan:
    """Begin the dry runs of a plan.

    Args:
        config: the run's configuration, without problems.
        shape: sizes of its model.
        pool: processes of `trace.tracing`.
        brief: leave out slow parts that rarely change the verdict: the phases between training and generation,
            skewed experts, and the stages between the first and the last if they have the same layers.

    Raises:
        ValueError: there is no profile of the hardware.
    """
    began = time.monotonic()
    gpu, config = profile(config), as_planned(config)
    moves = not brief and config.plan.workload == "rl"
    traces = submit_traces(pool, config, shape, moves=moves, few=brief)
    if shape.experts is not None and config.plan.expert_skew > 1 and not brief:
        traces += submit_traces(pool, config, shape, expert_skew=config.plan.expert_skew, moves=False)
    return PendingPlan(config, shape, gpu, traces, began)


def fit_remarks(config: Config) -> Iterator[Problem]:
    """Remarks of --check on a run that does not fit the GPUs of cluster.gpu, or whose layout does not build.

    Nothing is planned without cluster.gpu, on CPUs, or when the model is not on this machine. Dry runs take seconds to
    minutes; the plan is a brief one (`submit_plan`).
    """
    shape = known_shape(config)
    if config.cluster.gpu is None or not config.cluster.gpus or shape is None or not config.debug.train:
        return
    subject = f"cluster.gpu={config.cluster.gpu}"
    try:
        with tracing() as pool:
            plan = submit_plan(config, shape, pool, brief=True).result(time.monotonic() + config.plan.timeout_s)
    except (RunError, ValueError) as error:
        yield Problem(subject, f"the run could not be planned: {error}")
        return
    yield from (Problem(subject, f"does not fit: {text}") for text in plan.problems)
    if not plan.problems:
        seconds = f"planned in {plan.planned_s:.0f} s"
        yield Problem(subject, f"fits: {plan.fullest.peak / GIB:.1f} of {plan.hardware.memory_gib:.1f} GiB, {seconds}")
