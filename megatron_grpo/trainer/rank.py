"""One rank of a model in training: its shard, a number for each token, optimizer steps. Knows nothing of Ray."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig, ReferenceConfig
from megatron_grpo.data.batch import TokenBatch, TokenFields, given
from megatron_grpo.losses.loss import GlobalCounts, LossFunction
from megatron_grpo.platform.device import current_platform
from megatron_grpo.trainer.actor import StepShare
from megatron_grpo.trainer.checkpoint import BackgroundWrite
from megatron_grpo.trainer.microbatch import Microbatch, MicrobatchMaker, joined_over_context
from megatron_grpo.trainer.model.build import build_model, build_value_model
from megatron_grpo.trainer.model.decoder import DecoderModel, row_logprobs
from megatron_grpo.trainer.model.experts import StepRouting
from megatron_grpo.trainer.model.lora import adapters_off
from megatron_grpo.trainer.model.megatron_fields import transformer_fields
from megatron_grpo.trainer.offload import DeviceMemory, OffloadedWeights
from megatron_grpo.trainer.optimizer import ModelOptimizer
from megatron_grpo.weights.hf_weights import load_hf_weights
from megatron_grpo.weights.shape import ModelShape

Microbatches = list[list[int]]
"""Indices into a rank's TokenBatch, one list per microbatch."""


