"""The policy-gradient loss: clipped (PPO, GRPO, GSPO), CISPO, SAPO, REINFORCE."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields, require_field
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.config.paths import list_import_folders
from megatron_grpo.losses import objectives
from megatron_grpo.losses.corrections import correction_factor, make_corrections
from megatron_grpo.losses.divergence import divergences, effective_sample_size, kl_estimate
from megatron_grpo.losses.likelihood import imitation_loss
from megatron_grpo.losses.loss import (
    GlobalCounts,
    Segments,
    bounded_exp,
    loss_share,
    mask_values,
    onward_sum,
    token_mean,
    token_weights,
    weighted_mean,
)
from megatron_grpo.losses.named_formula import NamedFormula, make_formula
from megatron_grpo.losses.objectives import INPUTS, Responses, Statistics, squared_log_ratio, token_loss


def make_objective(config: LossConfig, folders: tuple[str, ...] = ()) -> NamedFormula:
    """Make the configured objective; RunError if it cannot be imported, or has other options."""
    name = config.chosen_objective
    return make_formula(
        f"loss_fn.objective={name}",
        name if config.objective_entry is None else f"{objectives.__name__}.{name}",
        inputs=INPUTS,
        keys={key: value for key, value in vars(config).items() if key not in ("objective", "objective_options")},
        options=config.objective_options,
        folders=(folders or list_import_folders()) if config.objective_entry is None else (),
    )


class ClippedPGLossFn:
    """Policy-gradient surrogate, KL penalty, entropy bonus and imitation (`losses.loss.LossFunction`).

    ::

        loss = average(-correction * objective + kl_penalty * weight * KL(curr, reference)
                       + log_ratio_penalty * log(curr / generation)^2)
               - entropy_coef * token mean of the entropy
               + positive_example_nll_weight * mean of -curr over the tokens of correct responses
               + environment_nll_weight * mean of -curr over the tokens that the environment wrote

    - objective: the negative of what a function of `losses.objectives`, or of the user, returns. Its ratio compares
      curr with prev, the training framework's log-probabilities at the start of the step. Without prev_logprobs (a
      single optimizer step on these samples) prev is curr without gradient: the ratio is 1 and has the policy's
      gradient. objective=on_policy does so in any case.
    - correction: see `correction_factor`; 1 unless use_importance_sampling_correction or corrections. It is a constant
      of the sample: no gradient, and it does not touch the other terms.
    - weight: the token's ratio with use_on_policy_kl_approximation, else 1. The ratio keeps its gradient: then the
      expected gradient of the term is that of KL(policy || reference), also at ratio 1. Without this weight the
      gradient of k3 alone is that of KL(reference || policy) when sampling from the policy, as in the original GRPO.
      kl_score_function_gradient adds, to the gradient at each token, that of its log-probability times the sum of the
      estimates from there to the end of the response (Tang and Munos 2025, arXiv 2506.09477, section 4): the expected
      gradient is then that of the divergence between whole responses.
    - average: see `loss.loss_share`.

    When sampling filters tokens (tokens.unfiltered_logprobs is set), curr, prev and the entropy are of the distribution
    over the kept tokens, and the KL compares the whole distributions of policy and reference. A sampled token that the
    filter removes in training (-inf in curr or prev) has probability 0 there, and so an importance weight of 0: all
    terms but the entropy leave it out. It still counts in what they are divided by, and as a log ratio of 0 in sums and
    means over its response. Entries outside loss_mask may hold anything, infinities and NaN included.
    """

    def __init__(self, config: LossConfig, folders: tuple[str, ...] = ()) -> None:
        """`folders`: of the user, which an objective of their own is imported from."""
        self.config, self.objective = config, make_objective(config, folders)
        self.corrections = make_corrections(config)

    # Ranks fetch these fields (`ModelRank.list_needed_fields`).
    field_names: tuple[str, ...] = (
        "sampled",
        "generation_logprobs",
        "prev_logprobs",
        "reference_logprobs",
        "advantages",
        "selected",
    )

    def __call__(
        self, curr_logprobs: Tensor, tokens: TokenFields, counts: GlobalCounts, segments: Segments | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute this microbatch's share of the policy's loss and metrics.

        Tokens need loss_mask, advantages and generation_logprobs; optionally they have prev_logprobs, weight,
        reference_logprobs for a KL penalty, entropy (with gradient) for its bonus, positive and imitated for imitation.
        Metrics are shares of means over the step's tokens, except `loss` (normalised as the loss is) and names in _max
        and _min, whose neutral values are -inf and inf. `add_derived_metrics` then replaces some of them.
        """
        config = self.config
        self._require_fields(tokens)
        mask = require_field(tokens.loss_mask) > 0
        allowed_mask = mask
        if tokens.unfiltered_logprobs is not None:
            allowed_mask = mask & ~curr_logprobs.isneginf()
            if tokens.prev_logprobs is not None:
                allowed_mask = allowed_mask & ~tokens.prev_logprobs.isneginf()
        curr = mask_values(curr_logprobs, allowed_mask)
        generation = mask_values(require_field(tokens.generation_logprobs), allowed_mask)
        advantages = mask_values(require_field(tokens.advantages), allowed_mask)
        # The detached policy stands for itself before the step: the ratio is 1 and has the log-probability's gradient.
        prev = curr.detach() if tokens.prev_logprobs is None else mask_values(tokens.prev_logprobs, allowed_mask)
        old = curr.detach() if config.is_on_policy else prev

        log_ratio = curr - old
        inputs = {
            "logprobs": curr,
            "old_logprobs": old,
            "sampling_logprobs": generation,
            "log_ratio": log_ratio,
            "advantages": advantages,
            "mask": mask,
            "responses": Responses(mask, segments),
            "selected": torch.zeros_like(mask) if tokens.selected is None else mask & (tokens.selected > 0),
        }
        loss, statistics = token_loss(self.objective, **inputs)
        metrics = _ratio_metrics(statistics, log_ratio, mask, counts)
        if config.has_weights or self.corrections:
            factor, is_changed = correction_factor(config, self.corrections, prev, inputs)
            loss = loss * factor  # before the KL penalty joins: the factors belong to the surrogate alone
            metrics["is_oob_ratio"] = token_mean(is_changed, mask, counts)
        if config.log_ratio_penalty:
            loss = loss + config.log_ratio_penalty * squared_log_ratio(curr, generation)
        if tokens.reference_logprobs is not None:
            # The ratio anew: with a shared one the gradients of both terms would add up in another order.
            kl = self._kl(curr, curr - old, tokens, allowed_mask, segments)
            metrics["kl_penalty"] = token_mean(kl, mask, counts)
            if config.kl_in_loss:
                loss = loss + config.kl_in_loss * kl
        weight = token_weights(tokens, mask)
        share = 1.0 if tokens.rollout_share is None else mask_values(tokens.rollout_share, mask)
        total = loss_share(loss, mask, counts, config, segments, weight, share)
        bonus, bonus_metrics = self._entropy_and_imitation(curr, tokens, mask, counts, weight, curr_logprobs)
        total, metrics = total + bonus, metrics | bonus_metrics
        metrics |= _consistency_metrics(curr.detach(), prev, generation, mask, counts)
        if tokens.unfiltered_logprobs is not None:
            metrics["outside_filter_fraction"] = token_mean(~allowed_mask, mask, counts)
        metrics["loss"] = total
        return total, metrics

    def _entropy_and_imitation(
        self,
        curr: Tensor,
        tokens: TokenFields,
        mask: Tensor,
        counts: GlobalCounts,
        weight: Tensor | float,
        curr_logprobs: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config, total, metrics = self.config, curr.new_zeros(()), {}
        if config.environment_nll_weight and tokens.imitated is not None:
            metrics["environment_nll"] = imitation_loss(curr_logprobs, tokens, counts)
            total = total + config.environment_nll_weight * metrics["environment_nll"]
        if config.entropy_coef:
            entropy = mask_values(require_field(tokens.entropy), mask)
            metrics["entropy"] = token_mean(entropy, mask, counts)
            total = total - config.entropy_coef * weighted_mean(entropy, mask, counts, weight)
        if config.positive_example_nll_weight:
            positive = mask_values(require_field(tokens.positive), mask)
            # Over all correct tokens of the step, not of the microbatch; a step may have none.
            nll = -(curr * positive * weight).sum() / (counts.positive_tokens or 1.0)
            total = total + config.positive_example_nll_weight * nll
            metrics["positive_nll_share"] = token_mean(-curr * positive, mask, counts)
            metrics["positive_share"] = token_mean(positive, mask, counts)
        return total, metrics

    def _kl(
        self, curr: Tensor, log_ratio: Tensor, tokens: TokenFields, mask: Tensor, segments: Segments | None
    ) -> Tensor:
        """KL penalty of each token, without coefficient; `log_ratio`: current / old policy."""
        config = self.config
        kl = kl_estimate(
            curr if tokens.unfiltered_logprobs is None else mask_values(tokens.unfiltered_logprobs, mask),
            mask_values(require_field(tokens.reference_logprobs), mask),
            config.reference_policy_kl_type,
            input_clamp=config.kl_input_clamp_value,
            output_clamp=config.kl_output_clamp_value,
        )
        if config.use_on_policy_kl_approximation:
            # Not detached: through the ratio the estimate's expectation has the gradient of KL(policy || reference).
            kl = kl * bounded_exp(log_ratio)
        if config.kl_in_loss and config.kl_score_function_gradient:
            # A term of value 0: a token also decides which tokens follow, and so the divergence at those.
            later = onward_sum(kl.double(), mask, segments, discount=1.0).to(kl.dtype)
            kl = kl + later * (curr - curr.detach())
        return kl

    def _require_fields(self, tokens: TokenFields) -> None:
        config = self.config
        needs = {
            "reference_logprobs": ("reference_policy_kl_penalty", config.kl_in_loss > 0),
            "entropy": ("entropy_coef", config.entropy_coef > 0),
            "positive": ("positive_example_nll_weight", config.positive_example_nll_weight > 0),
            "selected": ("objective and loss_fn.corrections", config.selection is not None),
        }
        for field, (key, is_needed) in needs.items():
            if is_needed and getattr(tokens, field) is None:
                raise ValueError(f"loss_fn.{key} needs {field} of every token, and there is none")


def _consistency_metrics(
    curr: Tensor, prev: Tensor, generation: Tensor, mask: Tensor, counts: GlobalCounts
) -> dict[str, Tensor]:
    """Metrics of the trainer's disagreement with the engine, and the policy's entropy."""
    # token_mult_prob_error is the mean of exp(|prev - generation|), 1 when both frameworks agree exactly;
    # sampling_importance_ratio the mean of exp(prev - generation), its bias; approx_entropy the mean of
    # -exp(curr - generation) * curr, an importance-weighted Monte-Carlo estimate. Log-probabilities are float32,
    # without gradient, 0 outside the mask and at tokens that a filter removes: these count as agreement.
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
    """Replace auxiliary means of a step by effective_sample_size and positive_nll.

    positive_nll is the mean of -log-probability over the tokens of correct responses, absent if there are none.
    """
    squared = metrics.pop("sampling_importance_ratio_squared")
    metrics["effective_sample_size"] = effective_sample_size(metrics["sampling_importance_ratio"], squared)
    if metrics.get("positive_share"):
        metrics["positive_nll"] = metrics["positive_nll_share"] / metrics["positive_share"]
    metrics.pop("positive_nll_share", None)


def _ratio_metrics(statistics: Statistics, log_ratio: Tensor, mask: Tensor, counts: GlobalCounts) -> dict[str, Tensor]:
    """Shares of means of an objective's statistics, and extremes of its ratio."""
    ratio = statistics.get("probs_ratio")
    ratio = bounded_exp(log_ratio.detach()) if ratio is None else ratio
    nowhere = torch.zeros_like(mask)
    fractions = {f"clip_fraction_{bound}": nowhere for bound in ("low", "high", "dual")}
    means = {"probs_ratio": ratio, "probs_ratio_clamped": ratio, **fractions, **statistics}
    infinity = ratio.new_tensor(float("inf"))
    return {
        **{name: token_mean(values, mask, counts) for name, values in means.items()},
        "probs_ratio_min": torch.where(mask, ratio, infinity).amin(),
        "probs_ratio_max": torch.where(mask, ratio, -infinity).amax(),
    }
