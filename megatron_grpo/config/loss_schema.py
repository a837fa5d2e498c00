"""The keys of the loss, and which of them exclude or need each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.section import NonNegativeFloat, Positive, PositiveFloat, Section

_SURROGATES = ("use_cispo", "use_sapo", "disable_ppo_ratio")
"""Keys that put another surrogate in the place of the clipped one."""


@dataclass(kw_only=True)
class LossConfig(Section):
    """ClippedPGLossFn; docs/algorithms.md has the formulas."""

    ratio_clip_min: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Probability ratios are clipped from below at 1 - this; 1 is no lower bound."""

    ratio_clip_max: NonNegativeFloat = 0.2
    """Probability ratios are clipped from above at 1 + this."""

    ratio_clip_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clipping: bound on the loss of samples with negative advantage; null is off."""

    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio for a response, the geometric mean of its tokens' ratios. Needs token_level_loss=false."""

    use_cispo: bool = False
    """CISPO: the clipped ratio is only a weight, so that every token keeps its gradient."""

    use_sapo: bool = False
    """SAPO: a sigmoid of the ratio instead of clipping."""

    sapo_temperature_pos: PositiveFloat = 1.0
    """SAPO: steepness of the sigmoid for positive advantages."""

    sapo_temperature_neg: PositiveFloat = 1.05
    """SAPO: steepness of the sigmoid for the other advantages."""

    disable_ppo_ratio: bool = False
    """REINFORCE: advantage times log-probability, without ratio and clipping."""

    force_on_policy_ratio: bool = False
    """Take the current policy itself as the old one: the ratio is 1 with the policy's gradient, nothing is clipped."""

    token_level_loss: bool = True
    """Average over all tokens of the step (true) or over sequences, each averaged over its tokens (false)."""

    constant_normalizer_tokens: Positive | None = None
    """Dr. GRPO: divide the sum over tokens by sequences * this; usually ${generation.max_new_tokens}. null is off."""

    reference_policy_kl_penalty: NonNegativeFloat = 0.01
    """Weight of the KL penalty against the reference policy; 0: no reference policy is loaded."""

    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL: k1 log ratio, k2 half its square, k3 never negative and unbiased."""

    use_on_policy_kl_approximation: bool = False
    """Weight the KL estimate by the importance ratio, so that it is taken under the current policy."""

    use_kl_in_reward: bool = False
    """Subtract the KL penalty from the reward instead of adding it to the loss."""

    kl_input_clamp_value: PositiveFloat | None = None
    """Log ratios are limited to +- this before the KL is estimated; null is no limit."""

    kl_output_clamp_value: PositiveFloat | None = None
    """KL estimates are limited to +- this; null is no limit."""

    use_importance_sampling_correction: bool = False
    """Weight the loss by training probability / sampling probability, to correct for different engines."""

    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = None
    """What happens to large correction weights: tis lowers them to the limit; icepop sets those outside the limits to
    0; seq-mask-tis leaves out responses whose geometric mean is outside."""

    truncated_importance_sampling_ratio: PositiveFloat | None = None
    """Upper limit of the correction weight."""

    truncated_importance_sampling_ratio_min: NonNegativeFloat | None = None
    """Lower limit of the correction weight, for icepop and seq-mask-tis."""

    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus: the mean entropy of the policy's next-token distributions; 0 is off."""

    positive_example_nll_weight: NonNegativeFloat = 0.0
    """VAPO: weight of the negative log-likelihood of correct responses, added to the loss; 0 is off."""

    @property
    def kl_in_loss(self) -> float:
        """Weight of the KL term of the loss itself."""
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @property
    def kl_in_reward(self) -> float:
        """Weight of the KL that is subtracted from the reward."""
        return self.reference_policy_kl_penalty if self.use_kl_in_reward else 0.0


def loss_problems(loss: LossConfig) -> Iterator[Problem]:
    """Keys of the loss that exclude each other or lack what they need."""
    yield from _surrogates(loss)
    yield from _averages(loss)
    yield from _kl(loss)
    yield from _correction(loss)


