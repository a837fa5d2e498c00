"""Signs that a reward is undeserved: a figure that compares lengths in a group, and removal of suspect rewards."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean, median

from megatron_grpo.config.data_schema import LEAST_COMPARED, UNUSUALLY_SHORT
from megatron_grpo.data.trajectory import LEFT_OUT, SUSPECT, Trajectory, suspicions

_USUAL_SHARE = 0.25
"""Share of the median length of a group, below which a rewarded response is unusually short."""


def judge(group: Sequence[Trajectory], leave_out: Collection[str]) -> None:
    """Add the figure of unusually short responses to a scored group, and take the rewards of suspect responses away.

    A response without a reward is in no baseline and not in the loss. It counts as incorrect: nothing shows that it is
    right.

    Args:
        group: the samples of one prompt, scored; those without a reward, such as failed ones, are not judged.
        leave_out: names of figures (without suspect/); responses with one of these above 0 lose their reward.
    """
    scored = [(one, one.reward) for one in group if one.reward is not None]
    if len(scored) >= LEAST_COMPARED:
        usual = median(one.response_tokens for one, _ in scored)
        mean = fmean(reward for _, reward in scored)
        for one, reward in scored:
            is_rewarded = reward > mean if one.correct is None else one.correct
            is_short = is_rewarded and one.response_tokens < _USUAL_SHARE * usual
            one.reward_metrics = one.reward_metrics | {SUSPECT + UNUSUALLY_SHORT: float(is_short)}
    for one, reward in scored if leave_out else ():
        found = [name for name in suspicions(one.reward_metrics) if name in leave_out]
        one.reward_metrics = one.reward_metrics | {LEFT_OUT: float(bool(found))}
        if found:
            one.notes = one.notes | {"left out": f"suspect by {', '.join(found)}; its reward was {reward:g}"}
            one.reward, one.reward_parts, one.correct = None, {}, None if one.correct is None else False
