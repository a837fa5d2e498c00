"""Functions over the tokens of a step, which run in a rollout worker: token ids do not come to the driver.

Each takes the lengths of the sequences, [sequences], int64, and the fields that its caller named, each [sum(lengths)]
with the sequences end to end. It returns new fields of this form, which stay in the object store, and a result.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.batch.step_batch import TokenArrays
from megatron_grpo.batch.token_batch import find_observed, scatter_sampled
from megatron_grpo.config.schema import Config, GRPOConfig, PPOConfig
from megatron_grpo.losses import advantages as formulas
from megatron_grpo.losses.divergence import find_inconsistent_sequences, kl_estimate
from megatron_grpo.losses.loss import bounded_exp
from megatron_grpo.losses.named_formula import NamedFormula
from megatron_grpo.losses.value import estimate_advantages, token_rewards, whiten


def compute_token_advantages(
    lengths: NDArray[np.int64],
    arrays: TokenArrays,
    config: Config,
    rewards: Tensor,
    response_tokens: NDArray[np.int64],
    estimator: NamedFormula,
) -> tuple[TokenArrays, NDArray[np.bool_]]:
    """Compute the advantage of every sampled token, 0 for the others.

    Args:
        arrays: sampled; with use_kl_in_reward reference_logprobs and the policy's (`choose_policy_logprobs`).
        rewards: [groups, samples], float32: `Scores.rewards`, scaled and shaped; NaN where there is none.
        response_tokens: [rollouts], int64: sampled tokens of each.

    Returns advantages; and [sequences], bool: whether all of a sequence's advantages are finite.
    """
    loop, response_lengths = config.training_loop, response_tokens.tolist()
    assert isinstance(loop, GRPOConfig)
    penalty, tokens = compute_kl_penalty(config, arrays), torch.from_numpy(response_tokens).view_as(rewards)
    if loop.adv_estimator.by_token:
        advantages = estimator(rewards=rewards, lengths=tokens, token_penalty=penalty)
    else:
        assert penalty is not None
        # A KL penalty lowers the response's reward by its sum (as in RLOO, Ahmadian et al. 2024).
        sums = torch.stack([response.sum() for response in penalty.split(response_lengths)]).view_as(rewards)
        by_response = formulas.response_advantages(estimator, rewards - sums, tokens).flatten()
        advantages = by_response.repeat_interleave(torch.tensor(response_lengths))
    field = scatter_sampled(formulas.clip_advantages(advantages, loop), arrays["sampled"])
    return {"advantages": field}, find_finite_sequences(field, lengths)


def repeat_turn_advantages(
    lengths: NDArray[np.int64], arrays: TokenArrays, config: Config, advantages: Tensor, turn_tokens: Tensor
) -> tuple[TokenArrays, NDArray[np.bool_]]:
    """Give each sampled token the advantage of its turn.

    `advantages` and `turn_tokens`, its sampled tokens, are [turns, groups, samples]. The result is that of
    `compute_token_advantages`.
    """
    by_sequence, counts = (values.flatten(1).T.flatten() for values in (advantages, turn_tokens))
    by_token = formulas.clip_advantages(by_sequence.repeat_interleave(counts), config.sampled_loop)
    field = scatter_sampled(by_token, arrays["sampled"])
    return {"advantages": field}, find_finite_sequences(field, lengths)


def compute_ppo_token_advantages(
    lengths: NDArray[np.int64],
    arrays: TokenArrays,
    config: Config,
    rewards: Tensor,
    response_tokens: NDArray[np.int64],
    in_loss: NDArray[np.bool_],
) -> tuple[TokenArrays, NDArray[np.bool_]]:
    """Compute advantages and returns of every sampled token, in float64.

    Arguments and results are those of `compute_token_advantages`, with values in `arrays` and returns beside the
    advantages, which are normalised over the sampled tokens `in_loss`: [sampled tokens], bool.
    """
    ppo = config.training_loop
    assert isinstance(ppo, PPOConfig)
    device = torch.device("cuda" if ppo.calculate_advantages_on_gpu else "cpu")
    sampled, response_lengths = arrays["sampled"], response_tokens.tolist()
    scores = rewards.flatten().double().nan_to_num(nan=0.0)  # a response without a reward is not in the loss
    by_token = token_rewards(scores, response_lengths, compute_kl_penalty(config, arrays)).to(device)
    values = torch.from_numpy(arrays["values"][sampled]).double().to(device)
    estimate = estimate_advantages(by_token, values, response_lengths, ppo.adv_estimator)
    advantages = estimate.advantages
    if ppo.adv_estimator.normalize_advantages:
        advantages = whiten(advantages, torch.from_numpy(in_loss).to(device))
    field = scatter_sampled(formulas.clip_advantages(advantages.cpu(), ppo), sampled)
    returns = scatter_sampled(estimate.returns, sampled)
    return {"advantages": field, "returns": returns}, find_finite_sequences(field, lengths)


def choose_policy_logprobs(config: Config) -> str:
    """Name the field of the policy's unfiltered log-probabilities, for a KL penalty."""
    return "unfiltered_logprobs" if config.generation.has_training_filter else "prev_logprobs"


