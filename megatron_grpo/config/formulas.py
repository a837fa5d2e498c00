"""Named formulas of the loss: objectives, corrections and advantages, with the keys that each reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CLIPPING = frozenset({"ratio_clip_min", "ratio_clip_max"})
DIVERGENCE = frozenset({"divergence_clip_min", "divergence_clip_max", "ratio_clip_c"})

Selection = Literal["covariance_band", "highest_covariance", "highest_entropy"]
"""A rule of losses/selections.py that chooses tokens among all of a step."""
SELECTION_KEYS: dict[Selection | None, frozenset[str]] = {
    None: frozenset(),
    "covariance_band": frozenset({"clip_cov_share", "clip_cov_min", "clip_cov_max"}),
    "highest_covariance": frozenset({"kl_cov_share"}),
    "highest_entropy": frozenset({"top_entropy_quantile"}),
}
"""Keys of loss_fn that a rule reads."""


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
    compares_engine: bool = False
    """Whether its ratio is to the policy of the engine, so that no weight may correct for the engine again."""
    selection: Selection | None = None
    """Rule that chooses its tokens among all of the step."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of loss_fn that the function and its rule read."""
        return self.reads | SELECTION_KEYS[self.selection]


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
    "dppo_tv": Objective(reads=DIVERGENCE, acts_on_ratio=False, compares_engine=True),
    "dppo_kl": Objective(reads=DIVERGENCE, acts_on_ratio=False, compares_engine=True),
    "dro": Objective(reads=frozenset({"dro_beta"}), acts_on_ratio=False, compares_engine=True),
    "vespo": Objective(
        reads=frozenset({"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"}),
        acts_on_ratio=False,
        compares_engine=True,
    ),
    "luspo": Objective(reads=CLIPPING | {"ratio_clip_c"}, acts_on_ratio=False, averages_responses=True),
    "gmpo": Objective(reads=CLIPPING, averages_responses=True),
    "fipo": Objective(reads=CLIPPING | {"ratio_clip_c", "fipo_half_life", "fipo_clip_min", "fipo_clip_max"}),
    "clip_cov": Objective(reads=CLIPPING, acts_on_ratio=False, selection="covariance_band"),
    "kl_cov": Objective(reads=frozenset({"kl_cov_weight"}), selection="highest_covariance"),
}


LOWER, UPPER = "truncated_importance_sampling_ratio_min", "truncated_importance_sampling_ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A factor of the objective: a function of losses/corrections.py."""

    function: str
    reads: frozenset[str] = frozenset({LOWER, UPPER})
    """Keys of loss_fn that are parameters of the function."""
    is_weight: bool = True
    """Whether it is the weight of a token, training / sampling probability; false: a mask, 1 or 0."""
    selection: Selection | None = None
    """Rule that chooses its tokens among all of the step."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of loss_fn that the function and its rule read."""
        return self.reads | SELECTION_KEYS[self.selection]


# The weights, of which a run has one at most, and then the masks.
CORRECTIONS = {
    "tis": Correction(function="truncate", reads=frozenset({UPPER})),
    "icepop": Correction(function="mask_tokens"),
    "seq-mask-tis": Correction(function="mask_responses"),
    "seq-tis": Correction(function="truncate_responses", reads=frozenset({UPPER})),
    "seq-mask": Correction(
        function="keep_close_responses", reads=frozenset({"sequence_mask_min", "sequence_mask_max"}), is_weight=False
    ),
    "off-policy-mask": Correction(
        function="drop_stale_failures", reads=frozenset({"off_policy_mask_threshold"}), is_weight=False
    ),
    "divergence-mask": Correction(
        function="drop_diverging_tokens", reads=frozenset({"divergence_mask_threshold"}), is_weight=False
    ),
    "high-entropy": Correction(
        function="keep_selected", reads=frozenset(), is_weight=False, selection="highest_entropy"
    ),
}
WEIGHTS = tuple(name for name, entry in CORRECTIONS.items() if entry.is_weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advantages:
    """A way from rewards to advantages: the function of its name in losses/advantages.py."""

    reads: frozenset[str] = frozenset()
    """Keys of grpo and grpo.adv_estimator that are parameters of the function."""
    by_token: bool = False
    """Whether each token has an advantage of its own."""
    needs_parts: bool = False
    """Whether it takes the rewards of each reward function."""
    compares_samples: bool = True
    """Whether it needs several responses to a prompt."""
    needs_score_sizes: bool = False
    """Whether it takes the size of each token's gradient by the logits, of two more forward passes."""
    has_task_baselines: bool = False
    """Whether its baseline is a mean over earlier rewards of the task."""


ADVANTAGES = {
    "grpo": Advantages(reads=frozenset({"use_leave_one_out_baseline", "normalize_rewards", "normalize_rewards_over"})),
    "reinforce_plus_plus": Advantages(reads=frozenset({"minus_baseline"}), by_token=True, compares_samples=False),
    "gdpo": Advantages(needs_parts=True),
    "maxrl": Advantages(),
    "opo": Advantages(),
    "pass_at_k": Advantages(reads=frozenset({"pass_k"})),
    "otb": Advantages(by_token=True, needs_score_sizes=True),
    "rae": Advantages(compares_samples=False, has_task_baselines=True),
}
