"""Advice for a run that does not fit: the keys that make it fit, found by planning the run again with them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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
from megatron_grpo.planning.policy_layouts import has_own_engines
from megatron_grpo.planning.trace import LateError
from megatron_grpo.planning.whole import Advice, Plan, count_host_gib, find_host_memory, submit_plan
from megatron_grpo.preflight.config_checks import find_problems

_COMPUTING = ("train", "logprobs", "reference", "values")
"""Phases that brief plans have."""
_TRIAL_BATCH = 4
"""Changes that are planned before the best of those that fit is taken."""
_MOST_KEYS = 3
"""Most keys of a set that is put together from single keys and a layout."""
_LAYOUTS = 24
"""Layouts of a model that are combined with single keys: those with the least estimated memory."""
_MARGIN = 1.1
"""Changes whose estimated memory is above this share of the GPU's are not planned in sets."""


def with_advice(plan: Plan, pool: ProcessPoolExecutor, *, brief: bool = False) -> Plan:
    """Return the plan, with advice if the run does not fit.

    Args:
        plan: the plan of the run; its plan.search_s limits the seconds of the search.
        pool: processes of `trace.start_trace_pool`.
        brief: whether the plan is a brief one, and the advice's plans are to be.
    """
    if not plan.shortages:
        return plan
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
    closest: tuple[float, Changes] | None = None
    """Least GiB of the fullest GPU beyond its memory among changes that do not fit, and these."""
    tried_keys: set[str] = field(default_factory=set)

    @property
    def is_late(self) -> bool:
        """Whether the deadline has passed."""
        return time.monotonic() > self.deadline

    def plan_proposals(self, proposals: Iterable[Changes]) -> Iterator[tuple[Changes, Plan]]:
        """Plan the proposals that are new and pass the run's checks."""
        pending = []
        for changes in proposals:
            name, config = " ".join(sorted(as_overrides(changes))), apply_changes(self.plan.config, changes)
            if name in self.tried_keys or self.is_late:
                continue
            self.tried_keys.add(name)
            if not find_problems(config, self.plan.shape) and not self._is_refused_by_arithmetic(config):
                pending.append((changes, submit_plan(config, self.plan.shape, self.pool, brief=self._is_brief)))
        for changes, pending_plan in pending:
            try:
                trial = pending_plan.wait(self.deadline)
            except (LateError, ConfigError):
                return
            except RunError:  # this layout does not build
                continue
            self.count += 1
            over = trial.fullest.peak / GIB - trial.hardware.memory_gib
            if trial.shortages and (self.closest is None or over < self.closest[0]):
                self.closest = over, changes
            yield changes, trial

    @property
    def _is_brief(self) -> bool:
        """True if brief plans show the peak.

        They leave out the phases around the engines' turns and skewed experts.
        """
        worst = self.plan.fullest
        return self.brief or (worst.phase in _COMPUTING and worst.expert_skew == 1.0)

    def _is_refused_by_arithmetic(self, config: Config) -> bool:
        """True if hosts or engines lack memory; that needs no dry run."""
        needed, has = count_host_gib(config, self.plan.shape), find_host_memory(config, self.plan.hardware)
        lacks_room = has_own_engines(config) and find_room_problems(config, self.plan.shape, self.plan.hardware)
        return (has is not None and needed > has) or bool(lacks_room)

    def confirm(self, changes: Changes, trial: Plan) -> Plan | None:
        """Plan changes in full after their brief plan fits.

        None: they do not fit after all, or the plan is late.
        """
        if self.brief or not self._is_brief:
            return trial
        try:
            full_plan = submit_plan(trial.config, self.plan.shape, self.pool).wait(self.deadline)
        except (LateError, RunError):
            return None
        self.count += 1
        return None if full_plan.shortages else full_plan

    def find_best(self, proposals: Iterable[Changes]) -> Advice | None:
        """Advise on the first few proposals among which some fit.

        Of those that fit, the advice is the one that frees most memory.
        """
        rest = iter(proposals)
        while not self.is_late and (some := list(islice(rest, _TRIAL_BATCH))):
            fitting = [
                (trial.fullest.peak, number, changes, trial)
                for number, (changes, trial) in enumerate(self.plan_proposals(some))
                if not trial.shortages
            ]
            if fitting:
                fitting.sort(key=lambda row: (len(row[2]), row[0], row[1]))
                for _, _, changes, trial in fitting:
                    full_plan = self.confirm(changes, trial)
                    if full_plan is not None:
                        return self.make_advice(changes, full_plan)
        return None

    def make_advice(self, changes: Changes, trial: Plan) -> Advice:
        """The advice to make changes with which the run fits."""
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
    """Yield changes to plan, the smallest sets first.

    Within a size those come first that leave the least estimated memory.
    """
    if of_engines and not _needs_more_than_engines(plan):
        yield [of_engines]
    singles, layouts = list(iterate_single_changes(plan)), _list_layouts(plan)
    estimate = _Estimate(plan)
    one_key = [change for change in (*singles, *layouts) if len(change) == 1]
    yield [change | of_engines for change in sorted(one_key, key=estimate.estimate_gib)]
    sets = [first | second for first, second in combinations(singles, 2) if not first.keys() & second.keys()]
    sets += [
        first | second | third
        for first, second, third in combinations(singles, 3)
        if not _overlap(first, second, third)
    ]
    sets += layouts
    sets += [change | layout for change in singles for layout in layouts if not change.keys() & layout.keys()]
    sized = sorted({len(keys) for keys in sets})
    for number in (size for size in sized if size <= _MOST_KEYS):
        alike = [
            (estimate.estimate_gib(keys), position, keys) for position, keys in enumerate(sets) if len(keys) == number
        ]
        alike = sorted(row for row in alike if row[0] < _MARGIN * plan.hardware.memory_gib)
        yield [keys | of_engines for _, _, keys in alike[: 2 * _TRIAL_BATCH]]
    everything = merge_changes(plan)
    yield [everything | of_engines]
    yield [
        everything | layout | of_engines
        for layout in sorted(layouts, key=lambda layout_keys: estimate.estimate_gib(everything | layout_keys))[
            :_TRIAL_BATCH
        ]
    ]


