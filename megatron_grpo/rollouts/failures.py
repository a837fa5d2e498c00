"""Rollouts that failed: their error, the fraction that a run tolerates, and a summary of the reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.outside_text import make_line

LISTED_REASONS = 3


class RolloutFailure(Exception):  # noqa: N818 - a status of a rollout, not an error of the run
    """One rollout failed, for the reason in the message, which is made one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(make_line(reason))


def require_few_failures(outcomes: Sequence[Outcome], max_failed_fraction: float) -> None:
    """Raise SamplingError with the reasons if too many rollouts failed."""
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    if len(failed) <= max_failed_fraction * len(outcomes):
        return
    raise SamplingError(
        f"{len(failed)} of {len(outcomes)} rollouts failed, more than rollouts.max_failed_fraction="
        f"{max_failed_fraction:g} allows: {describe_failures(failed)}"
    )


def describe_failures(failed: Sequence[Outcome]) -> str:
    """List the most frequent reasons, each with a data row."""
    rows: dict[str, int] = {}
    for outcome in failed:
        rows.setdefault(str(outcome.failure), outcome.prompt_idx)
    reasons = Counter(str(outcome.failure) for outcome in failed).most_common()
    text = "; ".join(f"{count} x {reason}, row {rows[reason]}" for reason, count in reasons[:LISTED_REASONS])
    return text + (f"; and {len(reasons) - LISTED_REASONS} other reasons" if len(reasons) > LISTED_REASONS else "")
