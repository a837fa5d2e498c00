"""Searches a layout: legal ones, those that fit ranked by the seconds of a step, and why the others lose."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.device_memory import GIB
from megatron_grpo.planning.engine_layouts import find_best_engines
from megatron_grpo.planning.estimates import count_static_bytes, estimate_activation_bytes, estimate_step_s
from megatron_grpo.planning.generation_cost import find_lengths
from megatron_grpo.planning.policy_layouts import (
    Candidate,
    count_idle_gpus,
    find_least_static_gib,
    has_own_engines,
    iterate_legal_layouts,
    list_overrides,
    split_gpus,
)
from megatron_grpo.planning.refusals import Refusals
from megatron_grpo.planning.trace import LateError
from megatron_grpo.planning.whole import PendingPlan, Plan, as_planned, find_profile, submit_plan
from megatron_grpo.platform.hardware import Hardware
from megatron_grpo.preflight.load import compose_checked

_RANKING = 0.7
"""Share of the seconds for brief plans of many layouts; the rest is for full plans of the best ones."""
_SPLITS = 400
"""Most ways to share GPUs out between policy and engines that are tried."""
_AHEAD = 2
"""Candidates whose dry runs are submitted before the first of them is waited for."""


@dataclass(frozen=True, slots=True)
class PlannedLayout:
    """A layout that ran dry."""

    plan: Plan | None
    """None: the dry run failed."""
    candidate: Candidate
    reason: str
    """Why it is not the best layout; empty for the best."""


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
    skipped: int
    """Layouts that did not run dry: their estimates are slower, or one that takes less memory does not fit."""
    gpus: tuple[int, int]
    """GPUs of the policy and of the engines."""
    idle: int
    """GPUs of the run's nodes that the layouts do not use."""
    least_gib: float
    """Least GiB of weights, gradients and optimizer state of a legal layout's fullest GPU."""
    why_not_all: str
    """Why GPUs are idle, or shared out differently than in the recipe; empty: they are not."""
    searched_s: float

    def as_dict(self) -> dict[str, Any]:
        """Convert to JSON."""
        rows = [
            {
                "overrides": list_overrides(layout.candidate.config),
                "fits": fits,
                "reason": layout.reason,
                **({} if layout.plan is None else layout.plan.as_dict()),
            }
            for fits, layouts in ((True, self.best), (False, self.failed))
            for layout in layouts
        ]
        counts = {"legal": self.legal, "too_large": self.too_large, "left": self.skipped}
        policy, engines = self.gpus
        shared = {
            "least_gib": round(self.least_gib, 1),
            "policy_gpus": policy,
            "engine_gpus": engines,
            "idle_gpus": self.idle,
        }
        explanation = {"why_not_all_gpus": self.why_not_all} if self.why_not_all else {}
        return {"layouts": rows, **counts, **shared, **explanation, "searched_s": round(self.searched_s, 1)}


@dataclass(frozen=True, slots=True)
class Share:
    """GPUs of both sides, with the best engines and the policy's layouts."""

    gpus: tuple[int, int]
    config: Config
    """The recipe with the best engines on these GPUs."""
    candidates: list[Candidate]
    """Layouts of the policy in the order of dry runs."""
    too_large: int
    """Legal layouts that are no candidates: weights, gradients and optimizer state alone exceed a GPU."""
    least_gib: float
    """Least GiB of weights, gradients and optimizer state of a legal layout's fullest GPU."""


def compose_for_search(overrides: Sequence[str]) -> Config:
    """Load a configuration for a search, which replaces its layouts.

    ConfigError names every problem except those of the layouts.
    """
    composed = compose_checked(overrides)
    sizes = ("policy.parallel.", "generation.parallel", "cluster.gpus_per_node=")
    problems = (problem for problem in composed.problems if not problem.subject.startswith(sizes))
    composed.problems = [problem for problem in problems if "policy.parallel.data=" not in problem.text]
    return composed.require()


def _find_least_gib(config: Config, shape: ModelShape) -> float:
    return min(find_least_static_gib(config, shape, gpus) for gpus in {policy for policy, _ in split_gpus(config)})


