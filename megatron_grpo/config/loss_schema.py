"""The keys of the loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.section import NonNegativeFloat, Positive, PositiveFloat, Section, Share


class LossConfig(Section):
    """ClippedPGLossFn; docs/algorithms.md has the formulas."""

    ratio_clip_min: Share = 0.2
    """Clip probability ratios from below at 1 - this; 1 means no lower bound."""

    ratio_clip_max: NonNegativeFloat | None = None
    """Clip probability ratios from above at 1 + this; null: ratio_clip_min."""

    ratio_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clipping: bound on the loss of tokens with a negative advantage; null is off."""

    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio for a response, the geometric mean of its tokens' ratios. Needs token_level_loss=false."""

    use_cispo: bool = False
    """CISPO: use the clipped ratio only as a weight, so that every token keeps its gradient."""

    use_sapo: bool = False
    """SAPO: a sigmoid of the ratio instead of clipping."""

    sapo_temperature_pos: PositiveFloat = 1.0
    """SAPO: steepness of the sigmoid for positive advantages."""

    sapo_temperature_neg: PositiveFloat = 1.05
    """SAPO: steepness of the sigmoid for negative and zero advantages."""

    disable_ppo_ratio: bool = False
    """REINFORCE: advantage times log-probability, without ratio and clipping."""

    force_on_policy_ratio: bool = False
    """Compare the policy with itself: the ratio is 1 with the policy's gradient, and nothing is clipped."""

    token_level_loss: bool = True
    """true: average over all tokens of the step; false: over sequences, each averaged over its tokens."""

    constant_normalizer_tokens: Positive | None = None
    """Dr. GRPO: divide the sum over tokens by sequences * this; usually ${generation.max_new_tokens}. null is off."""

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL penalty against the reference policy; with 0 GRPO loads no reference."""

    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL: k1, the log ratio; k2, half its square; k3, never negative and unbiased."""

    use_on_policy_kl_approximation: bool = False
    """Weight the KL estimate by the importance ratio, so that it is an expectation under the current policy."""

    kl_score_function_gradient: bool = False
    """Give the KL penalty of the loss the gradient of the divergence itself, through later tokens too (arXiv
    2506.09477). Not with use_on_policy_kl_approximation, nor with context parallelism."""

    use_kl_in_reward: bool = False
    """Subtract the KL penalty from the reward instead of adding it to the loss."""

    kl_input_clamp_value: PositiveFloat | None = None
    """Limit log ratios to +- this before the KL is estimated; null means no limit."""

    kl_output_clamp_value: PositiveFloat | None = None
    """Limit KL estimates to +- this; null means no limit."""

    use_importance_sampling_correction: bool = False
    """Weight the loss by training probability / sampling probability, which corrects for different engines."""

    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """Treatment of extreme correction weights: tis lowers them to the upper limit; icepop sets weights outside the
    limits to 0; seq-mask-tis leaves out responses whose weights have a geometric mean outside."""

    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper limit of the correction weight."""

    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """Lower limit of the correction weight, for icepop and seq-mask-tis."""

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the mean entropy of the policy's next-token distributions; 0 is off."""

    positive_example_nll_weight: NonNegativeFloat = 0.0
    """VAPO: weight of the negative log-likelihood of correct responses, added to the loss; 0 is off."""

    kl_type: Literal["reverse", "forward", "mixed", "jensen_shannon"] = "reverse"
    """Divergence that distillation minimises at each token. reverse: KL(policy || teacher); forward: KL(teacher ||
    policy); mixed: their weighted mean; jensen_shannon: the generalised Jensen-Shannon divergence between them."""

    mixed_kl_weight: Share = 0.5
    """With mixed and jensen_shannon, the weight of the forward side: 1 is forward, 0 reverse. It is 1 - TRL's beta."""

    policy_loss_weight: NonNegativeFloat = 0.0
    """Weight of GRPO's loss beside the divergence from the teacher; 0: distillation alone, which needs no rewards."""

    @property
    def clip_max(self) -> float:
        """Distance from 1 to the upper bound of clipped ratios."""
        return self.ratio_clip_min if self.ratio_clip_max is None else self.ratio_clip_max

    @property
    def kl_in_loss(self) -> float:
        """Weight of the KL term of the loss itself."""
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @property
    def kl_in_reward(self) -> float:
        """Weight of the KL that is subtracted from the reward."""
        return self.reference_policy_kl_penalty if self.use_kl_in_reward else 0.0


class RewardScalingConfig(Section):
    """Clamp rewards to the source range and map them to the target range."""

    enabled: bool = False
    """Scale rewards."""

    source_min: float = 0.0
    """Raise rewards below this to it."""

    source_max: float = 1.0
    """Lower rewards above this to it."""

    target_min: float = 0.0
    """Scaled reward at source_min."""

    target_max: float = 1.0
    """Scaled reward at source_max."""


class RewardShapingConfig(Section):
    """Penalties for long or unfinished responses, after the scaling."""

    enabled: bool = False
    """Shape rewards."""

    overlong_buffer_length: Positive | None = None
    """DAPO: tokens before max_response_length over which the penalty grows from 0 to its full size; null is off."""

    overlong_buffer_penalty: NonNegativeFloat = 1.0
    """DAPO: the full penalty, subtracted from the reward of a rollout of max_response_length sampled tokens."""

    max_response_length: Positive | None = None
    """DAPO: sampled tokens of a rollout at which the penalty is full; null: generation.max_new_tokens for each of
    max_rollout_turns, up to policy.max_total_sequence_length."""

    stop_properly_penalty_coef: Share | None = None
    """Multiply positive rewards of truncated responses by this: 0 removes them, 1 and null change nothing."""


class AdvantageEstimatorConfig(Section):
    """How rewards become advantages."""

    name: Literal["grpo", "reinforce_plus_plus", "gdpo"] = "grpo"
    """grpo: relative to the group; reinforce_plus_plus: normalised over the tokens of the step; gdpo: each reward
    function normalised within the group, then their weighted sum over the step."""

    minus_baseline: bool = False
    """REINFORCE++ only: subtract the mean reward of the group first (the variant with baseline)."""
