"""The policy-gradient loss of GRPO and its variants."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_grpo.data.batch import TokenFields, given
from megatron_grpo.losses.divergence import divergences, effective_sample_size, kl_estimate, sampling_correction
from megatron_grpo.losses.loss import bounded_exp, loss_share, masked, remaining_sum, token_mean
from megatron_grpo.losses.surrogates import surrogate

if TYPE_CHECKING:
    from megatron_grpo.config.loss_schema import LossConfig
    from megatron_grpo.losses.loss import GlobalCounts, Segments


class ClippedPGLossFn:
    """A `losses.loss.LossFunction`: a policy-gradient surrogate, a KL penalty, an entropy bonus, and imitation.

    ::

        loss = average(-correction * objective + kl_penalty * weight * KL(curr, reference))
               - entropy_coef * token mean of the entropy
               + positive_example_nll_weight * mean of -curr over the tokens of correct responses

    - objective: see `surrogates`; its ratio compares curr with prev, the training framework's log-probabilities at the
      start of the step. Without prev_logprobs the step is the only one on its samples, prev is curr without gradient,
      and the ratio is 1 with the policy's gradient; force_on_policy_ratio makes the ratio so in any case.
    - correction: see `sampling_correction`; 1 unless use_importance_sampling_correction. It is a constant of the
      sample: no gradient, and it does not touch the other terms.
    - weight: the token's ratio with use_on_policy_kl_approximation, else 1. The ratio keeps its gradient: then the
      expected gradient of the term is that of KL(policy || reference), also at ratio 1. Without it the gradient of k3
      alone is that of KL(reference || policy) when sampling from the policy, as in the original GRPO.
      kl_score_function_gradient adds, to the gradient at each token, that of its log-probability times the sum of the
      estimates from there to the end of the response (Tang and Munos 2025, arXiv 2506.09477, section 4): the expected
      gradient is then that of the divergence between whole responses.
    - average: see `loss.loss_share`.

    Entries outside loss_mask may hold anything, infinities and NaN included: they are replaced before any arithmetic.
    """

    def __init__(self, config: LossConfig) -> None:
        self.config = config

    reads = ("sampled", "generation_logprobs", "prev_logprobs", "reference_logprobs", "advantages")
    """Stored entries that the loss is computed from, those that a configuration leaves out included."""

    def __call__(
        self, curr_logprobs: Tensor, tokens: TokenFields, counts: GlobalCounts, segments: Segments | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The microbatch's share of the policy's loss and metrics, from the arguments of `losses.loss.LossFunction`.

        Args:
            tokens: loss_mask, advantages and generation_logprobs; optionally prev_logprobs; reference_logprobs for a KL
                penalty, entropy (with gradient) for an entropy bonus, positive for imitation.

        Returns:
            The microbatch's share of the loss, shape [], and metrics: shares of means over the step's tokens, except
            `loss` (normalised as the loss is) and names ending in _max and _min, whose neutral values are -inf and inf.
            `add_derived_metrics` puts others in the place of some.

        Raises:
            ValueError: an option needs an entry of `tokens` that is not there.
        """
        config = self.config
        self._check(tokens)
        # Masked before any arithmetic: NaN in padding times a mask of 0 is NaN, in the loss and in its gradient.
        mask = given(tokens.loss_mask) > 0
        curr = masked(curr_logprobs, mask)
        generation = masked(given(tokens.generation_logprobs), mask)
        advantages = masked(given(tokens.advantages), mask)
        # Detached, the policy stands for its own past: a ratio of value 1 with the gradient of the log-probability.
        prev = curr.detach() if tokens.prev_logprobs is None else masked(tokens.prev_logprobs, mask)
        old = curr.detach() if config.force_on_policy_ratio else prev

        policy = surrogate(curr, old, advantages, mask, config, segments)
        loss, metrics = -policy.objective, policy.metrics(mask, counts)
        if config.use_importance_sampling_correction:
            weights, out_of_bounds = sampling_correction(prev, generation, mask, config, segments)
            loss = loss * weights  # before the KL penalty joins: the weights belong to the surrogate alone
            metrics["is_oob_ratio"] = token_mean(out_of_bounds, mask, counts)
        if tokens.reference_logprobs is not None:
            kl = self._kl(curr, old, masked(tokens.reference_logprobs, mask))
            metrics["kl_penalty"] = token_mean(kl, mask, counts)
            if config.kl_in_loss:
                if config.kl_score_function_gradient:
                    # Of value 0. A token also decides which tokens follow, and with that what the divergence is there.
                    kl = kl + remaining_sum(kl, mask, segments) * (curr - curr.detach())
                loss = loss + config.kl_in_loss * kl
        total = loss_share(loss, mask, counts, config, segments)
        extra, of_extra = self._entropy_and_imitation(curr, tokens, mask, counts)
        total, metrics = total + extra, metrics | of_extra
        metrics |= _consistency_metrics(curr.detach(), prev, generation, mask, counts)
        metrics["loss"] = total
        return total, metrics

    def _entropy_and_imitation(
        self, curr: Tensor, tokens: TokenFields, mask: Tensor, counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Entropy bonus and imitation of correct responses: the share of both loss terms (0 when off), and metrics."""
        config, total, metrics = self.config, curr.new_zeros(()), {}
        if config.entropy_coef:
            metrics["entropy"] = token_mean(masked(given(tokens.entropy), mask), mask, counts)
            total = total - config.entropy_coef * metrics["entropy"]
        if config.positive_example_nll_weight:
            positive = masked(given(tokens.positive), mask)
            # Over all correct tokens of the step, not of the microbatch; at least 1, since a step may have none.
            nll = -(curr * positive).sum() / max(counts.positive_tokens, 1.0)
            total = total + config.positive_example_nll_weight * nll
            metrics["positive_nll_share"] = token_mean(-curr * positive, mask, counts)
            metrics["positive_share"] = token_mean(positive, mask, counts)
        return total, metrics

    def _kl(self, curr: Tensor, old: Tensor, reference: Tensor) -> Tensor:
        """[sequences, length], float32, as the three log-probabilities are: KL penalty of each token, coefficient 1."""
        config = self.config
        kl = kl_estimate(
            curr,
            reference,
            config.reference_policy_kl_type,
            input_clamp=config.kl_input_clamp_value,
            output_clamp=config.kl_output_clamp_value,
        )
        # The ratio is not detached: through it the estimate's expectation has the gradient of KL(policy || reference).
        return kl * bounded_exp(curr - old) if config.use_on_policy_kl_approximation else kl

    def _check(self, tokens: TokenFields) -> None:
        config = self.config
        needed = {
            "reference_logprobs": ("reference_policy_kl_penalty", config.kl_in_loss > 0),
            "entropy": ("entropy_coef", config.entropy_coef > 0),
            "positive": ("positive_example_nll_weight", config.positive_example_nll_weight > 0),
        }
        for entry, (key, wanted) in needed.items():
            if wanted and getattr(tokens, entry) is None:
                raise ValueError(f"loss_fn.{key} needs {entry} of every token, and there is none")


def _consistency_metrics(
    curr: Tensor, prev: Tensor, generation: Tensor, mask: Tensor, counts: GlobalCounts
) -> dict[str, Tensor]:
    """How far training and generation disagree about the sampled tokens, and the policy's entropy.

    token_mult_prob_error is the mean of exp(|prev - generation|), 1 when both frameworks agree exactly;
    sampling_importance_ratio the mean of exp(prev - generation), its bias; approx_entropy the mean of
    -exp(curr - generation) * curr, an importance-weighted Monte-Carlo estimate. `divergences` has the others.
    Log-probabilities are [sequences, length], float32, without gradient and 0 outside the mask, which is bool.
    """
    error, weight = bounded_exp((prev - generation).abs()), bounded_exp(prev - generation)
    return {
        "token_mult_prob_error": token_mean(error, mask, counts),
        # Padding must not win the maximum, not even in a microbatch without a token in the loss.
        "token_mult_prob_error_max": torch.where(mask, error, error.new_tensor(float("-inf"))).amax(),
        "sampling_importance_ratio": token_mean(weight, mask, counts),
        "sampling_importance_ratio_squared": token_mean(weight.square(), mask, counts),
        "approx_entropy": token_mean(-bounded_exp(curr - generation) * curr, mask, counts),
        **{name: token_mean(value, mask, counts) for name, value in divergences(prev, generation).items()},
    }


def add_derived_metrics(metrics: dict[str, float]) -> None:
    """Replace auxiliary means of the whole step by the metrics that follow from them.

    effective_sample_size from the mean squared weight; positive_nll, the mean of -log-probability over the tokens of
    correct responses, from its sum over them (left out when no response is correct).
    """
    squared = metrics.pop("sampling_importance_ratio_squared")
    metrics["effective_sample_size"] = effective_sample_size(metrics["sampling_importance_ratio"], squared)
    if metrics.get("positive_share"):
        metrics["positive_nll"] = metrics["positive_nll_share"] / metrics["positive_share"]
    metrics.pop("positive_nll_share", None)
