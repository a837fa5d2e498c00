"""Search for a layout: legal ones, those that fit ranked by the seconds of a step, and why the others lose."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.proof.plan.layouts import (
    Candidate,
    engine_layout,
    estimate,
    gpus_of,
    legal_layouts,
    overrides_of,
    static_bytes,
)
from megatron_grpo.proof.plan.memory import GIB
from megatron_grpo.proof.plan.trace import LateError
from megatron_grpo.proof.plan.whole import PendingPlan, Plan, as_planned, profile, submit_plan
from megatron_grpo.weights.shape import ModelShape

_RANKING = 0.7
"""Share of the seconds for brief plans of many layouts; the rest is for a whole plan of the best one."""
_AHEAD = 2
"""Candidates whose dry runs are submitted before the first of them is waited for."""


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A layout that ran dry."""

    plan: Plan | None
    """The plan of the layout; None: the dry run of the layout failed."""
    candidate: Candidate
    reason: str
    """Why it is not the first; empty for the first."""


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search."""

    best: list[PlannedLayout]
    """Layouts that fit, the fastest first."""
    failed: list[PlannedLayout]
    """Layouts that ran dry and do not fit."""
    legal: int
    """Legal layouts."""
    too_large: int
    """Legal layouts whose weights, gradients and optimizer state alone exceed a GPU."""
    left: int
    """Layouts that did not run dry: their estimates are slower, or one that takes less memory does not fit."""
    searched_s: float

    def as_dict(self) -> dict[str, Any]:
        """The result for JSON."""
        rows = [
            {
                "overrides": overrides_of(one.candidate.config),
                "fits": fits,
                "reason": one.reason,
                **({} if one.plan is None else one.plan.as_dict()),
            }
            for fits, found in ((True, self.best), (False, self.failed))
            for one in found
        ]
        counts = {"legal": self.legal, "too_large": self.too_large, "left": self.left}
        return {"layouts": rows, **counts, "searched_s": round(self.searched_s, 1)}


def search(config: Config, shape: ModelShape, pool: ProcessPoolExecutor, *, budget_s: float, wanted: int = 8) -> Search:
    """Rank layouts by the seconds of a step; those with the best estimates run dry until the budget is used up.

    Args:
        config: the recipe; its GPUs, batches, lengths and precision stay as they are.
        shape: sizes of the model.
        pool: processes of `trace.tracing`.
        budget_s: seconds after which no further layout is waited for.
        wanted: layouts that fit, after which the search ends.

    Raises:
        ValueError: no layout is legal, or no engine has room.
        RunError: not one dry run was done in time.
    """
    began = time.monotonic()
    gpu, config = profile(config), as_planned(config)
    for_policy, for_engines = gpus_of(config)
    if config.plan.workload == "rl":
        config = engine_layout(config, shape, gpu, for_engines)
    found = [
        Candidate(one, static_bytes(one, shape) / GIB, estimate(one, shape, gpu))
        for one in legal_layouts(config, shape, for_policy)
    ]
    if not found:
        raise ValueError(f"no layout of {for_policy} GPUs splits the model and the batch; change cluster.num_nodes")
    usable = gpu.memory_gib - gpu.reserve_gib
    order = sorted((one for one in found if one.static_gib < usable), key=lambda one: one.estimated_s)
    layouts = list(_run(order, shape, pool, began + _RANKING * budget_s, wanted))
    if not layouts and order:
        raise RunError(f"no dry run was done within plan.search_s={budget_s:g}; give more")
    layouts = list(_confirmed(layouts, shape, pool, began + budget_s))
    fitting = _fitting(layouts)
    others = [one for one in layouts if one.plan is None or one.plan.problems]
    best = [replace(one, reason=why_slower(one.plan, fitting[0].plan)) for one in fitting]
    return Search(
        best, others, len(found), len(found) - len(order), len(order) - len(layouts), time.monotonic() - began
    )


def _fitting(layouts: Sequence[PlannedLayout]) -> list[PlannedLayout]:
    """Layouts that fit, the fastest first."""
    found = [(one.plan.times.step_s, one) for one in layouts if one.plan and not one.plan.problems and one.plan.times]
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _confirmed(
    layouts: Sequence[PlannedLayout], shape: ModelShape, pool: ProcessPoolExecutor, deadline: float
) -> Iterator[PlannedLayout]:
    """The layouts, of which the fastest gets a whole plan in place of its brief one; if it does not fit, the next."""
    fitting = _fitting(layouts)
    yield from (one for one in layouts if one not in fitting)
    while fitting:
        one = fitting.pop(0)
        try:
            plan = submit_plan(one.candidate.config, shape, pool).result(deadline)
        except LateError:
            yield one
            break
        yield PlannedLayout(plan, one.candidate, "; ".join(plan.problems))
        if not plan.problems:
            break
    yield from fitting


def _run(
    order: Sequence[Candidate], shape: ModelShape, pool: ProcessPoolExecutor, deadline: float, wanted: int
) -> Iterator[PlannedLayout]:
    """Dry runs in this order, until `wanted` of them fit or the deadline (of time.monotonic) is over."""
    rest, pending, fitting = iter(order), deque[tuple[Candidate, PendingPlan]](), 0
    too_full: list[Candidate] = []
    while fitting < wanted and time.monotonic() < deadline:
        left = (one for one in rest if not any(_takes_more(one, other) for other in too_full))
        while len(pending) < _AHEAD and (one := next(left, None)) is not None:
            pending.append((one, submit_plan(one.config, shape, pool, brief=True)))
        if not pending:
            return
        candidate, waited = pending.popleft()
        try:
            plan = waited.result(deadline)
        except LateError:
            return
        except RunError as error:
            yield PlannedLayout(None, candidate, str(error))
            continue
        fitting += not plan.problems
        if plan.fullest.peak > plan.hardware.memory_gib * GIB:
            too_full.append(candidate)
        yield PlannedLayout(plan, candidate, "; ".join(plan.problems))


def _takes_more(one: Candidate, other: Candidate) -> bool:
    """Whether a layout takes as much memory as another, or more: it has the same pipeline and tensor-parallel ranks,
    which keep as many tokens and as much state, or more."""
    ours, theirs = one.config.policy, other.config.policy
    alike = ("tensor", "sequence", "pipeline", "virtual_pipeline")
    return (
        all(getattr(ours.parallel, name) == getattr(theirs.parallel, name) for name in alike)
        and ours.activation_checkpointing == theirs.activation_checkpointing
        and ours.parallel.context <= theirs.parallel.context
        and one.static_gib >= other.static_gib
    )


def why_slower(plan: Plan | None, best: Plan | None) -> str:
    """The phase in which a layout loses most against the best one; empty for the best itself."""
    if plan is None or best is None or plan is best or plan.times is None or best.times is None:
        return ""
    slower = {name: one - best.times.phase_s.get(name, 0.0) for name, one in plan.times.phase_s.items()}
    name = max(slower, key=slower.__getitem__)
    share = plan.times.step_s / best.times.step_s - 1
    return f"{share:.0%} slower: {name} takes {slower[name]:.1f} s more"
