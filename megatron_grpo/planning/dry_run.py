"""A dry run: one rank of a job builds its model, computes and learns on tensors without numbers, and says what memory
that takes on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import Config, Fp8Config, PolicyConfig
from megatron_grpo.losses.loss import GlobalCounts, make_loss
from megatron_grpo.losses.value import MseValueLossFn
from megatron_grpo.models.megatron_names import iterate_layers
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import find_folder_shape
from megatron_grpo.models.weight_layouts import RankShard, split_policy
from megatron_grpo.planning.dry.kernels import ShapedLogprobs, replaced_names
from megatron_grpo.planning.dry.stand_in_layers import Quantizable, ShapedModules
from megatron_grpo.planning.dry.tracker import DryMode, Moments
from megatron_grpo.planning.dry.work import Work
from megatron_grpo.planning.engine_shards import assume_boxes
from megatron_grpo.platform.device import Platform
from megatron_grpo.platform.hardware import find_hardware
from megatron_grpo.preflight.refit_memory import needs_conversion
from megatron_grpo.trainer.checkpoint import build_sharded_state
from megatron_grpo.trainer.messages import PolicyDistillation, RankSettings, TeacherHead, TeacherOutput
from megatron_grpo.trainer.microbatch import MaskField, Microbatch, MicrobatchMaker
from megatron_grpo.trainer.model.megatron_config import require_fp8
from megatron_grpo.trainer.offload import iter_gradients, iter_optimizer_state, iter_weights
from megatron_grpo.trainer.parallel import destroy_parallel, initialize_parallel
from megatron_grpo.trainer.rank import Microbatches, ModelRank, PolicyRank, TeacherRank, ValueRank
from megatron_grpo.weight_sync.links import BUFFERS
from megatron_grpo.weight_sync.pieces import align, lay_out_pieces, split_messages
from megatron_grpo.weight_sync.shard_sender import ShardSender
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages


@dataclass(frozen=True)
class DryReport:
    """Memory and work of one rank's GPU."""

    peak_bytes: int
    """Most bytes of tensors at once; CUDA's context, NCCL's buffers and fragmentation come on top."""
    phases: dict[str, int]
    """Most bytes at once in each phase, in their order."""
    end_bytes: dict[str, int]
    """Bytes that are alive at the end of each phase."""
    holders: dict[str, int]
    """Bytes at the peak, by kind of tensor."""
    moments: Moments
    """The fullest moments (`tracker.Moments`)."""
    work: Counter[Work]
    """Work of the operators of all phases, counted."""
    passes: Counter[tuple[str, int]]
    """Forward passes of microbatches, by phase and model chunk."""


_ALL_PHASES = frozenset(("train", "logprobs", "reference", "offload", "onload", "refit", "checkpoint"))


def list_phases(config: Config) -> frozenset[str]:
    """List the phases of a run's step, and of its checkpoints."""
    sleeps = config.generation.is_colocated and config.needs_generation
    phases = {
        "train": True,
        "logprobs": config.policy_passes > 0 or config.teaches_itself or config.logger.replay_every is not None,
        "reference": config.uses_reference,
        "offload": sleeps,
        "onload": sleeps,
        "refit": config.needs_generation,
        "checkpoint": config.has_checkpoints,
    }
    return frozenset(name for name, happens in phases.items() if happens)