def compute_kl_penalty(config: Config, arrays: TokenArrays) -> Tensor | None:
    """Compute the KL penalty of every sampled token, float32."""
    loss = config.loss_fn
    if not loss.use_kl_in_reward:
        return None
    penalty = loss.kl_in_reward * kl_estimate(
        torch.from_numpy(arrays[choose_policy_logprobs(config)]),
        torch.from_numpy(arrays["reference_logprobs"]),
        loss.reference_policy_kl_type,
        input_clamp=loss.kl_input_clamp_value,
        output_clamp=loss.kl_output_clamp_value,
    )
    return penalty[torch.from_numpy(arrays["sampled"])]


def find_finite_sequences(field: NDArray[np.float32], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Find the sequences with finite values only: [sequences], bool."""
    bad_tokens = np.flatnonzero(~np.isfinite(field))  # nearly always none, so looking up their sequences is cheap
    is_finite = np.ones(len(lengths), dtype=np.bool_)
    is_finite[np.searchsorted(np.cumsum(lengths), bad_tokens, side="right")] = False
    return is_finite


def flag_inconsistent_sequences(
    lengths: NDArray[np.int64],
    arrays: TokenArrays,
    in_loss: NDArray[np.bool_],
    rollout_lengths: NDArray[np.int64],
    threshold: float,
) -> tuple[TokenArrays, tuple[NDArray[np.bool_], dict[str, float]]]:
    """Flag rollouts that training and generation disagree about; returns flags and metrics.

    A rollout is flagged if the mean of exp(|prev - generation|) over its tokens exceeds `threshold`.
    """
    mask = torch.from_numpy(arrays["sampled"] & np.repeat(in_loss, lengths)).float()
    prev, generation = (torch.from_numpy(arrays[name]) for name in ("prev_logprobs", "generation_logprobs"))
    is_flagged, metrics = find_inconsistent_sequences(mask, prev, generation, rollout_lengths.tolist(), threshold)
    return {}, (is_flagged.numpy(), metrics)


def measure_prob_error(
    lengths: NDArray[np.int64], arrays: TokenArrays, in_loss: NDArray[np.bool_]
) -> tuple[TokenArrays, tuple[float, float]]:
    """Measure mean and largest exp(|prev - generation|) of tokens in the loss."""
    mask = arrays["sampled"] & np.repeat(in_loss, lengths)
    prev, generation = (torch.from_numpy(arrays[name][mask]) for name in ("prev_logprobs", "generation_logprobs"))
    is_allowed = ~prev.isneginf()  # tokens that the sampling filter removes count as agreement
    errors = torch.where(is_allowed, bounded_exp((prev - generation).abs()), torch.ones_like(prev))
    return {}, (float(errors.double().mean()), float(errors.max()))


def sum_over_sampled(
    lengths: NDArray[np.int64], arrays: TokenArrays, field: str
) -> tuple[TokenArrays, NDArray[np.float64]]:
    """Sum a field over the sampled tokens of each sequence: [sequences], float64.

    A `TokenFunction` over the fields sampled and `field`; it adds none.
    """
    values = np.where(arrays["sampled"], arrays[field], 0.0).astype(np.float64)
    return {}, np.add.reduceat(values, np.cumsum(lengths) - lengths)


def count_observed(lengths: NDArray[np.int64], arrays: TokenArrays) -> tuple[TokenArrays, NDArray[np.int64]]:
    """Count the observed tokens (`find_observed`): [sequences], int64."""
    observed = find_observed(arrays["sampled"], lengths)
    return {}, np.add.reduceat(observed.astype(np.int64), np.cumsum(lengths) - lengths)


def merge_teacher_outputs(lengths: NDArray[np.int64], arrays: TokenArrays) -> tuple[TokenArrays, None]:
    """Merge the outputs of several teachers, each 0 outside its sequences."""
    width = max(array.shape[1] for array in arrays.values())
    merged = np.zeros((int(lengths.sum()), width), dtype=next(iter(arrays.values())).dtype)
    for array in arrays.values():  # bits of bfloat16 add up too, because all but one are 0
        merged[:, : array.shape[1]] += array
    return {"teacher_outputs": merged}, None