def search_layouts(
    config: Config, shape: ModelShape, pool: ProcessPoolExecutor, *, budget_s: float, enough: int = 8
) -> Search:
    """Rank layouts by a step's seconds; the best estimates run dry.

    Args:
        config: the recipe; its nodes, batches, lengths and precision stay as they are.
        shape: sizes of the model.
        pool: processes of `trace.start_trace_pool`.
        budget_s: seconds after which no further layout is pending_plan for.
        enough: layouts that fit, after which the search ends.

    Raises:
        ValueError: no layout passes the run's checks; names every reason.
        RunError: not one dry run was done in time.
    """
    began = time.monotonic()
    gpu, config = find_profile(config), as_planned(config)
    chosen: tuple[Share, list[PlannedLayout]] | None = None
    reason, unfit = "", ""
    for share, why in _iterate_shares(config, shape, gpu):
        layouts = list(_run_candidates(share.candidates, shape, pool, began + _RANKING * budget_s, enough))
        # Without a share that fits, the first one, in the recipe's proportion, explains why nothing does.
        if chosen is None or _select_fitting(layouts):
            chosen, reason = (share, layouts), "; ".join(filter(None, (unfit, why)))
        if _select_fitting(layouts) or time.monotonic() > began + _RANKING * budget_s:
            break
        if not share.candidates and _find_least_gib(config, shape) >= gpu.memory_gib - gpu.reserve_gib:
            break  # the policy is too large for all GPUs together, so for any share of them
        policy_gpus, engine_gpus = share.gpus
        unfit = unfit or f"no layout of policy and engines on {policy_gpus} + {engine_gpus} GPUs fits"
    assert chosen is not None, "without a share there is an error"
    share, layouts = chosen
    if not layouts and share.candidates:
        raise RunError(f"no dry run was done within plan.search_s={budget_s:g}; give more")
    layouts = list(_confirm_fastest(layouts, shape, pool, began + budget_s))
    fitting = _select_fitting(layouts)
    return Search(
        best=[replace(layout, reason=explain_slower(layout.plan, fitting[0].plan)) for layout in fitting],
        failed=[layout for layout in layouts if layout.plan is None or layout.plan.problems],
        legal=len(share.candidates) + share.too_large,
        too_large=share.too_large,
        skipped=len(share.candidates) - len(layouts),
        gpus=share.gpus,
        idle=count_idle_gpus(share.candidates[0].config if share.candidates else share.config),
        least_gib=share.least_gib,
        why_not_all=reason,
        searched_s=time.monotonic() - began,
    )


def _iterate_shares(config: Config, shape: ModelShape, gpu: Hardware) -> Iterator[tuple[Share, str]]:
    """Yield shares with legal layouts, and why those before have none.

    Raises:
        ValueError: there are no legal layouts; names every reason.
    """
    splits, refused, is_possible = split_gpus(config), Refusals(), False
    reasons: list[str] = []
    has_layouts: dict[int, bool] = {}  # by GPUs of the policy, whose layouts do not depend on the engines
    for policy_gpus, engine_gpus in splits[:_SPLITS]:
        if has_layouts.get(policy_gpus) is False:
            continue
        refusals, engines = Refusals(), config
        if engine_gpus:
            with_engines = find_best_engines(config, shape, gpu, policy_gpus, engine_gpus, refusals)
            if with_engines is None:
                refused.add(refusals)
                reasons.append(f"no engines on {engine_gpus} GPUs")
                continue
            engines = with_engines
        share = _build_share(engines, shape, gpu, (policy_gpus, engine_gpus), refusals)
        has_layouts[policy_gpus] = bool(share.candidates or share.too_large)
        if not has_layouts[policy_gpus]:
            refused.add(refusals)
            reasons.append(f"no layout of the policy on {policy_gpus} GPUs")
            continue
        distinct_reasons = list(dict.fromkeys(reasons))
        because = f": {next(refused.render_lines()).strip()}" if distinct_reasons and refused.list_problems() else ""
        yield share, "; ".join(distinct_reasons[:3]) + because
        is_possible = True
    if not is_possible:
        raise ValueError("\n".join([_explain_refusals(config, splits), *refused.render_lines()]))


def _explain_refusals(config: Config, splits: Sequence[tuple[int, int]]) -> str:
    cluster = config.cluster
    total = f"{cluster.num_nodes} x {cluster.gpus} GPUs"
    if not splits:
        return f"{total} leave none to the policy; change cluster.num_nodes"
    sides = "policy and engines" if has_own_engines(config) else "the policy"
    many = (
        f", in the {_SPLITS} ways to share them out that are nearest to the recipe's" if len(splits) > _SPLITS else ""
    )
    return f"no layout of {sides} on {total} passes the run's checks{many}; the reasons:"