def run_dry(
    config: Config,
    shape: ModelShape,
    rank: int,
    *,
    is_teacher: bool = False,
    expert_skew: float = 1.0,
    moves: bool = True,
    phases: Container[str] | None = None,
) -> DryReport:
    """Run a step on a rank, with full microbatches of sampled tokens.

    A process that calls this cannot use its GPU for Megatron-Core afterwards.

    Args:
        config: the run's configuration, which has passed the run's checks.
        shape: sizes of the model.
        rank: number of the rank in the layout of `config.policy.parallel`.
        is_teacher: whether `config.policy` and `shape` are those of a teacher, which only computes its outputs.
        expert_skew: tokens of each of this rank's experts, relative to their mean over all experts.
        moves: whether to run offload, onload, refit and checkpoint too, which take half of the time.
        phases: names of the phases to run, as `list_phases` gives them; None: all.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    options: dict[str, Any] = {"expert_skew": expert_skew, "moves": moves and not is_teacher, "phases": phases}
    return run_tracked(config, shape, rank, fake, is_teacher=is_teacher, **options)


def run_tracked(
    config: Config,
    shape: ModelShape,
    rank: int,
    fake: FakeTensorMode | None,
    *,
    is_teacher: bool = False,
    expert_skew: float = 1.0,
    moves: bool = True,
    phases: Container[str] | None = None,
) -> DryReport:
    """Run dry on fake tensors; None: on real ones, without moves."""
    mode = DryMode(shape.experts.top_k if shape.experts is not None else 0)

    def move(array: NDArray[Any]) -> Tensor:
        tensor = torch.from_numpy(array)
        tensor = tensor if fake is None else fake.from_tensor(tensor)
        mode.follow(tensor)
        return tensor

    platform = Platform("dry", torch.device("cpu"), "fake", host="meta", move=move, layer_modules=ShapedModules())
    parallel = config.policy.parallel
    destroy_parallel()
    initialize_parallel(parallel, rank=rank, store=FakeStore(), seed=0, timeout_s=60, platform=platform)
    try:
        with replaced_names(expert_skew, mode), fake or nullcontext(), mode:
            with mode.phase("build"):
                policy = _build_rank(config, shape, platform, is_teacher=is_teacher)
                if config.reference.offload:
                    mode.discount(list_reference_weights(policy))
            mode.name_kind(iter_gradients(policy), "gradients")
            mode.name_kind(iter_optimizer_state(policy), "optimizer")
            mode.name_kind(iter_weights(policy), "weights")
            chosen_phases = _ALL_PHASES if phases is None else phases
            _run_learning_phases(policy, config, mode, chosen_phases)
            if fake is not None and moves:
                _run_moving_phases(policy, config, mode, chosen_phases)
    finally:
        destroy_parallel()
    log = mode.log
    return DryReport(mode.peak, mode.peaks, mode.end_bytes, mode.holders, mode.moments, log.counts, log.passes)


_Rank = PolicyRank | ValueRank | TeacherRank


def _adapt_policy(config: Config) -> PolicyConfig:
    # FP8 is off in Megatron-Core; the shape-only layers imitate it. The optimizer is on the device, and the share that
    # belongs on the host is subtracted later. Log-probabilities with a filter hold a chunk's logits, as the chunked
    # kernel does. No engine has recorded experts, so routers choose.
    policy = config.policy
    fp8 = replace(policy.fp8, format="off") if policy.fp8.is_on_device else policy.fp8
    moe, optimizer = replace(policy.moe, replay_routing=False), replace(policy.optimizer, cpu_offload=0.0)
    kernel = "chunked" if config.generation.has_training_filter else policy.logprob_kernel
    return replace(policy, fp8=fp8, moe=moe, logprob_kernel=kernel, optimizer=optimizer)


def _run_learning_phases(rank: _Rank, config: Config, mode: DryMode, phases: Container[str]) -> None:
    """Run the phases of a step between the engines' turns."""
    policy, reference = config.policy, config.uses_reference and not rank.shape.head.is_scalar
    most_tokens = policy.logprob_microbatch_tokens or policy.microbatch_tokens
    if isinstance(rank, TeacherRank):
        with mode.phase("teacher"):
            rank.compute_outputs(*make_full_microbatches(rank, most_tokens, reference=False))
        return
    # The optimizer makes its moments in the first step, which needs no gradients for that; the next one shows the peak.
    with mode.phase("first step"):
        rank.optimizer.step(rank.optimizer.compute_grad_norm())
    state = list(iter_optimizer_state(rank))
    mode.name_kind(state, "optimizer")
    if policy.optimizer.cpu_offload:
        mode.discount(state[: round(len(state) * policy.optimizer.cpu_offload)])
        mode.forget_peaks()
    work = make_full_microbatches(rank, most_tokens, reference=False)
    if isinstance(rank, ValueRank):
        with mode.phase("values"):
            rank.compute_values(*work)
    elif "logprobs" in phases:
        with mode.phase("logprobs"):
            rank.compute_logprobs(*work)
    if reference and isinstance(rank, PolicyRank):
        with mode.phase("reference"):
            mode.count_again(list_reference_weights(rank))
            rank.compute_reference_logprobs(*work)
            if config.reference.offload:
                mode.discount(list_reference_weights(rank))
    heads = () if rank.settings.distillation is None else rank.settings.distillation.heads
    width = max((head.shape.hidden for head in heads), default=2 * (config.distillation.topk_logits_k or 0) + 1)
    batch, microbatches = make_full_microbatches(
        rank, policy.microbatch_tokens, reference=reference, teacher_width=width if config.named_teachers else 0
    )
    if config.loss_fn.selection is not None and not rank.shape.head.is_scalar:
        batch.fields.selected = batch.fields.advantages
    counts = GlobalCounts(
        tokens=float(sum(batch.lengths)), sequences=float(len(batch)), all_sequences=float(len(batch))
    )
    with mode.phase("train"):
        is_value = rank.shape.head.role == "value"
        rank.train(batch, microbatches, MseValueLossFn(config.value_loss_fn) if is_value else make_loss(config), counts)


