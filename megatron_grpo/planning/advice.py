"""Advice for a run that does not fit: keys that make it fit, found by planning the run again with them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import combinations, islice

from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import find_value_shape
from megatron_grpo.planning.changes import (
    Changes,
    apply_changes,
    as_overrides,
    find_engine_changes,
    iterate_layout_changes,
    iterate_single_changes,
    merge_changes,
)
from megatron_grpo.planning.device_memory import GIB, RankMemory
from megatron_grpo.planning.elsewhere import find_least_gib, iterate_node_counts, iterate_run_layouts
from megatron_grpo.planning.engine_layouts import find_room_problems
from megatron_grpo.planning.estimates import count_static_bytes, estimate_activation_bytes
from megatron_grpo.planning.operation import compare_host
from megatron_grpo.planning.policy_layouts import has_own_engines
from megatron_grpo.planning.trace import LateError
from megatron_grpo.planning.whole import Advice, Plan, submit_plan
from megatron_grpo.preflight.config_checks import find_problems

_COMPUTING = ("train", "logprobs", "reference", "values")  # the phases of brief plans
_TRIAL_BATCH = 4
"""Changes that are planned together, before the best of those that fit is taken."""
_MOST_KEYS = 3
"""Most keys of a set of changes."""
_LAYOUTS = 24
"""Layouts of a model that are combined with single keys: those with the least estimated memory."""
_MARGIN = 1.1
"""Largest estimated memory of a set that is planned, as a share of the GPU's."""


def with_advice(plan: Plan, pool: ProcessPoolExecutor, *, brief: bool = False) -> Plan:
    """Return the plan, with advice if the run does not fit.

    Args:
        plan: the plan of the run; its plan.search_s limits the seconds of the search.
        pool: processes of `trace.start_trace_pool`.
        brief: whether the plan is a brief one; the plans of the search are then brief too.
    """
    if not plan.shortages:
        return plan
    if plan.fullest.model == "teacher":  # no key of the policy makes it smaller
        return replace(
            plan, advice=Advice("split it over more ranks (tensor, expert or pipeline in its section's parallel)")
        )
    trials = _Trials(plan, pool, time.monotonic() + plan.config.plan.search_s, brief)
    return replace(plan, advice=_advise_on(trials))


@dataclass(slots=True)
class _Trials:
    """Plans of changed configurations, until a deadline."""

    plan: Plan
    pool: ProcessPoolExecutor
    deadline: float
    """Of time.monotonic."""
    brief: bool
    count: int = 0
    """Plans that were made."""
    closest: tuple[float, Changes] | None = None
    """Of the changes that do not fit, those with the least GiB beyond the GPU's memory, and these GiB."""
    tried_keys: set[str] = field(default_factory=set)

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def plan_proposals(self, proposals: Iterable[Changes]) -> Iterator[tuple[Changes, Plan]]:
        """Plan the proposals that are new and pass the run's checks."""
        # All dry runs are submitted before the first is waited for, so that the pool's processes share them.
        pending = []
        for changes in proposals:
            name, config = " ".join(sorted(as_overrides(changes))), apply_changes(self.plan.config, changes)
            if name in self.tried_keys or self.is_late:
                continue
            self.tried_keys.add(name)
            if find_problems(config, self.plan.shape) or self._is_refused_by_arithmetic(config):
                continue
            with suppress(ConfigError):  # these changes cannot be planned
                pending.append((changes, submit_plan(config, self.plan.shape, self.pool, brief=self._is_brief)))
        for changes, pending_plan in pending:
            try:
                trial = pending_plan.wait(self.deadline)
            except LateError:
                return
            except RunError:  # this layout does not build
                continue
            self.count += 1
            excess_gib = trial.fullest.peak / GIB - trial.hardware.memory_gib
            if trial.shortages and (self.closest is None or excess_gib < self.closest[0]):
                self.closest = excess_gib, changes
            yield changes, trial

    @property
    def _is_brief(self) -> bool:
        """True if brief plans, without moves and skewed experts, show the peak."""
        worst = self.plan.fullest
        return self.brief or (worst.phase in _COMPUTING and worst.expert_skew == 1.0)

    def _is_refused_by_arithmetic(self, config: Config) -> bool:
        """True if hosts or engines lack memory, without a dry run."""
        needed, available = compare_host(config, self.plan.shape, self.plan.hardware)
        lacks_room = has_own_engines(config) and find_room_problems(config, self.plan.shape, self.plan.hardware)
        return (available is not None and needed > available) or bool(lacks_room)

    def confirm(self, changes: Changes, trial: Plan) -> Plan | None:
        """Plan changes in full after a brief plan; None: no fit."""
        if self.brief or not self._is_brief:
            return trial
        try:
            full_plan = submit_plan(trial.config, self.plan.shape, self.pool).wait(self.deadline)
        except (RunError, ConfigError):
            return None
        self.count += 1
        return None if full_plan.shortages else full_plan

    def find_best(self, proposals: Iterable[Changes]) -> Advice | None:
        """Advise on the best of the first proposals that fit.

        The best has the fewest keys, and of equals the least memory of the fullest GPU.
        """
        rest = iter(proposals)
        while not self.is_late and (batch := list(islice(rest, _TRIAL_BATCH))):
            fitting = [(changes, trial) for changes, trial in self.plan_proposals(batch) if not trial.shortages]
            for changes, trial in sorted(fitting, key=lambda pair: (len(pair[0]), pair[1].fullest.peak)):
                full_plan = self.confirm(changes, trial)
                if full_plan is not None:
                    return self.make_advice(changes, full_plan)
        return None

    def make_advice(self, changes: Changes, trial: Plan) -> Advice:
        """Make the advice of changes with which the run fits."""
        overrides, peak = as_overrides(changes), trial.fullest.peak / GIB
        how = "makes it fit" if len(overrides) == 1 else "together make it fit"
        text = f"{' '.join(overrides)} {how}: {peak:.1f} of {trial.hardware.memory_gib:.1f} GiB"
        idle = f", {trial.idle} of {trial.gpus} idle" if trial.idle else ""
        return Advice(text + idle, tuple(overrides), peak, self.count)


