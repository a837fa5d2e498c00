"""The keys of PPO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from megatron_grpo.config.loop_schema import LoopConfig
from megatron_grpo.config.section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section

Lambda = Annotated[float, Field(ge=0, le=1)]


@dataclass(kw_only=True)
class PPOAdvantageConfig(Section):
    """How rewards and values become advantages and returns."""

    name: Literal["gae", "raw_reward"] = "gae"
    """gae: generalised advantage estimation; raw_reward: the reward itself, whatever the value model says."""

    gae_gamma: Fraction = 1.0
    """Discount of the next token."""

    gae_lambda: Lambda = 0.95
    """Lambda of gae: 1 trusts the rewards alone (unbiased), smaller ones trust the values more (less variance)."""

    gae_lambda_policy: Lambda | None = None
    """Lambda of the policy's advantages; null: gae_lambda."""

    gae_lambda_value: Lambda | None = None
    """Lambda of the value model's returns; null: gae_lambda. VAPO takes 1."""

    length_adaptive_alpha: NonNegativeFloat | None = None
    """VAPO: lambda of the policy's advantages = 1 - 1 / (this * response length), at least 0; null and 0 are off."""

    normalize_advantages: bool = True
    """Shift and scale advantages to mean 0 and variance 1 over the tokens in the loss of the step."""

    @property
    def has_own_lambdas(self) -> bool:
        """Whether policy and value model both have a lambda other than gae_lambda."""
        of_policy = self.gae_lambda_policy is not None or bool(self.length_adaptive_alpha)
        return of_policy and self.gae_lambda_value is not None

    @property
    def lambda_policy(self) -> float:
        """Lambda of the policy's advantages, unless it follows the length."""
        return self.gae_lambda if self.gae_lambda_policy is None else self.gae_lambda_policy

    @property
    def lambda_value(self) -> float:
        """Lambda of the value model's returns."""
        return self.gae_lambda if self.gae_lambda_value is None else self.gae_lambda_value


@dataclass(kw_only=True)
class PPOConfig(LoopConfig):
    """What only PPO has; read with algorithm=ppo."""

    num_generations_per_prompt: Positive = 1
    """Responses sampled for each prompt; the value model is the baseline, so one is enough."""

    ppo_epochs: Positive = 1
    """Passes of both optimizers over the samples of a step."""

    policy_training_start_step: NonNegative = 0
    """Steps at the beginning that train the value model only (critic warm-up, value pretraining)."""

    adv_estimator: PPOAdvantageConfig = field(default_factory=PPOAdvantageConfig)

    skip_reference_policy_logprobs_calculation: bool = False
    """Do not load a reference policy; false reports kl_penalty also where it has no weight in the loss."""

    calculate_advantages_on_gpu: bool = False
    """Estimate advantages on the first GPU that the driver sees, which a rank uses too, instead of on the CPU."""

    has_value_model: ClassVar[bool] = True
    passes_name: ClassVar[str] = "ppo_epochs"

    @property
    def observes_reference(self) -> bool:
        return not self.skip_reference_policy_logprobs_calculation

    @property
    def steps_without_policy(self) -> int:
        return self.policy_training_start_step


@dataclass(kw_only=True)
class MseValueLossConfig(Section):
    """MseValueLossFn; docs/algorithms.md has the formula."""

    value_clip: NonNegativeFloat | None = 0.2
    """A value that moved further than this from where the step found it gains nothing by it; null and 0 are off."""

    scale: PositiveFloat = 1.0
    """Factor of the loss, and so of its gradient; what is reported is the loss without it."""