def _run_moving_phases(rank: _Rank, config: Config, mode: DryMode, phases: Container[str]) -> None:
    """Run the phases around the engines' turns, a refit and a checkpoint."""
    if "offload" in phases:
        with mode.phase("offload"):
            rank.memory.offload(weights=True)
        with mode.phase("onload"):
            rank.memory.onload()
    if "refit" in phases and isinstance(rank, PolicyRank):
        with mode.phase("refit"), torch.no_grad():
            number = dist.get_rank()
            with _disable_current_modes():
                shards = split_policy(config.policy.parallel, rank.shape)
                links: Any = DryLinks(config, rank.shape, shards, number)
            ShardSender(rank, shards[number], links).send(version=0)
    if "checkpoint" in phases:
        with mode.phase("checkpoint"):
            build_sharded_state(rank, is_loading=False)


class DryLinks:
    """A rank's messages of a refit, packed but not sent (`Links`)."""

    def __init__(self, config: Config, shape: ModelShape, shards: list[RankShard], rank: int) -> None:
        generation, bucket = config.generation.parallel, int(config.refit.bucket_mib * 2**20)
        dtypes = choose_wire_dtypes(shape, config.policy.precision, config.refit.fp8_blocks)
        engine = assume_boxes(shape, generation)
        by_layer = needs_conversion(config, shape, find_hardware(config))
        scheduled = plan_messages(shape, shards, engine, generation.data, dtypes, bucket, by_layer=by_layer)
        self.messages = split_messages(scheduled[scheduled["source"] == rank])
        self.is_relayed = [False] * len(self.messages)
        layouts = [lay_out_pieces(pieces, [getattr(torch, name) for name in dtypes]) for pieces in self.messages]
        self.packed_pieces = [pieces for pieces, _ in layouts]
        self.sizes = [size for _, size in layouts]

    def send(self, fill: Callable[[int, Tensor], None], version: int) -> None:
        """Pack the messages one after the other."""
        largest = align(max(self.sizes, default=0))
        buffers = torch.empty(BUFFERS, largest, dtype=torch.uint8)
        for number, size in enumerate(self.sizes):
            fill(number, buffers[number % BUFFERS, :size])


def _multiply_in_fp8(rank: ModelRank, fp8: Fp8Config) -> None:
    """Let layers multiply in FP8, except those that stay in bfloat16."""
    layers = [layer for chunk in (*rank.chunks, *(rank.reference or ())) for layer in iterate_layers(chunk)]
    for layer, halves, layer_module in layers:
        if fp8.first_layers_bf16 <= layer < rank.shape.layers - fp8.last_layers_bf16:
            for module in layer_module.modules():
                if isinstance(module, Quantizable):
                    module.fp8 = fp8
            # Attention keeps its output anyway, and the router its input, so Megatron-Core lets the projection after
            # attention and the shared experts save these tensors instead of FP8 copies, except with delayed scales.
            keeps = fp8.recipe != "delayed"
            if "mixer" in halves:
                layer_module.self_attention.linear_proj.save_original_input = keeps
            if "mlp" in halves and getattr(layer_module.mlp, "shared_experts", None) is not None:
                layer_module.mlp.shared_experts.linear_fc1.save_original_input = keeps


