"""One rank of a model in training: its shard, a number for each token, optimizer steps. Knows nothing of Ray."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.losses.interface import GlobalCounts, LossFunction
from megatron_grpo.platform.device import current_platform
from megatron_grpo.policy.interface import StepShare
from megatron_grpo.policy.rank.optimizer import ModelOptimizer

Microbatches = list[list[int]]
"""Indices into a rank's SequenceBatch, one list per microbatch."""


@dataclass(frozen=True, slots=True)
class _Microbatch:
    batch: SequenceBatch
    token_ids: Tensor
    """[sequences, padded length] on the device."""


class ModelRank(ABC):
    """A rank's share of a model with one number per token as its output, and of the model's optimizer.

    Args:
        model: this rank's shard, its weights loaded.
        config: how it is trained; torch.distributed and Megatron's groups are set up for config.parallel.
        decay_steps: optimizer steps of the learning-rate schedule.
    """

    reference: GPTModel | None = None
    """The frozen reference policy, which a checkpoint holds too once it has moved; only a policy has one."""
    reference_moved = False
    """Whether the reference policy is no longer the model that the run started from."""

    def __init__(self, model: GPTModel, config: PolicyConfig, decay_steps: int) -> None:
        self.model, self.config = model, config
        self.optimizer = ModelOptimizer(model, config, decay_steps)

    @property
    def is_reporter(self) -> bool:
        """Whether this rank speaks for its data-parallel replica: last pipeline stage, tensor rank 0."""
        return bool(parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0)

    @abstractmethod
    def _per_token(self, output: Tensor, token_ids: Tensor) -> Tensor:
        """From the last stage's output to one number per token: [sequences, length], float32, 0 at the first."""

    def _loss_entries(self, output: Tensor, loss_fn: LossFunction) -> dict[str, Tensor]:
        """Further entries of `tokens` that the loss asks for, each [sequences, length]."""
        return {}

    def train(
        self, batch: SequenceBatch, microbatches: Microbatches, loss_fn: LossFunction, counts: GlobalCounts
    ) -> StepShare:
        """One optimizer step; `batch` is this replica's share, `counts` are of the whole step.

        When the gradient is not finite the weights are left untouched, which the share's grad_norm says.
        """
        metrics = self.compute_gradients(batch, microbatches, loss_fn, counts)
        grad_norm = self.optimizer.grad_norm()
        learning_rate = self.optimizer.step(grad_norm) if math.isfinite(grad_norm) else 0.0
        own = [{name: float(value) for name, value in one.items()} for one in metrics] if self.is_reporter else None
        return StepShare(grad_norm=grad_norm, learning_rate=learning_rate, metrics=own)

    def compute_gradients(
        self, batch: SequenceBatch, microbatches: Microbatches, loss_fn: LossFunction, counts: GlobalCounts
    ) -> list[dict[str, Tensor]]:
        """Forward and backward over all microbatches, leaving the step's gradient, summed over ranks, in the buffers.

        Returns:
            The loss function's metrics by microbatch on the last pipeline stage; empty elsewhere.
        """
        self.model.train()
        self.optimizer.zero_grad()

        def loss_of(output: Tensor, microbatch: _Microbatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            length = microbatch.token_ids.shape[1]
            tokens = {name: microbatch.batch.padded(name, length) for name in microbatch.batch.tokens}
            tokens |= self._loss_entries(output, loss_fn)
            loss, metrics = loss_fn(self._per_token(output, microbatch.token_ids), tokens, counts)
            # Clones: the schedule divides the loss in place, which a metric of the same storage would follow.
            metrics = {name: value.detach().clone() for name, value in metrics.items()}
            # The schedule asks for a token count to average by; `counts` has already done that.
            return loss, loss.new_zeros((), dtype=torch.int), metrics

        return self._run_schedule(self.optimizer.model, batch, microbatches, loss_of, forward_only=False)

    @torch.no_grad()
    def _forward_tokens(self, model: GPTModel, batch: SequenceBatch, microbatches: Microbatches) -> Tensor | None:
        """The output for every token of `batch`: [sum(lengths)], on the host, on the reporter; None elsewhere."""

        def keep(output: Tensor, microbatch: _Microbatch) -> tuple[Tensor, Tensor, Tensor]:
            values = self._per_token(output, microbatch.token_ids)
            return values.new_zeros(()), values.new_zeros((), dtype=torch.int), microbatch.batch.unpad(values)

        pieces = self._run_schedule(model, batch, microbatches, keep, forward_only=True)
        if not self.is_reporter:
            return None
        by_sequence: list[Tensor] = [torch.empty(0)] * len(batch)
        for indices, piece in zip(microbatches, pieces, strict=True):
            for index, values in zip(indices, piece.cpu().split([batch.lengths[i] for i in indices]), strict=True):
                by_sequence[index] = values
        return torch.cat(by_sequence)

    def _run_schedule(
        self,
        model: torch.nn.Module,
        batch: SequenceBatch,
        microbatches: Microbatches,
        finish: Callable[[Tensor, _Microbatch], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run Megatron's pipeline schedule; the third value of `finish` per microbatch, on the last stage."""

        def forward_step(data: Any, module: torch.nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            microbatch: _Microbatch = next(data)
            token_ids = microbatch.token_ids
            positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
            return module(token_ids, positions, None), lambda output: finish(output, microbatch)

        prepared = [self._prepare(batch, indices) for indices in microbatches]
        longest = max(one.token_ids.shape[1] for one in prepared)
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(prepared),
            model=[model],
            num_microbatches=len(prepared),
            seq_length=longest,
            micro_batch_size=max(len(one.batch) for one in prepared),
            forward_only=forward_only,
        )
        return results

    def _prepare(self, batch: SequenceBatch, indices: list[int]) -> _Microbatch:
        selected = batch.select(indices).to(current_platform().device)
        multiple = self.config.parallel.sequence_multiple
        length = -(-max(selected.lengths) // multiple) * multiple
        return _Microbatch(batch=selected, token_ids=selected.padded("token_ids", length))
