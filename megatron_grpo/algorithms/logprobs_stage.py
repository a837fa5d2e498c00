"""The log-probabilities that a step needs before it learns, and the responses that they leave out of the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_grpo.algorithms.token_stage import on_tokens
from megatron_grpo.config.schema import Config
from megatron_grpo.data.batch import StepBatch
from megatron_grpo.losses.consistency import inconsistent_sequences
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.policy.interface import PolicyInterface
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.run.non_finite import StepGuard


def add_logprobs(
    config: Config, batch: StepBatch, policy: PolicyInterface, rollouts: RolloutPool, guard: StepGuard, timer: StepTimer
) -> dict[str, float]:
    """Add what the step needs of prev_logprobs and reference_logprobs; leave inconsistent responses out of the loss.

    Returns:
        Metrics about responses that were left out; empty when nobody looks for them.

    Raises:
        RunError: a log-probability that is looked at is not finite.
    """
    # A penalty in the reward looks at every response, the loss only at those in it.
    everywhere = config.loss_fn.use_kl_in_reward
    if config.needs_prev_logprobs:
        with timer.phase("logprobs"):
            finite = policy.add_logprobs(batch)
        guard.require_finite("prev_logprobs", finite | ~(batch.in_loss | everywhere), batch)
    if config.uses_reference:
        with timer.phase("logprobs"):
            finite = policy.add_reference_logprobs(batch)
        guard.require_finite("reference_logprobs", finite | ~(batch.in_loss | everywhere), batch)
    threshold = config.loop.seq_logprob_error_threshold
    if threshold is None:
        return {}
    with timer.phase("logprobs"):
        needed = ("sampled", "prev_logprobs", "generation_logprobs")
        beyond, metrics = on_tokens(rollouts, batch, needed, _judge_sequences, batch.in_loss, threshold)
    batch.in_loss = batch.in_loss & ~beyond
    return dict(metrics)


def _judge_sequences(
    lengths: NDArray[np.int64], arrays: dict[str, NDArray[Any]], in_loss: NDArray[np.bool_], threshold: float
) -> tuple[dict[str, NDArray[np.float32]], tuple[NDArray[np.bool_], dict[str, float]]]:
    """Which sequences training and generation disagree about too much; runs in a rollout worker.

    Args:
        lengths: [sequences], int64: tokens of each.
        arrays: sampled (bool), prev_logprobs and generation_logprobs (float32), each [sum(lengths)].
        in_loss: [sequences], bool: whether the loss is taken over the response.
        threshold: largest mean of exp(|prev - generation|) of a response that stays in the loss.

    Returns:
        No entry to store; and [sequences], bool: those beyond the threshold, with the metrics about them.
    """
    mask = torch.from_numpy(arrays["sampled"] & np.repeat(in_loss, lengths)).float()
    prev, generation = (torch.from_numpy(arrays[name]) for name in ("prev_logprobs", "generation_logprobs"))
    beyond, metrics = inconsistent_sequences(mask, prev, generation, lengths.tolist(), threshold)
    return {}, (beyond.numpy(), metrics)