def _build_share(config: Config, shape: ModelShape, gpu: Hardware, gpus: tuple[int, int], refusals: Refusals) -> Share:
    """Order the policy's layouts for dry runs: first those whose estimate fits."""
    tokens, usable = float(find_lengths(config).totals.sum()), gpu.memory_gib - gpu.reserve_gib
    candidates = []
    for layout in iterate_legal_layouts(config, shape, gpus[0], refusals):
        static = count_static_bytes(layout, shape) / GIB
        estimated = static + estimate_activation_bytes(layout, shape) / GIB
        candidates.append(Candidate(layout, static, estimate_step_s(layout, shape, gpu, tokens), estimated))
    order = sorted(
        (candidate for candidate in candidates if candidate.static_gib < usable),
        key=lambda candidate: (candidate.estimated_gib > usable, candidate.estimated_s),
    )
    least = min((candidate.static_gib for candidate in candidates), default=float("inf"))
    return Share(gpus, config, order, len(candidates) - len(order), least)


def _select_fitting(layouts: Sequence[PlannedLayout]) -> list[PlannedLayout]:
    timed = [
        (layout.plan.times.step_s, layout)
        for layout in layouts
        if layout.plan and not layout.plan.problems and layout.plan.times
    ]
    return [layout for _, layout in sorted(timed, key=lambda pair: pair[0])]


def _confirm_fastest(
    layouts: Sequence[PlannedLayout], shape: ModelShape, pool: ProcessPoolExecutor, deadline: float
) -> Iterator[PlannedLayout]:
    """Plan the fastest layout that fits in full."""
    fitting = _select_fitting(layouts)
    yield from (layout for layout in layouts if layout not in fitting)
    while fitting:
        layout = fitting.pop(0)
        try:
            plan = submit_plan(layout.candidate.config, shape, pool).wait(deadline)
        except LateError:
            yield layout
            break
        yield PlannedLayout(plan, layout.candidate, "; ".join(plan.problems))
        if not plan.problems:
            break
    yield from fitting


def _run_candidates(
    order: Sequence[Candidate], shape: ModelShape, pool: ProcessPoolExecutor, deadline: float, enough: int
) -> Iterator[PlannedLayout]:
    """Run candidates dry until enough fit, or until the deadline."""
    rest, pending, fitting = iter(order), deque[tuple[Candidate, PendingPlan]](), 0
    too_full: list[Candidate] = []
    while fitting < enough and time.monotonic() < deadline:
        # What needs more memory than a candidate that did not fit is skipped without a dry run.
        remaining = (candidate for candidate in rest if not any(_takes_more(candidate, full) for full in too_full))
        while len(pending) < _AHEAD and (candidate := next(remaining, None)) is not None:
            pending.append((candidate, submit_plan(candidate.config, shape, pool, brief=True)))
        if not pending:
            return
        candidate, pending_plan = pending.popleft()
        try:
            plan = pending_plan.wait(deadline)
        except LateError:
            return
        except RunError as error:
            yield PlannedLayout(None, candidate, str(error))
            continue
        fitting += not plan.problems
        if plan.fullest.peak > plan.hardware.memory_gib * GIB:
            too_full.append(candidate)
        yield PlannedLayout(plan, candidate, "; ".join(plan.problems))


def _takes_more(candidate: Candidate, full: Candidate) -> bool:
    """True if a layout surely needs at least the memory of another."""
    # It has the same stages, tensor-parallel ranks and recomputation, and keeps at least as many tokens and as much
    # state.
    ours, theirs = candidate.config.policy, full.config.policy
    alike = ("tensor", "sequence", "pipeline", "virtual_pipeline")
    return (
        all(getattr(ours.parallel, name) == getattr(theirs.parallel, name) for name in alike)
        and ours.activation_checkpointing == theirs.activation_checkpointing
        and ours.parallel.context <= theirs.parallel.context
        and candidate.static_gib >= full.static_gib
    )


def explain_slower(plan: Plan | None, best: Plan | None) -> str:
    """Name the phase that loses most against the best layout."""
    if plan is None or best is None or plan is best or plan.times is None or best.times is None:
        return ""
    slower = {name: seconds - best.times.phase_s.get(name, 0.0) for name, seconds in plan.times.phase_s.items()}
    name = max(slower, key=slower.__getitem__)
    share = plan.times.step_s / best.times.step_s - 1
    return f"{share:.0%} slower: {name} takes {slower[name]:.1f} s more"