def _surrogates(loss: LossConfig) -> Iterator[Problem]:
    chosen = [name for name in _SURROGATES if getattr(loss, name)]
    if len(chosen) > 1:
        text = f"excludes {' and '.join(f'loss_fn.{name}' for name in chosen[1:])}: each is a surrogate of its own"
        yield Problem(f"loss_fn.{chosen[0]}=True", text)
    if chosen and loss.ratio_clip_c is not None:
        text = f"bounds the clipped surrogate, which loss_fn.{chosen[0]} replaces; use null"
        yield Problem(f"loss_fn.ratio_clip_c={loss.ratio_clip_c:g}", text)
    if loss.force_on_policy_ratio and loss.disable_ppo_ratio:
        text = "excludes loss_fn.disable_ppo_ratio: there is no ratio left to be forced to 1"
        yield Problem("loss_fn.force_on_policy_ratio=True", text)
    if chosen and loss.sequence_level_importance_ratios:
        why = "has no ratio" if loss.disable_ppo_ratio else "weighs every token by its own ratio"
        text = f"excludes loss_fn.{chosen[0]}, which {why}"
        yield Problem("loss_fn.sequence_level_importance_ratios=True", text)


def _averages(loss: LossConfig) -> Iterator[Problem]:
    if loss.sequence_level_importance_ratios and loss.token_level_loss:
        text = "needs loss_fn.token_level_loss=false: an average over tokens would weigh a response by its length"
        yield Problem("loss_fn.sequence_level_importance_ratios=True", text)
    if loss.constant_normalizer_tokens is not None and not loss.token_level_loss:
        text = "excludes loss_fn.token_level_loss=false: both say what a response's tokens are divided by"
        yield Problem(f"loss_fn.constant_normalizer_tokens={loss.constant_normalizer_tokens}", text)


def _kl(loss: LossConfig) -> Iterator[Problem]:
    unweighted = loss.kl_in_loss > 0 and not loss.use_on_policy_kl_approximation
    if loss.reference_policy_kl_type == "k1" and unweighted:
        text = (
            "has an expected gradient of 0 in the loss; use k2 or k3, loss_fn.use_on_policy_kl_approximation, or "
            "loss_fn.use_kl_in_reward"
        )
        yield Problem("loss_fn.reference_policy_kl_type=k1", text)
    if loss.use_kl_in_reward and loss.reference_policy_kl_penalty == 0:
        text = "subtracts nothing while loss_fn.reference_policy_kl_penalty is 0"
        yield Problem("loss_fn.use_kl_in_reward=True", text)
    if loss.use_kl_in_reward and loss.use_on_policy_kl_approximation:
        text = "weighs the KL of the loss, and loss_fn.use_kl_in_reward leaves none there"
        yield Problem("loss_fn.use_on_policy_kl_approximation=True", text)


def _correction(loss: LossConfig) -> Iterator[Problem]:
    kind, low = loss.truncated_importance_sampling_type, loss.truncated_importance_sampling_ratio_min
    high = loss.truncated_importance_sampling_ratio
    prefix = "loss_fn.truncated_importance_sampling"
    if kind is None:
        for name, value in (("ratio", high), ("ratio_min", low)):
            if value is not None:
                yield Problem(f"{prefix}_{name}={value:g}", f"needs {prefix}_type: tis, icepop or seq-mask-tis")
        return
    if not loss.use_importance_sampling_correction:
        text = "needs loss_fn.use_importance_sampling_correction=true, whose weights it limits"
        yield Problem(f"{prefix}_type={kind}", text)
    if high is None:
        yield Problem(f"{prefix}_type={kind}", f"needs {prefix}_ratio, the upper limit")
    if kind == "tis" and low is not None:
        yield Problem(f"{prefix}_ratio_min={low:g}", "tis has no lower limit; use null, or icepop or seq-mask-tis")
    if kind != "tis" and low is None:
        yield Problem(f"{prefix}_type={kind}", f"needs {prefix}_ratio_min, the lower limit")
    if low is not None and high is not None and low >= high:
        yield Problem(f"{prefix}_ratio_min={low:g}", f"must be below {prefix}_ratio={high:g}")
