"""What can go wrong with a rollout, what can go wrong with all of them, and how many may fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_grpo.config.errors import SamplingError
from megatron_grpo.data.trajectory import Outcome

REASONS_SHOWN = 3


class RolloutFailure(Exception):  # noqa: N818 - a status of a rollout, not an error of the run
    """One rollout did not work; its text says why. Others go on."""


def require_few_failures(outcomes: Sequence[Outcome], max_failed_fraction: float) -> None:
    """Nothing, as long as few enough rollouts failed.

    Args:
        outcomes: outcomes of all rollouts of a generation batch.
        max_failed_fraction: largest share of rollouts that may fail (rollouts.max_failed_fraction).

    Raises:
        SamplingError: more failed; says how many, and the most frequent reasons with the row of one example each.
    """
    failed = [one for one in outcomes if one.failure is not None]
    if len(failed) <= max_failed_fraction * len(outcomes):
        return
    raise SamplingError(
        f"{len(failed)} of {len(outcomes)} rollouts failed, more than rollouts.max_failed_fraction="
        f"{max_failed_fraction:g} allows: {reasons(failed)}"
    )


def reasons(failed: Sequence[Outcome]) -> str:
    """Why rollouts failed, the most frequent reasons first, each with the row of one example."""
    rows: dict[str, int] = {}
    for one in failed:
        rows.setdefault(str(one.failure), one.prompt_idx)
    counted = Counter(str(one.failure) for one in failed).most_common()
    shown = "; ".join(f"{count} x {reason}, row {rows[reason]}" for reason, count in counted[:REASONS_SHOWN])
    return shown + (f"; and {len(counted) - REASONS_SHOWN} other reasons" if len(counted) > REASONS_SHOWN else "")
