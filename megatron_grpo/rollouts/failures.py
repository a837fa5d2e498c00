"""Rollouts that failed: their error, the fraction that a run tolerates, and a summary of the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.errors import SamplingError

REASONS_SHOWN = 3


class RolloutFailure(Exception):  # noqa: N818 - a status of a rollout, not an error of the run
    """One rollout failed for the reason in the message; other rollouts continue."""


def require_few_failures(outcomes: Sequence[Outcome], max_failed_fraction: float) -> None:
    """Raise SamplingError with the reasons if more than this fraction of rollouts failed."""
    failed = [one for one in outcomes if one.failure is not None]
    if len(failed) <= max_failed_fraction * len(outcomes):
        return
    raise SamplingError(
        f"{len(failed)} of {len(outcomes)} rollouts failed, more than rollouts.max_failed_fraction="
        f"{max_failed_fraction:g} allows: {describe_failures(failed)}"
    )


def describe_failures(failed: Sequence[Outcome]) -> str:
    """Reasons why rollouts failed, most frequent first, each with the data row of one example."""
    rows: dict[str, int] = {}
    for one in failed:
        rows.setdefault(str(one.failure), one.prompt_idx)
    counted = Counter(str(one.failure) for one in failed).most_common()
    shown = "; ".join(f"{count} x {reason}, row {rows[reason]}" for reason, count in counted[:REASONS_SHOWN])
    return shown + (f"; and {len(counted) - REASONS_SHOWN} other reasons" if len(counted) > REASONS_SHOWN else "")
