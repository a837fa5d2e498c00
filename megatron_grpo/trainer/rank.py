"""One rank of a model in training: its shard, forward passes, optimizer steps, the reference policy. Without Ray.

`planning/` builds the same ranks on tensors without numbers. It passes in
- a `Platform` whose `move` makes such tensors, and whose `layer_modules` replace Transformer Engine's;
- `maker`, a maker of microbatches that leaves the dry run's tensor modes;
and sets `PolicyRank.head_kernel`, which turns hidden states into log-probabilities.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields, require_field
from megatron_grpo.losses.divergence import error_without_worst
from megatron_grpo.losses.loss import GlobalCounts, LossFunction
from megatron_grpo.models.hf_weights import load_hf_weights
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.platform.device import Platform, detect_platform
from megatron_grpo.trainer.checkpoint import RankCheckpoint
from megatron_grpo.trainer.messages import RankSettings, RankTrainResult
from megatron_grpo.trainer.microbatch import MaskField, Microbatch, MicrobatchMaker, copy_to_host, sum_over_context
from megatron_grpo.trainer.model.build import DecoderModel, build_model, build_reference
from megatron_grpo.trainer.model.experts import StepRouting
from megatron_grpo.trainer.model.layer_spec import warn_of_unfused_attention
from megatron_grpo.trainer.model.lora import adapters_off
from megatron_grpo.trainer.offload import DeviceMemory, move_to_host, on_device
from megatron_grpo.trainer.optimizer import FrozenOptimizer, ModelOptimizer
from megatron_grpo.trainer.parallel import StageCommunicator, collect_schedule_groups
from megatron_grpo.trainer.step_record import StepRecorder
from megatron_grpo.trainer.teacher import TeacherHeads, compute_teacher_output
from megatron_grpo.trainer.vision_tower import make_tower
from megatron_grpo_kernels.filtered_logprob import filtered_logprobs
from megatron_grpo_kernels.head import HeadKernel
from megatron_grpo_kernels.logprob import linear_logprobs

Microbatches = list[list[int]]
"""Indices into a rank's TokenBatch, one list per microbatch."""


