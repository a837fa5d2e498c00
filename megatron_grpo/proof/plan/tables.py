"""Plans and searches as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.proof.plan.layouts import layout_name, overrides_of
from megatron_grpo.proof.plan.memory import GIB
from megatron_grpo.proof.plan.search import Search
from megatron_grpo.proof.plan.whole import Plan

_SHOWN = 8
"""Most layouts of each sort that are listed."""


def plan_table(plan: Plan) -> Iterator[str]:
    """The lines of a plan."""
    worst, config, has = plan.fullest, plan.config, plan.hardware.memory_gib
    verdict = "does not fit" if plan.problems else "fits"
    yield (
        f"{config.name} on {config.cluster.num_nodes} x {config.cluster.gpus} {plan.hardware.name}: {verdict}; "
        f"the fullest GPU takes {worst.peak / GIB:.1f} of {has:.1f} GiB"
    )
    yield from (f"  {one}" for one in plan.problems)
    yield ""
    names = list(dict.fromkeys(name for rank in plan.ranks for name in rank.phases))
    yield "tensors in GiB  layers  experts  " + "".join(f"{name:>12}" for name in names) + "     reserve        peak"
    for rank in plan.ranks:
        sizes = "".join(f"{rank.phases[name] / GIB:12.2f}" if name in rank.phases else " " * 12 for name in names)
        skew = f"x {rank.expert_skew:g}" if plan.shape.experts is not None else ""
        yield (
            f"policy stage {rank.stage:<3}{rank.layers:6}  {skew:>7}  {sizes}{rank.reserve / GIB:12.2f}"
            f"{rank.peak / GIB:12.2f}"
        )
    yield ""
    yield f"largest tensors at the peak of stage {worst.stage}, in {worst.phase}:"
    for one in worst.holders[:6]:
        each = "" if not one.bytes_per_layer else f", {one.bytes_per_layer / GIB:.3f} for each of {one.layers} layers"
        yield f"  {one.bytes / GIB:7.2f} GiB  {one.kind}{each}"
    yield ""
    if plan.times is not None:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in plan.times.phase_s.items())
        kind = "" if plan.times.asynchronous_s is None else f" ({plan.times.synchronous_s:.1f} s if synchronous)"
        yield f"a step: {plan.times.step_s:.1f} s{kind}, {plan.times.tokens_per_s_per_gpu:,.0f} tokens a second and GPU"
        yield f"  seconds by phase: {phases}"
        yield ""
    yield from (f"assumed: {one}" for one in plan.assumptions)
    yield f"planned in {plan.planned_s:.0f} s"


def search_table(found: Search) -> Iterator[str]:
    """The lines of a search, without the plan of its best layout."""
    yield (
        f"{found.legal} legal layouts: {found.too_large} exceed a GPU with their weights, gradients and optimizer "
        f"state alone, {len(found.best) + len(found.failed)} ran dry in {found.searched_s:.0f} s, {found.left} have "
        "slower estimates"
    )
    yield "     step s  tokens/s/GPU  peak GiB  layout"
    for number, one in enumerate(found.best[:_SHOWN], start=1):
        assert one.plan is not None
        assert one.plan.times is not None
        times, name = one.plan.times, layout_name(one.candidate.config)
        why = f"  ({one.reason})" if one.reason else ""
        peak = one.plan.fullest.peak / GIB
        yield f"{number:3}{times.step_s:9.1f}{times.tokens_per_s_per_gpu:14,.0f}{peak:10.1f}  {name}{why}"
    yield from (f"  -  {layout_name(one.candidate.config)}: {one.reason}" for one in found.failed[:_SHOWN])
    if found.best:
        yield "the first one: " + " ".join(overrides_of(found.best[0].candidate.config))
    yield ""