def _overlap(*changes: Changes) -> bool:
    return sum(map(len, changes)) > len({key for change in changes for key in change})


def _needs_more_than_engines(plan: Plan) -> bool:
    """Whether GPUs of the models or hosts are short too."""
    needed, has = plan.host
    return plan.fullest.peak > plan.hardware.memory_gib * GIB or (has is not None and needed > has)


def _list_layouts(plan: Plan) -> list[Changes]:
    """List layouts of the models that do not fit, the smallest first."""
    has, relevant = plan.hardware.memory_gib * GIB, []
    for section, ranks, shape in _iterate_models(plan):
        if max((rank.peak for rank in ranks), default=0) > has:
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
    """Rough GiB of the fullest GPU after changes.

    Arithmetic, scaled by the plan before them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.worst = plan, plan.fullest
        self.static, self.others = self._estimate_parts({})

    def _estimate_parts(self, changes: Changes) -> tuple[float, float]:
        config = apply_changes(self.plan.config, changes)
        if self.worst.model != "policy" and config.value_model is not None:
            config = replace(
                config, policy=config.value_model, loss_fn=replace(config.loss_fn, reference_policy_kl_penalty=0.0)
            )
        return float(count_static_bytes(config, self.plan.shape)), estimate_activation_bytes(config, self.plan.shape)

    def estimate_gib(self, changes: Changes) -> float:
        """GiB after changes."""
        static, activations = self._estimate_parts(changes)
        worst = self.worst
        tensors = worst.static * static / max(self.static, 1.0)
        rest = (worst.peak - worst.reserve - worst.static) * activations / max(self.others, 1.0)
        return (tensors + rest + worst.reserve) / GIB


def _advise_elsewhere(trials: _Trials) -> Advice:
    """Advise on other layouts of models and engines together.

    On the same nodes, or on more of them; or say that nothing fits.
    """
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
    """That no change makes the run fit on its nodes, and why."""
    plan, cluster = trials.plan, trials.plan.config.cluster
    where = f"on {cluster.num_nodes} x {cluster.gpus} {plan.hardware.name}"
    least, usable = find_least_gib(plan), plan.hardware.memory_gib - plan.hardware.reserve_gib
    if least > usable:
        why = f"weights, gradients and optimizer state alone take at least {least:.1f} of {usable:.1f} GiB of a GPU"
        return f"nothing makes it fit {where}: in every layout {why}"
    if trials.is_late:
        limit = f"within plan.search_s={plan.config.plan.search_s:g}"
        return (
            f"none of {trials.count} changes that were planned {limit} makes it fit {where}{_describe_closest(trials)}"
        )
    return f"none of {trials.count} changes that were planned makes it fit {where}{_describe_closest(trials)}"


def _describe_closest(trials: _Trials) -> str:
    if trials.closest is None or trials.closest[0] <= 0:
        return ""
    return f"; the closest, {' '.join(as_overrides(trials.closest[1]))}, lacks {trials.closest[0]:.1f} GiB"