class _DryMaker(MicrobatchMaker):
    """Makes microbatches outside of the dry run's modes, because packing reads lengths."""

    def make(self, batch: TokenBatch, indices: list[int], mask_field: MaskField) -> Microbatch:
        with _disable_current_modes():  # the platform's `move` makes fake tensors of real numbers
            return super().make(batch, indices, mask_field)


def _build_rank(config: Config, shape: ModelShape, platform: Platform, *, is_teacher: bool) -> _Rank:
    """Build a rank of the policy, the value model or a teacher without numbers."""
    has_reference = config.uses_reference and not shape.head.is_scalar and not is_teacher
    settings = RankSettings(
        config=_adapt_policy(config),
        shape=shape,
        folder="",
        reference=replace(config.reference, offload=False) if has_reference else None,
        temperature=config.generation.temperature,
        decay_steps=config.decay_steps,
        teacher=TeacherOutput(vocab=shape.vocab, top_k=config.distillation.topk_logits_k) if is_teacher else None,
        distillation=_describe_distillation(config, shape) if config.named_teachers and not is_teacher else None,
    )
    maker = _DryMaker(settings.config, shape, platform)
    rank: _Rank
    if is_teacher:
        rank = TeacherRank(settings, platform, maker)
    elif shape.head.is_scalar:
        rank = ValueRank(settings, platform, maker)
    else:
        rank = PolicyRank(settings, platform, maker)
        if settings.config.logprob_kernel != "chunked":  # the head then has the fused kernel's tensors
            rank.head_kernel = ShapedLogprobs()
    if config.policy.fp8.is_on_device:
        require_fp8(config.policy.fp8, shape, platform)
        _multiply_in_fp8(rank, config.policy.fp8)
    return rank


def _describe_distillation(config: Config, shape: ModelShape) -> PolicyDistillation:
    shapes = [find_folder_shape(config, teacher.model.path) for teacher in config.teacher_models.values()]
    heads = [TeacherHead("", teacher) for teacher in shapes if teacher is not None]
    return PolicyDistillation(
        vocab=min([shape.vocab, *(head.shape.vocab for head in heads)]),
        kl_type=config.loss_fn.kl_type,
        mixed_kl_weight=config.loss_fn.mixed_kl_weight,
        heads=tuple(heads) if config.distillation.topk_logits_k is None else (),
    )


def make_full_microbatches(
    rank: ModelRank, most_tokens: int, *, reference: bool, teacher_width: int = 0
) -> tuple[TokenBatch, Microbatches]:
    """Make as many full microbatches as the pipeline holds at once.

    Each has `most_tokens` tokens in sequences of the longest length. `reference`: add log-probabilities of the
    reference policy. `teacher_width`: numbers of a teacher's output for a token; 0: there is no teacher.
    """
    config, parallel, is_value = rank.config, rank.config.parallel, rank.shape.head.is_scalar
    longest = min(config.max_total_sequence_length, most_tokens)
    lengths = [longest] * (most_tokens // longest)
    number = parallel.pipeline * (2 if parallel.virtual_pipeline > 1 else 1)
    with _disable_current_modes():
        zeros = torch.zeros(sum(lengths) * number)
        fields = TokenFields(
            token_ids=zeros.int(),
            sampled=zeros == 0,
            loss_mask=1 - zeros,
            generation_logprobs=zeros,
            prev_logprobs=zeros,
            reference_logprobs=zeros if reference else None,
            advantages=zeros,
            values=zeros if is_value else None,
            returns=zeros if is_value else None,
            teacher=zeros if teacher_width else None,
            teacher_outputs=zeros[:, None].repeat(1, teacher_width) if teacher_width else None,
        )
    sequences = iter(range(len(lengths) * number))
    return TokenBatch(lengths * number, fields), [[next(sequences) for _ in lengths] for _ in range(number)]


def list_reference_weights(rank: ModelRank) -> list[Tensor]:
    """List the reference's weights, which a dry run keeps on the device."""
    return [parameter for chunk in rank.reference or () for parameter in chunk.parameters()]