def _advise_on(trials: _Trials) -> Advice:
    """Try single keys, small sets, layouts of these nodes, then more nodes."""
    plan = trials.plan
    of_engines = find_engine_changes(plan)
    if of_engines is not None:
        for proposals in _iterate_proposals(plan, of_engines):
            advice = trials.find_best(proposals)
            if advice is not None:
                return advice
    return _advise_elsewhere(trials)


def _iterate_proposals(plan: Plan, of_engines: Changes) -> Iterator[Iterable[Changes]]:
    """Yield changes to plan: small sets first, then by estimated memory."""
    if of_engines and not _needs_more_than_engines(plan):
        yield [of_engines]
    singles, layouts = list(iterate_single_changes(plan)), _list_layouts(plan)
    estimate = _Estimate(plan)
    one_key = [change for change in (*singles, *layouts) if len(change) == 1]
    yield [change | of_engines for change in sorted(one_key, key=estimate.estimate_gib)]
    # Two changes of one key would hide each other, so sets have changes of different keys.
    sets = [first | second for first, second in combinations(singles, 2) if not first.keys() & second.keys()]
    sets += [
        first | second | third
        for first, second, third in combinations(singles, 3)
        if not _overlap(first, second, third)
    ]
    sets += layouts
    sets += [change | layout for change in singles for layout in layouts if not change.keys() & layout.keys()]
    for size in range(1, _MOST_KEYS + 1):
        estimated = [(estimate.estimate_gib(keys), index, keys) for index, keys in enumerate(sets) if len(keys) == size]
        fitting = sorted(row for row in estimated if row[0] < _MARGIN * plan.hardware.memory_gib)
        yield [keys | of_engines for _, _, keys in fitting[: 2 * _TRIAL_BATCH]]
    # If no small set helps, all keys that save memory are tried together, then with other layouts.
    everything = merge_changes(plan)
    yield [everything | of_engines]
    layouts.sort(key=lambda keys: estimate.estimate_gib(everything | keys))
    yield [everything | keys | of_engines for keys in layouts[:_TRIAL_BATCH]]


def _overlap(*changes: Changes) -> bool:
    return sum(map(len, changes)) > len({key for change in changes for key in change})


def _needs_more_than_engines(plan: Plan) -> bool:
    """True if the models' GPUs or the hosts lack memory too."""
    needed, available = plan.host
    return plan.fullest.peak > plan.hardware.memory_gib * GIB or (available is not None and needed > available)


