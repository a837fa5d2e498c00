"""Failed rollouts: whose fault it is, the fraction that a run tolerates, and a summary of the reasons.

A failure of the machinery (an engine, a server, a process, a deadline that everybody misses) leaves the loss: the
response had no part in it. A failure over the response's own text stays in the loss as a worst response; otherwise a
model could choose which of its responses count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_grpo.batch.trajectory import Outcome, Trajectory
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.outside_text import make_line

LISTED_REASONS = 3


class RolloutFailure(Exception):  # noqa: N818 - a status of a rollout, not an error of the run
    """One rollout failed, for the reason in the message, which is made one line."""

    def __init__(self, reason: str) -> None:
        super().__init__(make_line(reason))


class ResponseFailure(RolloutFailure):
    """Code failed over a response, perhaps through its text.

    trajectory: the rollout up to this response, once it is known. agents: of those of the environment, how many had
    ended well when the one that failed began.
    """

    trajectory: Trajectory | None = None
    agents = 0


@dataclass(slots=True)
class AbandonedCall:
    """Argument of the CancelledError of a call on which an environment was at work.

    Example, after a rollout's deadline: AbandonedCall(worked_s=131.2)
    """

    worked_s: float
    trajectory: Trajectory | None = None  # as of `ResponseFailure`

    @classmethod
    def find(cls, error: BaseException | None) -> AbandonedCall | None:
        """Find it in a CancelledError."""
        return next((argument for argument in getattr(error, "args", ()) if isinstance(argument, cls)), None)


def mark_failed(trajectory: Trajectory, reason: str) -> None:
    """Take a rollout out of baselines and loss."""
    trajectory.failure, trajectory.reward, trajectory.correct, trajectory.reward_parts = reason, None, None, {}


def settle_faults(group: Sequence[Trajectory]) -> None:
    """Give a prompt's faulty responses their reward.

    It is 0, or the lowest reward of the group where that is below 0: a failure never pays. They count as incorrect
    where the environment says of others whether they are correct.
    """
    scored = [trajectory for trajectory in group if trajectory.failure is None and trajectory.fault is None]
    reward = min([0.0, *(trajectory.reward for trajectory in scored if trajectory.reward is not None)])
    is_judged = any(trajectory.correct is not None for trajectory in scored)
    for trajectory in group:
        if trajectory.fault is not None:
            trajectory.reward, trajectory.correct = reward, False if is_judged else None
            if trajectory.turn_rewards:  # their sum is the reward
                trajectory.turn_rewards = [*[0.0] * (len(trajectory.turn_rewards) - 1), reward]


def require_few_failures(outcomes: Sequence[Outcome], max_failed_fraction: float) -> None:
    """Raise SamplingError with the reasons if too many rollouts failed."""
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    if len(failed) <= max_failed_fraction * len(outcomes):
        return
    raise SamplingError(
        f"{len(failed)} of {len(outcomes)} rollouts failed, more than rollouts.max_failed_fraction="
        f"{max_failed_fraction:g} allows: {describe_failures(failed)}"
    )


def describe_failures(
    failed: Sequence[Outcome], reason_of: Callable[[Outcome], str | None] = lambda outcome: outcome.failure
) -> str:
    """List the most frequent reasons, each with a data row."""
    rows: dict[str, int] = {}
    for outcome in failed:
        rows.setdefault(str(reason_of(outcome)), outcome.prompt_idx)
    reasons = Counter(str(reason_of(outcome)) for outcome in failed).most_common()
    text = "; ".join(f"{count} x {reason}, row {rows[reason]}" for reason, count in reasons[:LISTED_REASONS])
    return text + (f"; and {len(reasons) - LISTED_REASONS} other reasons" if len(reasons) > LISTED_REASONS else "")
