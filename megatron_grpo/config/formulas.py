"""Named formulas of the loss: objectives, corrections and advantages, with the keys that each reads."""

from __future__ import annotations

from dataclasses import dataclass

CLIPPING = frozenset({"ratio_clip_min", "ratio_clip_max"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective: the function of its name in losses/objectives.py."""

    reads: frozenset[str] = frozenset()
    """Keys of loss_fn that are parameters of the function."""
    switch: str | None = None
    """Key of loss_fn that chooses the objective too, under the name that NeMo RL gives it."""
    acts_on_ratio: bool = True
    """Whether it differs from REINFORCE only where the policy has left the one of the step's start."""
    averages_responses: bool = False
    """Whether a response counts as one, so that the average is over responses (token_level_loss=false)."""


# In the order in which switches decide.
OBJECTIVES = {
    "clipped": Objective(reads=CLIPPING | {"ratio_clip_c"}),
    "cispo": Objective(switch="use_cispo", reads=CLIPPING),
    "sapo": Objective(switch="use_sapo", reads=frozenset({"sapo_temperature_pos", "sapo_temperature_neg"})),
    "reinforce": Objective(switch="disable_ppo_ratio"),
    "gspo": Objective(
        switch="sequence_level_importance_ratios", reads=CLIPPING | {"ratio_clip_c"}, averages_responses=True
    ),
    "on_policy": Objective(switch="force_on_policy_ratio"),
}


LOWER, UPPER = "truncated_importance_sampling_ratio_min", "truncated_importance_sampling_ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A limit of the weights against the engines' mismatch: a function of losses/corrections.py."""

    function: str
    reads: frozenset[str] = frozenset({LOWER, UPPER})
    """Keys of loss_fn that are parameters of the function."""


CORRECTIONS = {
    "tis": Correction(function="truncate", reads=frozenset({UPPER})),
    "icepop": Correction(function="mask_tokens"),
    "seq-mask-tis": Correction(function="mask_responses"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """A way from rewards to advantages: the function of its name in losses/advantages.py."""

    reads: frozenset[str] = frozenset()
    """Keys of grpo and grpo.adv_estimator that are parameters of the function."""
    by_token: bool = False
    """Whether each token has an advantage of its own."""
    needs_parts: bool = False
    """Whether it takes the rewards of each reward function."""


ADVANTAGES = {
    "grpo": Advantages(reads=frozenset({"use_leave_one_out_baseline", "normalize_rewards", "normalize_rewards_over"})),
    "reinforce_plus_plus": Advantages(reads=frozenset({"minus_baseline"}), by_token=True),
    "gdpo": Advantages(needs_parts=True),
}