def _list_layouts(plan: Plan) -> list[Changes]:
    """List layouts of the models that do not fit, the smallest first."""
    available, relevant = plan.hardware.memory_gib * GIB, []
    for section, ranks, shape in _iterate_models(plan):
        if max((rank.peak for rank in ranks), default=0) > available:
            estimate = _Estimate(plan)
            layouts = sorted(iterate_layout_changes(plan, section, shape), key=estimate.estimate_gib)
            relevant += [keys for keys in layouts if len(keys) == 1] + layouts[:_LAYOUTS]
    return relevant


def _iterate_models(plan: Plan) -> Iterator[tuple[str, Sequence[RankMemory], ModelShape]]:
    yield "policy", plan.ranks, plan.shape
    if plan.value_ranks:
        value_shape = find_value_shape(plan.config) if plan.config.value.model.path is not None else None
        yield "value", plan.value_ranks, value_shape or plan.shape


class _Estimate:
    """Estimates the fullest GPU's memory after changes, without a dry run."""

    # Arithmetic before and after the changes gives ratios, by which the memory of the plan before is scaled.

    def __init__(self, plan: Plan) -> None:
        self.plan, self.worst = plan, plan.fullest
        self.static, self.others = self._estimate_parts({})

    def _estimate_parts(self, changes: Changes) -> tuple[float, float]:
        config = apply_changes(self.plan.config, changes)
        # The value model is estimated as if it were the policy; it has no reference.
        if self.worst.model != "policy" and config.value_model is not None:
            config = replace(
                config, policy=config.value_model, loss_fn=replace(config.loss_fn, reference_policy_kl_penalty=0.0)
            )
        return float(count_static_bytes(config, self.plan.shape)), estimate_activation_bytes(config, self.plan.shape)

    def estimate_gib(self, changes: Changes) -> float:
        """Estimate GiB of the fullest GPU after changes."""
        static, activations = self._estimate_parts(changes)
        worst = self.worst
        tensors = worst.static * static / max(self.static, 1.0)
        rest = (worst.peak - worst.reserve - worst.static) * activations / max(self.others, 1.0)
        return (tensors + rest + worst.reserve) / GIB


def _advise_elsewhere(trials: _Trials) -> Advice:
    """Advise on other layouts of the run, on more nodes if needed."""
    plan = trials.plan
    usable = plan.hardware.memory_gib - plan.hardware.reserve_gib
    if usable <= 0:
        text = f"nothing makes it fit: CUDA and its libraries alone take {plan.hardware.reserve_gib:g} GiB of a GPU"
        return Advice(text, tried=trials.count)
    everything = apply_changes(plan.config, merge_changes(plan))
    for nodes in iterate_node_counts(everything, plan.shape, plan.hardware, trials.deadline):
        advice = trials.find_best(iterate_run_layouts(plan.config, everything, plan.shape, plan.hardware, nodes))
        if advice is not None and nodes == plan.config.cluster.num_nodes:
            return advice
        if advice is not None:
            return replace(advice, text=f"{_explain_nothing_fits(trials)}; {advice.text}")
        if trials.is_late:
            break
    return Advice(_explain_nothing_fits(trials), tried=trials.count)


def _explain_nothing_fits(trials: _Trials) -> str:
    """Explain why no change makes the run fit on its nodes."""
    plan, cluster = trials.plan, trials.plan.config.cluster
    where = f"on {cluster.num_nodes} x {cluster.gpus} {plan.hardware.name}"
    least, usable = find_least_gib(plan), plan.hardware.memory_gib - plan.hardware.reserve_gib
    if least > usable:
        why = f"weights, gradients and optimizer state alone take at least {least:.1f} of {usable:.1f} GiB of a GPU"
        return f"nothing makes it fit {where}: in every layout {why}"
    limit = f" within plan.search_s={plan.config.plan.search_s:g}" if trials.is_late else ""
    text = f"none of {trials.count} changes that were planned{limit} makes it fit {where}"
    if trials.closest is None or trials.closest[0] <= 0:
        return text
    excess_gib, changes = trials.closest
    return f"{text}; the closest, {' '.join(as_overrides(changes))}, lacks {excess_gib:.1f} GiB"