class ModelRank(ABC):
    """A rank's shard of a model and of its optimizer.

    The model has one output per token, and more than one chunk with a virtual pipeline. Process groups are already set
    up for the layout of `settings`.
    """

    outputs: ClassVar[Mapping[str, Callable[..., Tensor | None]]]
    """Methods that compute outputs for every token, by the field that a batch has them in."""

    def __init__(
        self, settings: RankSettings, platform: Platform | None = None, maker: MicrobatchMaker | None = None
    ) -> None:
        self.settings, self.config, self.shape = settings, settings.config, settings.shape
        self.platform = platform or detect_platform()
        config, shape = settings.config, settings.shape
        self.chunks = build_model(config, shape, self.platform)
        if settings.folder:
            load_hf_weights(self.chunks, shape, settings.folder)
        self.reference: list[DecoderModel] | None = None
        self.reference_moved = False  # from the model that the run started from; only then checkpoints hold it
        if settings.reference is not None and not config.lora.rank:  # with adapters it is the policy without them
            self.reference = build_reference(self.chunks, config, settings.reference, shape, self.platform)
            if settings.reference.offload:
                move_to_host(self.reference, self.platform)
        self.teacher_heads: TeacherHeads | None = None  # of a policy with teachers, on its last stage
        if settings.distillation is not None and self.chunks[-1].post_process:
            self.teacher_heads = TeacherHeads(settings, self.chunks[-1])
        tower = make_tower(settings, self.platform, self.chunks)
        self.maker = maker or MicrobatchMaker(config, shape, self.platform, tower)
        self.routing: StepRouting | None = None
        if shape.experts is not None:
            replays = config.moe.replay_routing and not shape.head.is_scalar
            form = RoutedForm.from_shape(shape) if replays else None
            prefix = "value_moe" if shape.head.role == "value" else "moe"
            self.routing = StepRouting(self.chunks, config.moe, prefix, form)
        self.optimizer = self._build_optimizer()
        if tower is not None and self.chunks[0].vision_tower is not None:
            self.optimizer.add_late_gradients(self.chunks[0].vision_tower, tower.backward)
        self.memory, self.checkpoint, self.recorder = DeviceMemory(self), RankCheckpoint(self), StepRecorder(self)

    def _build_optimizer(self) -> ModelOptimizer:
        return ModelOptimizer(self.chunks, self.config, self.settings.decay_steps, self.settings.decay)

    def gather_chunks(self) -> list[DecoderModel]:
        """Return the chunks with up-to-date weights; collective over data-parallel ranks."""
        # All code that reads weights outside of training calls this: after a step, parameters that other ranks have
        # updated may not have been gathered yet (policy.overlap_param_gather).
        self.memory.require_weights()
        self.optimizer.finish_gathering()
        return self.chunks

    @property
    def is_output_rank(self) -> bool:
        """True for the rank that returns its replica's outputs."""
        return self._has_loss and parallel_state.get_context_parallel_rank() == 0

    @property
    def _has_loss(self) -> bool:
        # Tensor-parallel ranks compute the same loss; context-parallel ranks have the losses of different tokens.
        return bool(parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0)

    @abstractmethod
    def _apply_head(self, model: DecoderModel, hidden: Tensor, tokens: TokenFields) -> tuple[Tensor, TokenFields]:
        """Compute outputs, [rows], from hidden states, [rows, hidden]; may add fields."""

    def list_needed_fields(self, loss_fn: LossFunction | None) -> tuple[str, ...]:
        """List the batch fields that this rank's pipeline stage reads."""
        routed = ("routed_experts",) if self.routing is not None and self.routing.replays else ()
        if not parallel_state.is_pipeline_last_stage():  # positions of images depend on the tokens
            return ("token_ids", *routed) if parallel_state.is_pipeline_first_stage() or self.shape.vision else routed
        of_loss = ("sampled",) if loss_fn is None else loss_fn.field_names
        return ("token_ids", *of_loss, *routed)

    def train(
        self,
        batch: TokenBatch,
        microbatches: Microbatches,
        loss_fn: LossFunction,
        counts: GlobalCounts,
        limit: float | None = None,
    ) -> RankTrainResult:
        """Make one optimizer step, unless its gradient or probability error forbids it.

        There is no step if the gradient norm is not finite (`grad_norm` says so), or the probability error is above
        `limit` (`is_refused` says so).
        """
        metrics = self.compute_gradients(batch, microbatches, loss_fn, counts)
        if limit is not None and self.is_beyond_limit(metrics, limit, counts.tokens):
            return RankTrainResult(0.0, 0.0, copy_to_host(metrics) if self._has_loss else None, is_refused=True)
        grad_norm = self.optimizer.compute_grad_norm()
        self.recorder.add_gradient()
        learning_rate = self.optimizer.step(grad_norm) if math.isfinite(grad_norm) else 0.0
        by_microbatch = copy_to_host(metrics) if self._has_loss else None
        if self.routing is not None and math.isfinite(grad_norm):
            expert_metrics = self.routing.end()
            if by_microbatch and self.is_output_rank and parallel_state.get_data_parallel_rank() == 0:
                by_microbatch[0] |= expert_metrics  # on one rank: metrics are summed over microbatches and replicas
        memory_gib = 0.0
        if torch.cuda.is_available():
            memory_gib = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        return RankTrainResult(grad_norm, learning_rate, by_microbatch, gpu_memory_gib=memory_gib)

    def is_beyond_limit(self, metrics: Sequence[Mapping[str, Tensor]], limit: float, tokens: float) -> bool:
        """True if the step's error, its worst token apart, is above the limit.

        Collective over all ranks, whose losses have `tokens`. NaN is not above the limit: the gradient is NaN too, and
        its error names the responses.
        """
        # One row per rank, so that one collective yields the sum of the errors and the largest: on a CPU a collective
        # mostly waits for the other ranks. Ranks without the loss have zeros, which change neither.
        rows = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64, device=self.platform.device)
        row = rows[dist.get_rank()]
        for microbatch in metrics if self._has_loss else ():
            row[0] += microbatch["token_mult_prob_error"]
            row[1] = torch.maximum(row[1], microbatch["token_mult_prob_error_max"].double())
        dist.all_reduce(rows)
        error, worst = rows[:, 0].sum(), rows[:, 1].amax()
        return error_without_worst(error.item(), worst.item(), tokens) > limit

    def compute_gradients(
        self, batch: TokenBatch, microbatches: Microbatches, loss_fn: LossFunction, counts: GlobalCounts
    ) -> list[dict[str, Tensor]]:
        """Run forward and backward; gradient buffers then hold the sum over ranks.

        Returns the loss function's metrics by microbatch, each of shape []; empty but on the last pipeline stage.
        """
        self.memory.require_weights()
        for chunk in self.chunks:
            chunk.train()
        self.optimizer.zero_grad()
        if self.routing is not None:
            self.routing.begin(counts.all_sequences)

        def compute_loss(output: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            self.optimizer.finish_gathering()  # no forward hook gathers the head's weight, which is read directly
            values, tokens = self._apply_head(self.chunks[-1], output, microbatch.tokens)
            loss, metrics = loss_fn(values, tokens, counts, microbatch.segments)
            # Cloned because the schedule divides the loss in place, and metrics may share its storage.
            metrics = {name: value.detach().clone() for name, value in metrics.items()}
            # The schedule would divide by the sum of this token count; the loss is already divided by global counts.
            return loss, loss.new_zeros((), dtype=torch.int), metrics

        return self._run_schedule(self.optimizer.chunks, batch, microbatches, compute_loss, forward_only=False)

    @torch.no_grad()
    def _forward_tokens(
        self, chunks: list[DecoderModel], batch: TokenBatch, microbatches: Microbatches, field: str | None = None
    ) -> Tensor | None:
        # One output per token, [sum(lengths), ...], on the host, of the output rank only. It is 0 for tokens that were
        # not sampled; without the field `sampled` every token has its output. With `field` it is this field that the
        # head adds, in place of the output.
        for chunk in chunks:
            chunk.eval()
        # The last row takes the outputs of no token (index -1).
        rows = sum(batch.lengths) + 1
        result: Tensor | None = None

        def keep(output: Tensor, microbatch: Microbatch) -> tuple[Tensor, Tensor, None]:
            nonlocal result
            # Megatron-Core's schedule wants a loss and a token count; both are 0 here.
            values, fields = self._apply_head(chunks[-1], output, microbatch.tokens)
            values = values if field is None else getattr(fields, field)
            if self._has_loss:
                if result is None:
                    # Wide outputs of all tokens may not fit the device, nor the host several times.
                    on_host = values.dim() > 1 and self.config.parallel.context == 1
                    result = values.new_zeros(rows, *values.shape[1:], device="cpu" if on_host else None)
                indices = torch.from_numpy(microbatch.token_indices)
                result[indices.to(result.device)] = values.to(result.device)
            return values.new_zeros(()), values.new_zeros((), dtype=torch.int), None

        self._run_schedule(chunks, batch, microbatches, keep, forward_only=True)
        if result is not None and self.config.parallel.context > 1:  # each rank has its own tokens' values, and 0 else
            result = sum_over_context(result)
        return result[:-1].cpu() if result is not None and self.is_output_rank else None

    def _run_schedule(
        self,
        chunks: Sequence[torch.nn.Module],
        batch: TokenBatch,
        microbatches: Microbatches,
        finish: Callable[[Tensor, Microbatch], tuple[Tensor, Tensor, Any]],
        *,
        forward_only: bool,
    ) -> list[Any]:
        # Returns the third value of `finish` per microbatch. It is called on the last stage only, with the rows of its
        # hidden states; other stages return an empty list.
        # The stages run 1F1B: forward passes fill the pipeline, then each stage alternates one forward with one
        # backward, so at most `pipeline` microbatches of activations live at once (more with a virtual pipeline).
        # Shapes of what a stage receives come from its communicator; seq_length and micro_batch_size are ignored.
        padded = [*microbatches, *[[]] * self._count_empty_microbatches(len(microbatches))]

        def forward_step(data: Iterator[Microbatch], module: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            microbatch = next(data)
            # The rotary embedding takes its positions from the packed sequences.
            output = module(
                microbatch.token_ids, None, None, packed_seq_params=microbatch.sequences, rows=microbatch.rows
            )
            return output, lambda output: finish(output[0], microbatch)

        # Lazily, one at a time: the index tensors of a whole step may not fit the device.
        mask_field: MaskField = "sampled" if forward_only else "loss_mask"
        iterator = (self.maker.make(batch, indices, mask_field) for indices in padded)
        groups: dict[str, Any] = {}
        if self.config.parallel.pipeline > 1:
            counts = [self.maker.count_stage_tokens([batch.lengths[index] for index in part]) for part in padded]
            shapes = [[count, 1, self.shape.hidden] for count in counts]
            communicator = StageCommunicator(get_model_config(chunks[0]), shapes, forward_only=forward_only)
            groups = {"p2p_communicator": communicator, "pg_collection": collect_schedule_groups()}
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(itertools.tee(iterator, len(chunks))),  # every chunk iterates over all microbatches
            model=list(chunks),
            num_microbatches=len(padded),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            **groups,
        )
        if groups:
            communicator.end()
        warn_of_unfused_attention()
        return results[: len(microbatches)]

    def _count_empty_microbatches(self, count: int) -> int:
        parallel, padded_count = self.config.parallel, count
        if parallel.expert > 1 or parallel.expert_tensor > 1:
            # Ranks that share experts run each layer together, so all need as many microbatches as the busiest rank.
            largest = torch.tensor(count, device=self.platform.device)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
            padded_count = int(largest)
        if parallel.virtual_pipeline > 1:  # an interleaved pipeline needs a multiple of its number of stages
            padded_count += -padded_count % parallel.pipeline
        return padded_count - count


class PolicyRank(ModelRank):
    """A rank's shard of policy, optimizer and frozen reference."""

    weight_sender: object | None = None  # the rank's end of refits (`weight_sync`), once they are connected
    head_kernel: HeadKernel | None = None  # for log-probabilities; None: that of the configuration

    def compute_logprobs(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Compute log-probabilities under the current weights; -inf for tokens that a filter removes."""
        with self.recorder.sketching(batch, microbatches):
            return self._forward_tokens(self.gather_chunks(), batch, microbatches)

    def compute_unfiltered_logprobs(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Compute log-probabilities over the whole vocabulary, without the sampling filter."""
        with self.use_settings(token_filter=None):
            return self.compute_logprobs(batch, microbatches)

    @contextmanager
    def use_settings(self, **changes: Any) -> Iterator[None]:
        """Change settings in the body."""
        settings, self.settings = self.settings, replace(self.settings, **changes)
        try:
            yield
        finally:
            self.settings = settings

    def compute_reference_logprobs(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Compute log-probabilities under the frozen reference policy."""
        reference = self.settings.reference
        assert reference is not None, "the reference policy was not loaded"
        with self.use_settings(token_filter=None):  # the filter could remove a token that the policy keeps
            if self.reference is None:  # with adapters the reference is the policy without them
                with adapters_off(self.chunks):
                    return self._forward_tokens(self.gather_chunks(), batch, microbatches)
            loaded = on_device(self.reference, self.platform.device) if reference.offload else nullcontext()
            with loaded, self._use_tower(self.reference):
                return self._forward_tokens(self.reference, batch, microbatches)

    @contextmanager
    def _use_tower(self, chunks: list[DecoderModel]) -> Iterator[None]:
        """Compute images with the tower of other chunks, if they have their own."""
        tower = self.maker.tower
        if chunks[0].vision_tower is not None:
            self.maker.tower = make_tower(self.settings, self.platform, chunks)
        try:
            yield
        finally:
            self.maker.tower = tower

    def compute_entropy(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Compute the entropy of the distribution that drew each token."""
        return self._forward_tokens(self.gather_chunks(), batch, microbatches, field="entropy")

    def compute_score_sizes(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Compute the squared size of each token's gradient by the logits.

        With p the distribution and t the token it is 1 - 2 p_t + sum_v p_v^2. Doubled logits give the normalised p^2,
        in which the token has the probability p_t^2 / sum_v p_v^2.
        """
        logprobs = self.compute_logprobs(batch, microbatches)
        with self.use_settings(temperature=0.5 / self.settings.logit_scale):
            of_squares = self.compute_logprobs(batch, microbatches)
        if logprobs is None or of_squares is None:
            return None
        return 1 - 2 * logprobs.exp() + (2 * logprobs - of_squares).exp()  # 0 where nothing was sampled

    def compute_teacher_outputs(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Compute what the policy gives as its own teacher (`TokenFields.teacher_outputs`)."""
        assert self.settings.distillation is not None, "others teach the policy"
        with self.use_settings(teacher=self.settings.distillation.self_output):
            return self._forward_tokens(self.gather_chunks(), batch, microbatches)

    outputs: ClassVar = {
        "prev_logprobs": compute_logprobs,
        "score_sizes": compute_score_sizes,
        "prev_entropy": compute_entropy,
        "teacher_outputs": compute_teacher_outputs,
        "unfiltered_logprobs": compute_unfiltered_logprobs,
        "reference_logprobs": compute_reference_logprobs,
    }

    @torch.no_grad()
    def sync_reference(self, alpha: float) -> None:
        """Move the reference by `alpha` to the policy (TR-DPO, Gorbatovski et al. 2024)."""
        assert self.reference is not None, "the reference policy was not loaded"
        # In float32, rounded once at the end: in bfloat16 the difference and its product would be rounded as well.
        for reference, chunk in zip(self.reference, self.gather_chunks(), strict=True):
            for target, weight in zip(reference.parameters(), chunk.parameters(), strict=True):
                target.copy_(torch.lerp(target.float(), weight.to(target.device).float(), alpha))
        self.reference_moved = True

    def _apply_head(self, model: DecoderModel, hidden: Tensor, tokens: TokenFields) -> tuple[Tensor, TokenFields]:
        if self.settings.teacher is not None:
            return compute_teacher_output(self.settings, model, hidden), tokens
        process_group = parallel_state.get_tensor_model_parallel_group()
        columns = len(model.head_weight)
        start = process_group.rank() * columns
        operands = copy_to_tensor_model_parallel_region(hidden), model.head_weight, require_field(tokens.token_ids)
        arguments: dict[str, Any] = {
            "start": start,
            "columns": max(0, min(columns, self.shape.vocab - start)),
            "group": process_group if process_group.size() > 1 else None,
            "scale": self.settings.logit_scale,
            "cap": self.shape.logit_cap,
            "chunk_tokens": self.config.logprob_chunk_size,
        }
        if self.teacher_heads is not None and tokens.teacher_outputs is not None:
            divergence = self.teacher_heads.compare(model, operands[0], tokens, self.shape.logit_cap)
            tokens = replace(tokens, divergence=divergence)
        if self.settings.token_filter is None:
            kernel, excluded = self.head_kernel or self.config.logprob_kernel, self.settings.never_sampled
            logprobs, entropy = linear_logprobs(*operands, **arguments, kernel=kernel, excluded=excluded)
            return logprobs, replace(tokens, entropy=entropy)
        filtered = filtered_logprobs(*operands, self.settings.token_filter, **arguments)
        return filtered.logprobs, replace(tokens, entropy=filtered.entropy, unfiltered_logprobs=filtered.unfiltered)


class ValueRank(ModelRank):
    """A rank's shard of a value or reward model and of its optimizer."""

    def compute_values(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Compute the value before every token, or a reward model's score up to it."""
        return self._forward_tokens(self.gather_chunks(), batch, microbatches)

    outputs: ClassVar = {"values": compute_values}

    def _apply_head(self, model: DecoderModel, hidden: Tensor, tokens: TokenFields) -> tuple[Tensor, TokenFields]:
        return model.output_layer(hidden), tokens


class TeacherRank(ModelRank):
    """A rank's shard of a teacher of distillation, which is never trained."""

    def _build_optimizer(self) -> ModelOptimizer:
        return FrozenOptimizer(self.chunks)

    def compute_outputs(self, batch: TokenBatch, microbatches: Microbatches) -> Tensor | None:
        """Compute what the policy is compared with at every sampled token."""
        # A replica without a sequence of this teacher's tasks takes part with a dummy.
        return self._forward_tokens(self.gather_chunks(), batch, microbatches or [[]])

    outputs: ClassVar = {"teacher_outputs": compute_outputs}

    def _apply_head(self, model: DecoderModel, hidden: Tensor, tokens: TokenFields) -> tuple[Tensor, TokenFields]:
        return compute_teacher_output(self.settings, model, hidden), tokens