class ModelRank(ABC):
    """A rank's share of a model with one number per token as its output, and of the model's optimizer.

    Args:
        chunks: the rank's shard of the model, its weights loaded; more than one with a virtual pipeline.
        shape: sizes of the model.
        config: how the model is trained; torch.distributed and Megatron's groups are set up for config.parallel.
        decay_steps: optimizer steps of the learning-rate schedule.
    """

    routing_name: ClassVar[str] = "moe"
    """What the names of metrics about experts begin with."""
    reference: list[DecoderModel] | None = None
    """The frozen reference policy, which a checkpoint holds too once it has moved; only a policy has one."""
    reference_moved = False
    """Whether the reference policy is no longer the model that the run started from."""
    writing: BackgroundWrite | None = None
    """What is being written of a checkpoint in the background."""
    replays_routing = False
    """Whether tokens go through the experts that the engine chose; only a policy's may."""

    def __init__(self, chunks: list[DecoderModel], shape: ModelShape, config: PolicyConfig, decay_steps: int) -> None:
        self.chunks, self.shape, self.config = chunks, shape, config
        self._maker = MicrobatchMaker(config.parallel, config.packing, shape, config.fp8.token_multiple)
        self.routing: StepRouting | None = None
        if shape.experts is not None:
            self.routing = StepRouting(chunks, config.moe, self.routing_name, replays=self.replays_routing)
        self.optimizer = ModelOptimizer(chunks, config, decay_steps)
        self.memory = DeviceMemory(self)

    def whole_chunks(self) -> list[DecoderModel]:
        """The chunks with all weights as the last optimizer step made them; collective over data-parallel ranks.

        Whatever reads weights outside of training goes through here: after a step, ranks may still lack those that
        others have updated (policy.overlap_param_gather).

        Raises:
            RuntimeError: engines have the device, and the weights are in host memory.
        """
        self.memory.require_weights()
        self.optimizer.finish_gathering()
        return self.chunks

    def parameters(self) -> list[Any]:
        """The parameters, [...] each, of all chunks of this rank's shard; those in training have a `main_grad`.
        Collective as `whole_chunks` is."""
        return [parameter for chunk in self.whole_chunks() for parameter in chunk.parameters()]

    @property
    def is_reporter(self) -> bool:
        """Whether this rank speaks for its data-parallel replica: last pipeline stage, tensor and context rank 0."""
        return self._has_loss and parallel_state.get_context_parallel_rank() == 0

    @property
    def _has_loss(self) -> bool:
        """Whether this rank's share of the loss counts: its replica's loss is that of all such ranks together."""
        return bool(parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0)

    @abstractmethod
    def _of_rows(self, model: DecoderModel, hidden: Tensor, tokens: TokenFields) -> tuple[Tensor, TokenFields]:
        """A number for each of some tokens, [rows], float32; and what is known of the tokens, with what the head adds.

        Hidden states, [rows, hidden], are those before the tokens, from the model's last stage.
        """

    def stored_entries(self, loss_fn: LossFunction | None) -> tuple[str, ...]:
        """Names of the stored entries that this rank's pipeline stage uses: in the middle of the pipeline none but the
        recorded experts, when its layers have any to replay.

        Args:
            loss_fn: loss function of an optimizer step; None: the pass only computes outputs.
        """
        replayed = self.routing is not None and self.replays_routing and self.routing.routers
        routed = ("routed_experts",) if replayed else ()
        if not parallel_state.is_pipeline_last_stage():
            return ("token_ids", *routed) if parallel_state.is_pipeline_first_stage() else routed
        if loss_fn is not None:
            return ("token_ids", *loss_fn.reads, *routed)
        return ("token_ids", "sampled", *routed)

    def train(
        self, batch: TokenBatch, microbatches: Microbatches, loss_fn: LossFunction, counts: GlobalCounts
    ) -> StepShare:
        """One optimizer step; `batch` is this replica's share, `counts` are those of all replicas together.

        When the gradient is not finite the weights are left untouched, which the share's grad_norm says.
        """
        metrics = self.compute_gradients(batch, microbatches, loss_fn, counts)
        grad_norm = self.optimizer.grad_norm()
        learning_rate = self.optimizer.step(grad_norm) if math.isfinite(grad_norm) else 0.0
        shares = _on_host(metrics) if self._has_loss else None
        if self.routing is not None and math.isfinite(grad_norm):
            chosen = self.routing.counts()
            self.routing.move_biases(chosen)
            told = self.routing.metrics(chosen)
            if shares and self.is_reporter and parallel_state.get_data_parallel_rank() == 0:
                shares[0] |= told  # once: metrics are added up over microbatches and replicas
        return StepShare(grad_norm=grad_norm, learning_rate=learning_rate, metrics=shares)

    def compute_gradients(
        self, batch: TokenBatch, microbatches: Microbatches, loss_fn: LossFunction, counts: GlobalCounts
    ) -> list[dict[str, Tensor]]:
        """Forward and backward over all microbatches, leaving the step's gradient, summed over ranks, in the buffers.

        Returns:
            The loss function's metrics by microbatch, each of shape [], on the last pipeline stage; empty elsewhere.
        """
        self.memory.require_weights()
        for chunk in self.chunks:
            chunk.train()
        self.optimizer.zero_grad()
        if self.routing is not None:
            self.routing.begin(counts.all_sequences)

        def loss_of(output: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            """[rows, hidden] of the last stage to loss, token count and metrics, each []."""
            self.optimizer.finish_gathering()  # the head's weight is read without a call that would
            values, tokens = self._of_rows(self.chunks[-1], output, microbatch.tokens)
            loss, metrics = loss_fn(values, tokens, counts, microbatch.segments)
            # Clones: the schedule divides the loss in place, which a metric of the same storage would follow.
            metrics = {name: value.detach().clone() for name, value in metrics.items()}
            # The schedule asks for a token count to average by; `counts` has already done that.
            return loss, loss.new_zeros((), dtype=torch.int), metrics

        return self._run_schedule(self.optimizer.chunks, batch, microbatches, "loss_mask", loss_of, forward_only=False)

    @torch.no_grad()
    def _forward_tokens(
        self, chunks: list[DecoderModel], batch: TokenBatch, microbatches: Microbatches
    ) -> Tensor | None:
        """The output for the sampled tokens of `batch`, or for all if it does not say which are, and 0 for the others:
        [sum(lengths)], float32, on the reporter's host; None elsewhere."""
        for chunk in chunks:
            chunk.eval()

        def keep(output: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor, tuple[Tensor, NDArray[np.int64]]]:
            """[rows, hidden] to a loss and a count of 0, each [], and numbers, [rows], float32, with their places."""
            values, _ = self._of_rows(chunks[-1], output, microbatch.tokens)
            return values.new_zeros(()), values.new_zeros((), dtype=torch.int), (values, microbatch.flat)

        pieces = self._run_schedule(chunks, batch, microbatches, "sampled", keep, forward_only=True)
        if not self._has_loss:
            return None
        found = torch.cat([values for values, _ in pieces])
        places = torch.from_numpy(np.concatenate([flat for _, flat in pieces]))
        result = found.new_zeros(sum(batch.lengths) + 1)  # the last entry takes what nobody asks about
        result[places.to(result.device)] = found
        if self.config.parallel.context > 1:  # each rank has some of the tokens, and 0 for the others
            result = joined_over_context(result)
        return result[:-1].cpu() if self.is_reporter else None

    def _run_schedule(
        self,
        chunks: Sequence[torch.nn.Module],
        batch: TokenBatch,
        microbatches: Microbatches,
        asked: Literal["loss_mask", "sampled"],
        finish: Callable[[Tensor, Microbatch], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        """Run Megatron's pipeline schedule; the third value of `finish` per microbatch, on the last stage."""
        padded = [*microbatches, *[[]] * self._empty_microbatches(len(microbatches))]

        def forward_step(data: Iterator[Microbatch], module: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            """The stage's output for the next microbatch, [1, tokens or rows, ...], and what makes a loss of it."""
            microbatch = next(data)
            inner = getattr(module, "module", module)
            if inner.post_process:
                inner.rows = microbatch.rows
            # Positions are those of the packed sequences, which the rotary embedding looks at.
            output = module(microbatch.token_ids, None, None, packed_seq_params=microbatch.sequences)
            return output, lambda output: finish(output[0], microbatch)

        # Made one at a time, as the schedule asks for them: the places of a whole step need not fit the device.
        made = (self._maker.make(batch, indices, asked) for indices in padded)
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(itertools.tee(made, len(chunks))),  # every chunk has a use for every microbatch
            model=list(chunks),
            num_microbatches=len(padded),
            seq_length=1,  # neither is looked at: pipeline stages tell each other the shapes of what they send
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return results[: len(microbatches)]

    def _empty_microbatches(self, number: int) -> int:
        """How many microbatches without tokens have to follow so many.

        Ranks that share experts pass a layer together, so all need as many as the one that has most; and an interleaved
        pipeline takes groups of as many as it has ranks.
        """
        parallel, most = self.config.parallel, number
        if parallel.expert > 1 or parallel.expert_tensor > 1:
            numbers = torch.tensor(number, device=current_platform().device)
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
            most = int(numbers)
        if parallel.virtual_pipeline > 1:
            most += -most % parallel.pipeline
        return most - number


def _on_host(metrics: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Metrics by microbatch, each of shape [], as numbers: the host waits for the device once for all of them."""
    values = [value.double() for one in metrics for value in one.values()]
    numbers = iter(torch.stack(values).tolist() if values else ())
    return [{name: next(numbers) for name in one} for one in metrics]


class PolicyRank(ModelRank):
    """A rank's share of the policy, of its optimizer and, when asked for, of the frozen reference policy.

    Args:
        config: the policy's configuration; torch.distributed and Megatron's groups are set up for config.parallel.
        shape: sizes of the model in config.model.path.
        folder: the model's folder in Hugging Face format.
        reference: how to hold the reference policy; None: there is none. With adapters it is the policy without them,
            and nothing is held beside it.
        temperature: sampling temperature, which log-probabilities are taken under.
        decay_steps: optimizer steps of the learning-rate schedule.
    """

    def __init__(
        self,
        config: PolicyConfig,
        shape: ModelShape,
        folder: str,
        *,
        reference: ReferenceConfig | None,
        temperature: float,
        decay_steps: int,
    ) -> None:
        self.shape, self.temperature = shape, temperature
        self.replays_routing = config.moe.replay_routing
        chunks = self._build(config)
        load_hf_weights(chunks, shape, folder)
        self._has_reference = reference is not None
        self._offloaded: OffloadedWeights | None = None
        if reference is not None and not config.lora.rank:  # else it is the policy without its adapters
            self.reference = [chunk.requires_grad_(False) for chunk in self._build(config)]
            _copy_weights(chunks, self.reference)  # nothing is read from disk a second time
            if reference.offload:
                self._offloaded = OffloadedWeights(self.reference)
        super().__init__(chunks, shape, config, decay_steps)

    def _build(self, config: PolicyConfig) -> list[DecoderModel]:
        return build_model(
            self.shape,
            config.parallel,
            precision=config.precision,
            activation_checkpointing=config.activation_checkpointing,
            fields=transformer_fields(config),
            lora=config.lora,
            fp8=config.fp8,
            quantization=config.quantization,
        )

    def logprobs(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Log-probability of every token of `batch` under the current weights.

        Returns:
            [sum(lengths)], float32, on the host, on the reporter; None elsewhere.
        """
        return self._forward_tokens(self.whole_chunks(), batch, microbatches)

    def reference_logprobs(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Log-probability of every token of `batch` under the frozen reference policy.

        Returns:
            [sum(lengths)], float32, on the host, on the reporter; None elsewhere.
        """
        assert self._has_reference, "the reference policy was not loaded"
        if self.reference is None:
            with adapters_off(self.chunks):
                return self._forward_tokens(self.whole_chunks(), batch, microbatches)
        with nullcontext() if self._offloaded is None else self._offloaded.on_device():
            return self._forward_tokens(self.reference, batch, microbatches)

    @torch.no_grad()
    def sync_reference(self, alpha: float) -> None:
        """reference = alpha * policy + (1 - alpha) * reference, in float32 (TR-DPO, Gorbatovski et al. 2024)."""
        assert self.reference is not None, "the reference policy was not loaded"
        # In float32, rounded once at the end: in bfloat16 the difference and its product would be rounded as well.
        for reference, chunk in zip(self.reference, self.whole_chunks(), strict=True):
            for moved, weight in zip(reference.parameters(), chunk.parameters(), strict=True):
                moved.copy_(torch.lerp(moved.float(), weight.to(moved.device).float(), alpha))
        self.reference_moved = True

    def _of_rows(self, model: DecoderModel, hidden: Tensor, tokens: TokenFields) -> tuple[Tensor, TokenFields]:
        """[rows, hidden] to log-probabilities, [rows], float32, and the entries with the entropy among them."""
        logprobs, entropy = row_logprobs(
            model,
            self.shape.vocab,
            hidden,
            given(tokens.token_ids),
            temperature=self.temperature,
            kernel=self.config.logprob_kernel,
            chunk_tokens=self.config.logprob_chunk_size,
        )
        return logprobs, replace(tokens, entropy=entropy)


@torch.no_grad()
def _copy_weights(source: list[DecoderModel], target: list[DecoderModel]) -> None:
    """Give the chunks of a model the parameters and buffers of another of the same layout."""
    for one, other in zip(source, target, strict=True):
        for tensors, others in ((one.parameters(), other.parameters()), (one.buffers(), other.buffers())):
            for tensor, copied in zip(tensors, others, strict=True):
                copied.copy_(tensor)


class ValueRank(ModelRank):
    """A rank's share of the value model and of its optimizer.

    Args:
        config: how the value model is laid out and trained (`Config.value_model`).
        shape: sizes of the value model, from `as_value_model`.
        folder: the model's folder in Hugging Face format.
        decay_steps: optimizer steps of the learning-rate schedule.
    """

    routing_name = "value_moe"

    def __init__(self, config: PolicyConfig, shape: ModelShape, folder: str, *, decay_steps: int) -> None:
        chunks = build_value_model(
            shape,
            config.parallel,
            precision=config.precision,
            activation_checkpointing=config.activation_checkpointing,
            fields=transformer_fields(config),
        )
        load_hf_weights(chunks, shape, folder)
        super().__init__(chunks, shape, config, decay_steps)

    def values(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """The value before every token of `batch` under the current weights.

        Returns:
            [sum(lengths)], float32, on the host, on the reporter; None elsewhere.
        """
        return self._forward_tokens(self.whole_chunks(), batch, microbatches)

    def _of_rows(self, model: DecoderModel, hidden: Tensor, tokens: TokenFields) -> tuple[Tensor, TokenFields]:
        """[rows, hidden] to values, [rows], float32: what is known before each token."""
        return model.output_layer(hidden), tokens
