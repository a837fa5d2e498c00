"""One rank of a model in training: its shard, a number for each token, optimizer steps. Knows nothing of Ray."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.data.batch import TokenBatch, TokenFields, given, token_places
from megatron_grpo.losses.interface import GlobalCounts, LossFunction
from megatron_grpo.platform.device import current_platform
from megatron_grpo.policy.interface import StepShare
from megatron_grpo.policy.rank.optimizer import ModelOptimizer

Microbatches = list[list[int]]
"""Indices into a rank's TokenBatch, one list per microbatch."""


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """Sequences as rectangles on the device. Everything about their places was computed on the host, so that nothing
    here makes the host wait for the device."""

    tokens: TokenFields
    """Entries of shape [sequences, length]; token_ids is always there, zeros where the stage does not look at them."""
    places: Tensor
    """[tokens], int64: where each token stands in a rectangle that is read row by row."""


class ModelRank(ABC):
    """A rank's share of a model with one number per token as its output, and of the model's optimizer.

    Args:
        model: the rank's shard of the model, its weights loaded.
        config: how the model is trained; torch.distributed and Megatron's groups are set up for config.parallel.
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
        """[sequences, length, ...] of the last stage's output to one number per token: [sequences, length], float32.

        The first token of a sequence gets 0. Token ids are [sequences, length], int64.
        """

    def _with_loss_entries(self, tokens: TokenFields, output: Tensor, loss_fn: LossFunction) -> TokenFields:
        """The entries of a microbatch and what else the loss asks for, each [sequences, length], from the last stage's
        output, [sequences, length, ...]."""
        return tokens

    def stored_entries(self, loss_fn: LossFunction | None) -> tuple[str, ...]:
        """Names of the stored entries that this rank's pipeline stage uses: none in the middle of the pipeline.

        Args:
            loss_fn: loss function of an optimizer step; None: the pass only computes outputs.
        """
        if not parallel_state.is_pipeline_last_stage():
            return ("token_ids",) if parallel_state.is_pipeline_first_stage() else ()
        if loss_fn is not None:
            return ("token_ids", *loss_fn.reads)
        return ("token_ids", "sampled") if self.is_reporter else ("token_ids",)

    def train(
        self, batch: TokenBatch, microbatches: Microbatches, loss_fn: LossFunction, counts: GlobalCounts
    ) -> StepShare:
        """One optimizer step; `batch` is this replica's share, `counts` are those of all replicas together.

        When the gradient is not finite the weights are left untouched, which the share's grad_norm says.
        """
        metrics = self.compute_gradients(batch, microbatches, loss_fn, counts)
        grad_norm = self.optimizer.grad_norm()
        learning_rate = self.optimizer.step(grad_norm) if math.isfinite(grad_norm) else 0.0
        return StepShare(
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            metrics=_on_host(metrics) if self.is_reporter else None,
        )

    def compute_gradients(
        self, batch: TokenBatch, microbatches: Microbatches, loss_fn: LossFunction, counts: GlobalCounts
    ) -> list[dict[str, Tensor]]:
        """Forward and backward over all microbatches, leaving the step's gradient, summed over ranks, in the buffers.

        Returns:
            The loss function's metrics by microbatch, each of shape [], on the last pipeline stage; empty elsewhere.
        """
        self.model.train()
        self.optimizer.zero_grad()

        def loss_of(output: Tensor, microbatch: _Microbatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            """[sequences, length, ...] of output to loss, token count and metrics, each []."""
            tokens = self._with_loss_entries(microbatch.tokens, output, loss_fn)
            loss, metrics = loss_fn(self._per_token(output, given(tokens.token_ids)), tokens, counts)
            # Clones: the schedule divides the loss in place, which a metric of the same storage would follow.
            metrics = {name: value.detach().clone() for name, value in metrics.items()}
            # The schedule asks for a token count to average by; `counts` has already done that.
            return loss, loss.new_zeros((), dtype=torch.int), metrics

        return self._run_schedule(self.optimizer.model, batch, microbatches, loss_of, forward_only=False)

    @torch.no_grad()
    def _forward_tokens(self, model: GPTModel, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """The output for every token of `batch`: [sum(lengths)], float32, on the reporter's host; None elsewhere."""

        def keep(output: Tensor, microbatch: _Microbatch) -> tuple[Tensor, Tensor, Tensor]:
            """[sequences, length, ...] of output to a loss and a count of 0, each [], and [tokens], float32."""
            values = self._per_token(output, given(microbatch.tokens.token_ids))
            of_tokens = values.reshape(-1)[microbatch.places]
            return values.new_zeros(()), values.new_zeros((), dtype=torch.int), of_tokens

        pieces = self._run_schedule(model, batch, microbatches, keep, forward_only=True)
        if not self.is_reporter:
            return None
        lengths, result = np.asarray(batch.lengths), torch.empty(sum(batch.lengths))
        for indices, piece in zip(microbatches, pieces, strict=True):
            result[torch.from_numpy(token_places(lengths, np.asarray(indices)))] = piece.cpu()
        return result

    def _run_schedule(
        self,
        model: torch.nn.Module,
        batch: TokenBatch,
        microbatches: Microbatches,
        finish: Callable[[Tensor, _Microbatch], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run Megatron's pipeline schedule; the third value of `finish` per microbatch, on the last stage."""

        def forward_step(data: Iterator[_Microbatch], module: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            """The stage's output for the next microbatch, [sequences, length, ...], and what makes a loss of it."""
            microbatch = next(data)
            token_ids = given(microbatch.tokens.token_ids)
            positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
            return module(token_ids, positions, None), lambda output: finish(output, microbatch)

        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            # Made one at a time, as the schedule asks for them: rectangles of a whole step need not fit the device.
            data_iterator=(self._microbatch(batch, indices) for indices in microbatches),
            model=[model],
            num_microbatches=len(microbatches),
            seq_length=max(self._width(batch, indices) for indices in microbatches),
            micro_batch_size=max(map(len, microbatches)),
            forward_only=forward_only,
        )
        return results

    def _width(self, batch: TokenBatch, indices: list[int]) -> int:
        """Columns of a microbatch's rectangles."""
        multiple = self.config.parallel.sequence_multiple
        return -(-max(batch.lengths[i] for i in indices) // multiple) * multiple

    def _microbatch(self, batch: TokenBatch, indices: list[int]) -> _Microbatch:
        selected, width = batch.select(indices), self._width(batch, indices)
        tokens, places = selected.rectangles(width), selected.places(width)
        if tokens.token_ids is None:
            tokens = replace(tokens, token_ids=torch.zeros(len(selected), width, dtype=torch.int64))
        platform = current_platform()
        if platform.name == "cuda":  # only from pinned memory a copy runs beside the host
            tokens = TokenFields(**{name: value.pin_memory() for name, value in tokens.present().items()})
            places = places.pin_memory()
        return _Microbatch(tokens.to(platform.device), places.to(platform.device, non_blocking=True))


def _on_host(metrics: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Metrics by microbatch, each of shape [], as numbers: the host waits for the device once for all of them."""
    values = [value.double() for one in metrics for value in one.values()]
    numbers = iter(torch.stack(values).tolist() if values else ())
    return [{name: next(numbers) for name in one} for one in metrics]
