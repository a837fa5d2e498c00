"""The optimizer over Megatron's gradient buffers: schedule, clipping, step, and its state in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_grpo.config.schema import OptimizerConfig as OptimizerSettings
from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.losses.decay import compute_height
from megatron_grpo.losses.named_formula import NamedFormula
from megatron_grpo.trainer.model.megatron_config import build_megatron_config
from megatron_grpo.trainer.muon import (
    MatrixOptimizer,
    lay_out_matrices,
    list_muon_settings,
    mark_matrices,
    replace_layer_wise_optimizer,
)


class Schedule(OptimizerParamScheduler):
    """Megatron-Core's learning-rate schedule with transformers' polynomial and restarts, or the user's decay."""

    def __init__(
        self, optimizer: Any, settings: OptimizerSettings, steps: int, decay: NamedFormula | None = None
    ) -> None:
        """`steps` include warm-up; `decay` is the user's, if there is one."""
        warmup = settings.count_warmup_steps(steps)
        steps = max(steps, warmup + 1)
        self._settings, self._decay, style = settings, decay, settings.decay_style
        super().__init__(
            optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            lr_warmup_steps=warmup,
            lr_decay_steps=steps,
            # A dry run has no decay of the user's.
            lr_decay_style=_DECAY_STYLES.get(style, style) if settings.has_built_in_decay else "linear",
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
            wsd_decay_steps=min(settings.final_decay_steps or -(-steps // 10), steps - warmup),
            lr_wsd_decay_style="linear",
        )

    def get_lr(self, param_group: dict[str, Any]) -> float:
        style, warmup = self.lr_decay_style, self.lr_warmup_steps
        warms_up = 0 < warmup >= self.num_steps
        is_over, has_own_shape = self.num_steps > self.lr_decay_steps, style in ("polynomial", "cosine_with_restarts")
        if warms_up or (self._decay is None and (is_over or not has_own_shape)):
            return float(super().get_lr(param_group))
        progress = (self.num_steps - warmup) / (self.lr_decay_steps - warmup)
        if self._decay is not None:
            height = compute_height(self._decay, self.num_steps, self.lr_decay_steps, warmup)
        elif style == "polynomial":
            height = (1.0 - progress) ** self._settings.decay_power
        else:
            cycle = progress * self._settings.decay_cycles % 1.0 if progress < 1 else 1.0
            height = 0.5 * (1.0 + math.cos(math.pi * cycle))
        low, high = (float(param_group.get(name, getattr(self, name))) for name in ("min_lr", "max_lr"))
        return low + height * (high - low)


# Megatron-Core's names of schedules, by transformers' names where the two differ.
_DECAY_STYLES = {
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
    "inverse_sqrt": "inverse-square-root",
    "warmup_stable_decay": "WSD",
}


class ModelOptimizer:
    """Wraps a model's chunks for data-parallel training, and steps them.

    Gradients are summed over microbatches and ranks, never averaged: losses are normalised by counts of the whole step.
    """

    def __init__(
        self, chunks: Sequence[GPTModel], config: PolicyConfig, decay_steps: int, decay: NamedFormula | None = None
    ) -> None:
        settings, shared = config.optimizer, chunks[0].config  # all chunks have one configuration
        overlap_grad_reduce, self._gathers_late = _choose_overlaps(config, is_like_cuda=shared.platform.is_like_cuda)
        ours = {
            "grad_reduce_in_fp32": True,
            "use_distributed_optimizer": settings.distributed,
            "fp8_param_gather": config.fp8.parameters and config.fp8.is_on_device,
            "overlap_grad_reduce": overlap_grad_reduce,
            "overlap_param_gather": self._gathers_late,
        }
        buffers = build_megatron_config(DistributedDataParallelConfig, ours, config.ddp)
        self.chunks = list(_wrap_chunks(chunks, buffers, config))

        self._complete_late: Callable[[], None] = lambda: None

        def sum_model_grads(model: Sequence[torch.nn.Module], _num_tokens: Any = None, **keywords: Any) -> None:
            self._complete_late()
            finalize_model_grads(list(model), None, **keywords)  # without Megatron's division by the number of tokens

        shared.finalize_model_grads_func = sum_model_grads  # its schedule calls it after the last microbatch
        if overlap_grad_reduce:  # only the last microbatch's backward pass completes a gradient
            no_sync = [chunk.no_sync for chunk in self.chunks]
            shared.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        optimizer_config = _build_optimizer_config(config, gathers_late=self._gathers_late)
        self._has_decoupled_grad = optimizer_config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        replace_layer_wise_optimizer()
        self.optimizer = get_megatron_optimizer(
            optimizer_config,
            self.chunks,
            config_overrides=get_standard_config_overrides(optimizer_config),
            use_gloo_process_groups=False,
        )
        replace_state_methods(self.optimizer)
        self.settings = settings
        self.max_grad_norm = config.max_grad_norm
        self.scheduler = Schedule(self.optimizer, settings, decay_steps, decay)

    def add_late_gradients(self, module: torch.nn.Module, backward: Callable[[], None]) -> None:
        """Let `backward` compute gradients of the first chunk's module at last."""

        def complete() -> None:
            with self.chunks[0].no_sync():
                backward()
            for parameter in module.parameters() if self.chunks[0].ddp_config.overlap_grad_reduce else ():
                self.chunks[0].param_to_bucket_group[parameter].register_grad_ready(parameter)

        self._complete_late = complete

    def zero_grad(self) -> None:
        """Zero the gradients of the previous step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def finish_gathering(self) -> None:
        """Complete the all-gathers of weights that the last step deferred; collective, idempotent."""
        for chunk in self.chunks if self._gathers_late else ():
            for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)

    @torch.no_grad()
    def compute_grad_norm(self) -> float:
        """Compute the global L2 norm of the gradient, once, after backward and before `step`."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    @torch.no_grad()
    def step(self, grad_norm: float) -> float:
        """Clip to the configured norm, update the weights, and return the learning rate."""
        # Clipped by the norm over all ranks and chained optimizers, so that all gradients are scaled by one factor.
        if self.max_grad_norm > 0:
            for optimizer in self.optimizer.chained_optimizers:
                parameters = optimizer.get_parameters()
                if parameters:
                    clip_grad_by_total_norm_fp32(
                        parameters,
                        max_norm=self.max_grad_norm,
                        total_norm=grad_norm,
                        use_decoupled_grad=self._has_decoupled_grad,
                    )
        self.scheduler.step(1)  # the schedule counts this step first, so warm-up does not start at zero
        self.optimizer.step_with_ready_grads()
        return float(self.optimizer.param_groups[0]["lr"])

    def iter_updated_weights(self) -> Iterator[tuple[Any, int, Tensor]]:
        """Iterate over the weights that this rank updates.

        Yields (parameter, first element of the part in the flat parameter, the part, [elements]): with a distributed
        optimizer parts of some parameters, else all of them.
        """
        if self.settings.distributed:
            for optimizer in self.optimizer.chained_optimizers:
                if isinstance(optimizer, MatrixOptimizer):
                    for parameter, weight, _ in optimizer.iter_matrices():
                        yield parameter, 0, weight.detach().view(-1)
                    continue
                for parameter, start, _ in iter_updated_ranges(optimizer):
                    yield parameter, start, optimizer._get_main_param_and_optimizer_states(parameter)["param"].detach()
        else:
            parameters = (parameter for chunk in self.chunks for parameter in chunk.parameters())
            for parameter in filter(attrgetter("requires_grad"), parameters):
                main = getattr(parameter, "main_param", None)
                yield parameter, 0, (parameter if main is None else main).detach().view(-1)

    @torch.no_grad()
    def complete_gradients(self) -> None:
        """Gather whole gradients into the buffers, between `compute_grad_norm` and `step`; collective."""
        # With a distributed optimizer each rank has the summed gradient of one part of each bucket.
        for chunk in self.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                process_group = buffer.data_parallel_group
                if not self.settings.distributed or process_group.size() == 1:
                    continue
                for bucket in buffer.buckets:
                    parts = bucket.grad_data.chunk(process_group.size())
                    dist.all_gather(list(parts), parts[process_group.rank()].clone(), group=process_group)

    def load_state_dict(self, state: dict[str, Any], schedule_steps: int) -> None:
        """Load a checkpoint's moments and schedule, but not its settings."""
        # Saved parameter groups contain the settings of the run that saved them. This run's take their place before the
        # load, because Megatron-Core finds a group by its learning rates, and fails where these have changed.
        current = {_identify(param_group): param_group for param_group in self.optimizer.param_groups}
        for param_group in _iter_parameter_groups(state):
            settings = current.get(_identify(param_group), {})
            param_group.update({name: value for name, value in settings.items() if name not in ("params", "step")})
            if "step" in param_group:  # empty expert optimizers save step 0; restore the real step
                param_group["step"] = schedule_steps
        self.optimizer.load_state_dict(state)
        self.scheduler.num_steps = schedule_steps
        self.scheduler.step(0)


class FrozenOptimizer(ModelOptimizer):
    """Optimizer of a frozen model: no gradients, no state."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        for chunk in chunks:
            chunk.requires_grad_(False)
        self.chunks, self._gathers_late, self.optimizer = [], False, ChainedOptimizer([])


def _identify(param_group: dict[str, Any]) -> tuple[Any, ...]:
    # What the group is for, whatever its settings are: experts, no weight decay, a learning rate of its own, and the
    # optimizer that has it beside Muon.
    names = ("is_expert_parallel", "wd_mult", "default_config", "optimizer")
    return tuple(param_group.get(name) for name in names)


def _iter_parameter_groups(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    yield from state.get("param_groups", ())
    for part in state.values():
        if isinstance(part, dict) and "param_groups" not in state:
            yield from _iter_parameter_groups(part)


def _choose_overlaps(config: PolicyConfig, *, is_like_cuda: bool) -> tuple[bool, bool]:
    # Whether to overlap (gradient reduction, weight gathering): by default on GPUs only, never with a single replica.
    if parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1:
        return False, False
    reduce = is_like_cuda if config.overlap_grad_reduce is None else config.overlap_grad_reduce
    possible = reduce and config.optimizer.distributed
    return reduce, possible if config.overlap_param_gather is None else config.overlap_param_gather


def _wrap_chunks(
    chunks: Sequence[GPTModel], buffers: DistributedDataParallelConfig, config: PolicyConfig
) -> Iterator[DistributedDataParallel]:
    for number, chunk in enumerate(chunks):
        layout = None
        if config.optimizer.name == "muon":
            mark_matrices(chunk)
            if config.optimizer.distributed:
                layout = lay_out_matrices(chunk, buffers, is_first=number == 0)
        yield DistributedDataParallel(
            config=chunk.config,
            ddp_config=replace(buffers),
            module=chunk,
            # The first chunk's backward pass comes last, and hides the communication of the other chunks.
            disable_bucketing=number > 0,
            full_param_layout=layout,
        )


def _build_optimizer_config(config: PolicyConfig, *, gathers_late: bool) -> OptimizerConfig:
    settings = config.optimizer
    is_bfloat16 = config.precision == "bfloat16"
    shared_names = ("lr", "min_lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
    ours = {
        "optimizer": "adam",
        **{name: getattr(settings, name) for name in shared_names},
        "bf16": is_bfloat16,
        "params_dtype": torch.bfloat16 if is_bfloat16 else torch.float32,
        "use_distributed_optimizer": settings.distributed,
        "overlap_param_gather": gathers_late,
        # Megatron-Core offloads with its precision-aware optimizer only.
        "use_precision_aware_optimizer": settings.precision_aware or settings.cpu_offload > 0,
        "optimizer_cpu_offload": settings.cpu_offload > 0,
        "optimizer_offload_fraction": settings.cpu_offload,
        "overlap_cpu_optimizer_d2h_h2d": settings.cpu_offload > 0,  # copies of other parameters during an update
        "fp8_recipe": config.fp8.recipe if config.fp8.is_on_device else None,
        "clip_grad": 0.0,  # clipped by ModelOptimizer, after the norm has been checked
    }
    if settings.name == "muon":
        ours |= list_muon_settings(config)
    return build_megatron_config(OptimizerConfig, ours, config.megatron_optimizer)


def replace_state_methods(optimizer: Any) -> None:
    """Make Megatron-Core's distributed optimizers save and load "fully_reshardable" state by boxes.

    A distributed optimizer cuts the flat buffer of all parameters into equal ranges, one per data-parallel rank, so a
    rank owns the main weights and moments of a range of elements that begins and ends anywhere within a parameter. A
    checkpoint that any layout can load must name elements by parameter and coordinate. Megatron-Core's own way gathers
    each parameter's whole state on data-parallel rank 0, which writes all of it: the memory and time of one rank grow
    with the model. Here every rank writes its own range. A range of a tensor's elements in memory order is not one box
    of the tensor, but a few: the end of its first row, the whole rows between, the beginning of its last row, and so on
    within a row (`split_into_boxes`). Boxes become sharded tensors under the parameter's name, which loading reads and
    concatenates in the same order in every layout. Other optimizers are not changed.
    """
    for chained in optimizer.chained_optimizers:
        if isinstance(chained, DistributedOptimizer):
            _correct_positions(chained)
            chained.sharded_param_state_fully_reshardable = MethodType(_build_state_boxes, chained)
            chained.load_parameter_state_from_fully_reshardable = MethodType(_load_state_boxes, chained)


def _correct_positions(optimizer: Any) -> None:
    """Correct which state belongs to which parameter.

    That is wrong in a model with parameters of two types: Megatron-Core's optimizer has the float32 parameters of a
    group first, and its map from parameters to positions counts them behind the others.
    """
    for index, group in enumerate(optimizer.opt_group_ranges):
        ordered = sorted(group["params"], key=lambda parameter: parameter.dtype != torch.float32)
        optimizer.model_param_group_index_map |= {
            parameter: (index, position) for position, parameter in enumerate(ordered)
        }


def split_into_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split a range of a tensor's elements into consecutive boxes (offset, size)."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    while start < stop:
        # The outermost dimension with a slice that begins here and fits; as many such slices as fit in the dimension.
        axis = next(a for a, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop)
        offset = tuple(start // stride % size for stride, size in zip(strides, shape, strict=True))
        slices = min((stop - start) // strides[axis], shape[axis] - offset[axis])
        yield offset, (*(1,) * axis, slices, *shape[axis + 1 :])
        start += slices * strides[axis]


def iter_updated_ranges(optimizer: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Iterate over (parameter, start, stop) of the elements that this rank updates."""
    for buffer in optimizer.gbuf_ranges:
        for buckets in buffer.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def _build_state_boxes(
    self: Any, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
) -> dict[int, dict[str, list[ShardedTensor]]]:
    # Boxes by parameter index and name of the state.
    sharded_weights, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
    weight_of = {weight.data: weight for weight in nested_values(sharded_weights)}
    return {
        index: {
            name: list(_build_boxes(weight_of[parameter], f"optimizer.state.{name}", state, start, stop))
            for name, state in self._get_main_param_and_optimizer_states(parameter).items()
            if name != "step"  # stored once, with the parameter groups
        }
        for index, (parameter, start, stop) in enumerate(iter_updated_ranges(self))
    }


@torch.no_grad()
def _load_state_boxes(self: Any, loaded: dict[int, dict[str, list[Tensor]]]) -> None:
    for index, (parameter, _, _) in enumerate(iter_updated_ranges(self)):
        state = {name: torch.cat([box.reshape(-1) for box in boxes]) for name, boxes in loaded[index].items()}
        self._set_main_param_and_optimizer_states(parameter, state)
    if isinstance(self.optimizer, HybridDeviceOptimizer):
        self.optimizer._sync_hdo_state_to_sub_optimizers()


def _build_boxes(
    weight: ShardedTensor | ShardedTensorFactory, prefix: str, state: Tensor, start: int, stop: int
) -> Iterator[ShardedTensor]:
    # Entries of one state of a parameter's range, which share the state's memory.
    parts: list[tuple[int, ShardedTensor]]
    if isinstance(weight, ShardedTensorFactory):  # stored as several tensors (gate and up projections)
        # Built from a tensor on the meta device: storage offsets of the views say which elements they hold.
        meta = torch.empty(weight.data.shape, dtype=state.dtype, device="meta")
        built = list(nested_values({"": weight.build_fn(weight.key, meta, weight.replica_id, None)}))
        assert all(part.data.is_contiguous() for part in built), f"{weight.key} is cut otherwise than along its rows"
        parts = [(part.data.storage_offset(), part) for part in built]
    else:
        parts = [(0, weight)]
    for first, part in parts:
        begin, end = max(start, first), min(stop, first + math.prod(part.local_shape))
        position = begin - start
        shape = (*(1,) * part.prepend_axis_num, *part.local_shape)
        for offset, size in split_into_boxes(shape, begin - first, end - first):
            numel = math.prod(size)
            yield ShardedTensor(
                key=f"{prefix}.{part.key}",
                data=state[position : position + numel].view(size),
                dtype=state.dtype,
                local_shape=size,
                global_shape=part.global_shape,
                global_offset=tuple(base + within for base, within in zip(part.global_offset, offset, strict=True)),
                axis_fragmentations=None,
                allow_shape_mismatch=part.allow_shape_mismatch,  # the padding of the vocabulary depends on the layout
                # Data-parallel ranks hold different boxes, so only replicas of the weights count as replicas here.
                replica_id=(*part.replica_id[:2], 0),
            )
            position += numel
