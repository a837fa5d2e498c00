"""The keys of the loss."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Predicate
from pydantic import Field

from megatron_grpo.config.formulas import (
    ADVANTAGES,
    CORRECTIONS,
    OBJECTIVES,
    WEIGHTS,
    Advantages,
    Objective,
    Selection,
)
from megatron_grpo.config.section import (
    FormulaOptions,
    ImportPath,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    PositiveShare,
    Section,
    Share,
)

# Names of formulas: built in, or functions of the user.
ObjectiveName = Annotated[
    ImportPath,
    Predicate(lambda path: path in OBJECTIVES or "." in path),
    f"one of {', '.join(OBJECTIVES)}, or module.function",
]
AdvantagesName = Annotated[
    ImportPath,
    Predicate(lambda path: path in ADVANTAGES or "." in path),
    f"one of {', '.join(ADVANTAGES)}, or module.function",
]
WeightName = Literal["tis", "icepop", "seq-mask-tis", "seq-tis"]
CorrectionName = Literal[
    "tis", "icepop", "seq-mask-tis", "seq-tis", "seq-mask", "off-policy-mask", "divergence-mask", "high-entropy"
]


class LossConfig(Section):
    """ClippedPGLossFn; docs/algorithms.md has the formulas."""

    objective: ObjectiveName = "clipped"
    """Loss of each token. clipped: PPO's; gspo, cispo, sapo, reinforce, on_policy: as the switches below, which choose
    them too; the others as docs/algorithms.md says; or a function of your own (docs/extending.md)."""

    objective_options: FormulaOptions = field(default_factory=dict)
    """Parameters of the objective by name, such as objective_options.delta=0.2; those of the built-in ones are keys."""

    ratio_clip_min: Share = 0.2
    """Clip probability ratios from below at 1 - this; 1 means no lower bound. gmpo: log ratios at minus this."""

    ratio_clip_max: NonNegativeFloat | None = None
    """Clip probability ratios from above at 1 + this; null: ratio_clip_min. gmpo: log ratios at this."""

    ratio_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clipping: bound on the loss of tokens with a negative advantage; null is off. dppo_tv and dppo_kl: the
    largest ratio; fipo: also the largest ratio of a token that counts in the sums of later tokens."""

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

    divergence_clip_min: PositiveFloat = 0.2
    """dppo_tv, dppo_kl: largest divergence from the engine's policy of a token that the loss makes less likely."""

    divergence_clip_max: PositiveFloat = 0.2
    """dppo_tv, dppo_kl: largest divergence from the engine's policy of a token that the loss makes more likely."""

    dro_beta: NonNegativeFloat = 0.05
    """dro: weight of half the squared log ratio to the engine's policy."""

    vespo_k_pos: NonNegativeFloat = 2.0
    """vespo: power of a response's ratio where the advantage is not negative."""

    vespo_lambda_pos: NonNegativeFloat = 3.0
    """vespo: decay with a response's ratio where the advantage is not negative."""

    vespo_k_neg: NonNegativeFloat = 3.0
    """vespo: power of a response's ratio where the advantage is negative."""

    vespo_lambda_neg: NonNegativeFloat = 2.0
    """vespo: decay with a response's ratio where the advantage is negative."""

    fipo_half_life: PositiveFloat = 32.0
    """fipo: tokens after which a later token counts half."""

    fipo_clip_min: Share = 0.2
    """fipo: the factor of an advantage is at least 1 - this; 0: it only grows."""

    fipo_clip_max: NonNegativeFloat = 0.2
    """fipo: the factor of an advantage is at most 1 + this."""

    clip_cov_share: PositiveShare = 0.0002
    """clip_cov: share of the step's tokens that it leaves out."""

    clip_cov_min: float = 1.0
    """clip_cov: smallest covariance of a token that may be left out."""

    clip_cov_max: float = 5.0
    """clip_cov: largest covariance of a token that may be left out."""

    kl_cov_share: PositiveShare = 0.002
    """kl_cov: share of the step's tokens, those with the largest covariance, that have the penalty."""

    kl_cov_weight: NonNegativeFloat = 1.0
    """kl_cov: weight of the penalty, the size of the log ratio."""

    log_ratio_penalty: NonNegativeFloat = 0.0
    """Weight of the squared log ratio to the engine's policy, which is added to the loss of each token (Kimi K2.5);
    0 is off."""

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
    2506.09477). Not with use_on_policy_kl_approximation."""

    use_kl_in_reward: bool = False
    """Subtract the KL penalty from the reward instead of adding it to the loss."""

    kl_input_clamp_value: PositiveFloat | None = None
    """Limit log ratios to +- this before the KL is estimated; null means no limit."""

    kl_output_clamp_value: PositiveFloat | None = None
    """Limit KL estimates to +- this; null means no limit."""

    use_importance_sampling_correction: bool = False
    """Weight the loss by training probability / sampling probability, which corrects for different engines."""

    truncated_importance_sampling_type: WeightName | None = None
    """Treatment of extreme correction weights: tis lowers them to the upper limit; icepop sets weights outside the
    limits to 0; seq-mask-tis leaves out responses whose weights have a geometric mean outside; seq-tis gives all tokens
    of a response its weight, the product over its tokens, and lowers it to the upper limit."""

    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper limit of the correction weight."""

    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """Lower limit of the correction weight, for icepop and seq-mask-tis."""

    corrections: list[CorrectionName] = field(default_factory=list)
    """Factors of the objective, multiplied; docs/algorithms.md has their formulas. Masks: seq-mask, off-policy-mask,
    divergence-mask, high-entropy. At most one weight, which is as use_importance_sampling_correction=true with this
    truncated_importance_sampling_type: tis, icepop, seq-mask-tis, seq-tis."""

    sequence_mask_min: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """seq-mask: smallest geometric mean of the weights of a response in the loss."""

    sequence_mask_max: Annotated[float, Field(gt=1)] = 1.01
    """seq-mask: largest geometric mean of the weights of a response in the loss."""

    off_policy_mask_threshold: NonNegativeFloat = 0.1
    """off-policy-mask: leave out responses with a negative advantage whose mean log ratio, sampling / current policy,
    is above this."""

    divergence_mask_threshold: NonNegativeFloat = 0.02
    """divergence-mask: in responses whose total variation from the engine's policy is above this, leave out tokens that
    the loss would move further away."""

    top_entropy_quantile: PositiveShare = 0.2
    """high-entropy: share of the step's tokens, those of the highest entropy, that are in the loss."""

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the mean entropy of the policy's next-token distributions; 0 is off."""

    positive_example_nll_weight: NonNegativeFloat = 0.0
    """VAPO: weight of the negative log-likelihood of correct responses, added to the loss; 0 is off."""

    environment_nll_weight: NonNegativeFloat = 0.0
    """ECHO: weight of the negative log-likelihood of what environments and tools write between the turns of a rollout,
    added to the loss; 0 is off. Not for distillation."""

    kl_type: Literal["reverse", "forward", "mixed", "jensen_shannon"] = "reverse"
    """Divergence that distillation minimises at each token. reverse: KL(policy || teacher); forward: KL(teacher ||
    policy); mixed: their weighted mean; jensen_shannon: the generalised Jensen-Shannon divergence between them."""

    mixed_kl_weight: Share = 0.5
    """With mixed and jensen_shannon, the weight of the forward side: 1 is forward, 0 reverse. It is 1 - TRL's beta."""

    policy_loss_weight: NonNegativeFloat = 0.0
    """Weight of GRPO's loss beside the divergence from the teacher; 0: distillation alone, which needs no rewards."""

    @property
    def chosen_objective(self) -> str:
        """Name or import path of the objective, which a switch may choose."""
        return self.objective_switches[0][1] if self.objective_switches else self.objective

    @property
    def objective_switches(self) -> list[tuple[str, str]]:
        """Switches that are on, each with its objective; the first decides."""
        switches = [(entry.switch, name) for name, entry in OBJECTIVES.items() if entry.switch is not None]
        return [(switch, name) for switch, name in switches if getattr(self, switch)]

    @property
    def objective_entry(self) -> Objective | None:
        """The objective's row of the table; None: the user's own function."""
        return OBJECTIVES.get(self.chosen_objective)

    @property
    def is_on_policy(self) -> bool:
        """True if the policy is compared with itself."""
        return self.force_on_policy_ratio or self.objective == "on_policy"

    @property
    def averages_responses(self) -> bool:
        """True if a response counts as one, with one importance weight."""
        return self.objective_entry is not None and self.objective_entry.averages_responses

    @property
    def chosen_corrections(self) -> tuple[str, ...]:
        """Names of the factors of the objective; a weight without a limit has none."""
        kind = self.truncated_importance_sampling_type
        has_type = self.use_importance_sampling_correction and kind is not None
        return (*((kind,) if has_type and kind is not None else ()), *self.corrections)

    @property
    def chosen_weight(self) -> str | None:
        """Name of the limited weight among the corrections."""
        return next((name for name in self.chosen_corrections if name in WEIGHTS), None)

    @property
    def has_weights(self) -> bool:
        """True if training / sampling probabilities weigh the loss."""
        return self.use_importance_sampling_correction or self.chosen_weight is not None

    @property
    def corrects_sampling(self) -> bool:
        """True if the loss accounts for samples of another policy."""
        return self.has_weights or (self.objective_entry is not None and self.objective_entry.compares_engine)

    @property
    def selection(self) -> Selection | None:
        """Rule that chooses tokens among all of a step; None: the loss needs none."""
        entries = [CORRECTIONS[name] for name in self.chosen_corrections]
        of_objective = self.objective_entry.selection if self.objective_entry is not None else None
        return next((entry.selection for entry in entries if entry.selection is not None), of_objective)

    @property
    def selects_by_covariance(self) -> bool:
        """True if log-probabilities before the step choose tokens."""
        return self.selection in ("covariance_band", "highest_covariance")

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

    name: AdvantagesName = "grpo"
    """grpo: relative to the group; reinforce_plus_plus: normalised over the tokens of the step; gdpo: each reward
    function normalised within the group, then their weighted sum over the step; maxrl: over the group's mean reward;
    opo: the baseline weighs rewards by lengths; pass_at_k: for the best of pass_k responses; otb: a
    baseline of each token; rae: a baseline of each task over earlier steps; or a function of your own
    (docs/extending.md)."""

    options: FormulaOptions = field(default_factory=dict)
    """Parameters of a function of your own by name, such as options.power=2."""

    minus_baseline: bool = False
    """REINFORCE++ only: subtract the mean reward of the group first (the variant with baseline)."""

    pass_k: Annotated[int, Field(ge=2)] = 4
    """pass_at_k only: responses of which the best one counts."""

    baseline_decay: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """rae only: share that a task's baseline keeps when a reward is added to it."""

    @property
    def entry(self) -> Advantages | None:
        """The row of the table; None: the user's own function."""
        return ADVANTAGES.get(self.name)

    @property
    def by_token(self) -> bool:
        """True if each token has an advantage of its own."""
        return self.entry is not None and self.entry.by_token

    @property
    def needs_score_sizes(self) -> bool:
        """True if the size of each token's gradient counts."""
        return self.entry is not None and self.entry.needs_score_sizes

    @property
    def has_task_baselines(self) -> bool:
        """True if each task has a baseline over steps."""
        return self.entry is not None and self.entry.has_task_baselines

    @property
    def needs_parts(self) -> bool:
        """True if the rewards of each reward function count by themselves."""
        return self.entry is not None and self.entry.needs_parts
