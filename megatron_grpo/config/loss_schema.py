"""The keys of the loss."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from annotated_types import Predicate
from pydantic import Field

from megatron_grpo.config.formulas import ADVANTAGES, OBJECTIVES, Advantages, Objective
from megatron_grpo.config.section import (
    FormulaOptions,
    ImportPath,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
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


class LossConfig(Section):
    """ClippedPGLossFn; docs/algorithms.md has the formulas."""

    objective: ObjectiveName = "clipped"
    """Loss of each token. clipped: PPO's; gspo, cispo, sapo, reinforce, on_policy: as the switches below, which choose
    them too; or a function of your own (docs/extending.md)."""

    objective_options: FormulaOptions = field(default_factory=dict)
    """Parameters of the objective by name, such as objective_options.delta=0.2; those of the built-in ones are keys."""

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
    function normalised within the group, then their weighted sum over the step; or a function of your own
    (docs/extending.md)."""

    options: FormulaOptions = field(default_factory=dict)
    """Parameters of a function of your own by name, such as options.power=2."""

    minus_baseline: bool = False
    """REINFORCE++ only: subtract the mean reward of the group first (the variant with baseline)."""

    @property
    def entry(self) -> Advantages | None:
        """The row of the table; None: the user's own function."""
        return ADVANTAGES.get(self.name)

    @property
    def by_token(self) -> bool:
        """True if each token has an advantage of its own."""
        return self.entry is not None and self.entry.by_token

    @property
    def needs_parts(self) -> bool:
        """True if the rewards of each reward function count by themselves."""
        return self.entry is not None and self.entry.needs_parts
