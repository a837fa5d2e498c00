"""A whole plan: memory by rank and engine, time by phase, and what was assumed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.config.schema import Config
from megatron_grpo.proof.plan.hardware import Hardware, hardware
from megatron_grpo.proof.plan.memory import GIB, RankMemory, advice, fullest, rank_memory, reserve_parts
from megatron_grpo.proof.plan.trace import RankTrace, submit_traces
from megatron_grpo.weights.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Plan:
    """Memory and time of a run on given hardware."""

    config: Config
    shape: ModelShape
    hardware: Hardware
    ranks: list[RankMemory]
    """Distinct ranks of the policy, with balanced and with skewed experts."""
    planned_s: float
    """Seconds that the plan took."""

    @property
    def fullest(self) -> RankMemory:
        """The rank with the highest peak."""
        return fullest(self.ranks)

    @property
    def problems(self) -> list[str]:
        """Reasons why the run does not fit, each with a key that would help; empty: it fits."""
        return list(self._problems())

    def _problems(self) -> Iterator[str]:
        worst, has = self.fullest, self.hardware.memory_gib
        if worst.peak > has * GIB:
            skew = f" with {worst.expert_skew:g} times the mean tokens of an expert" if worst.expert_skew > 1 else ""
            yield (
                f"rank {worst.rank} (pipeline stage {worst.stage}) takes {worst.peak / GIB:.1f} of {has:.1f} GiB "
                f"in {worst.phase}{skew}; {advice(self.config, self.shape, worst)}"
            )

    def as_dict(self) -> dict[str, Any]:
        """The plan for JSON; sizes in GiB and bytes, times in seconds."""
        return {
            "fits": not self.problems,
            "peak_gib": round(self.fullest.peak / GIB, 3),
            "ranks": [rank_dict(one) for one in self.ranks],
            "assumptions": self.assumptions,
        }

    @property
    def assumptions(self) -> list[str]:
        """What the figures rest on, besides the configuration."""
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
        return found


def rank_dict(rank: RankMemory) -> dict[str, Any]:
    """A rank for JSON."""
    return {
        "stage": rank.stage,
        "rank": rank.rank,
        "layers": rank.layers,
        "expert_skew": rank.expert_skew,
        "peak_gib": round(rank.peak / GIB, 3),
        "reserve_gib": round(rank.reserve / GIB, 3),
        "phases": {name: round(size / GIB, 3) for name, size in rank.phases.items()},
        "holders": [one.as_dict() for one in rank.holders],
    }


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


def make_plan(config: Config, shape: ModelShape, pool: ProcessPoolExecutor, *, moves: bool = True) -> Plan:
    """Plan a run, with dry runs in the processes of `pool`.

    Args:
        config: the run's configuration, without problems.
        shape: sizes of its model.
        pool: processes of `trace.tracing`.
        moves: whether the phases between training and generation are run too.

    Raises:
        RunError: a dry run failed, or did not end in time.
        ValueError: there is no profile of the hardware.
    """
    began = time.monotonic()
    gpu, config = profile(config), as_planned(config)
    deadline = began + config.plan.timeout_s
    moves = moves and config.plan.workload == "rl"
    pending = submit_traces(pool, config, shape, moves=moves)
    if shape.experts is not None and config.plan.expert_skew > 1:
        pending += submit_traces(pool, config, shape, expert_skew=config.plan.expert_skew, moves=False)
    traces: list[RankTrace] = [one.result(deadline) for one in pending]
    ranks = [rank_memory(config, one, gpu) for one in traces]
    return Plan(config, shape, gpu, ranks, time.monotonic() - began)
