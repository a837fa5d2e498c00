"""Stand-ins for Transformer Engine's layers: their parameters, and the tensors that they make and save."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any, override

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_grpo.config.schema import Fp8Config
from megatron_grpo.planning.dry.fused_kernel import Collective, Kernel, Product, TensorSpec, run
from megatron_grpo.planning.dry.kernels import run_attention, run_norm
from megatron_grpo.planning.dry.tracker import kind
from megatron_grpo.planning.dry.work import count_bytes, name_of, note
from megatron_grpo.trainer.model.latent_attention import ReplicatedLinear
from megatron_grpo.trainer.model.layers import RMSNorm


class ShapedNorm(RMSNorm):
    """Transformer Engine's RMSNorm."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [..., hidden] of any float type."""
        return run_norm(hidden.contiguous(), self.weight)


class ShapedAttention(torch.nn.Module):
    """Transformer Engine's DotProductAttention of packed sequences."""

    def __init__(self, config: TransformerConfig, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        self._context = pg_collection.cp if config.context_parallel_size > 1 else None
        self._tensor_group = pg_collection.tp
        if config.softmax_type == "learnable":  # in float32, whatever the other parameters are
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, device=config.platform.device))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Build the checkpoint's entries."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._tensor_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return state

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: PackedSeqParams, **__: Any
    ) -> Tensor:
        """From [tokens, heads, head_dim] each to [tokens, heads * value_dim]."""
        context_tokens = packed_seq_params.max_seqlen_kv
        return run_attention(
            query, key.contiguous(), value.contiguous(), context=self._context, context_tokens=context_tokens
        ).flatten(-2)


class Quantizable:
    """First base class of linear layers, which may multiply in FP8."""

    fp8: Fp8Config | None = None
    save_original_input = False
    """Whether an FP8 layer saves its input before quantization, because another layer keeps that tensor anyway."""
    _fp8_workspaces: dict[str, Tensor]

    def multiply(
        self,
        hidden: Tensor,
        weights: Sequence[Tensor],
        output: Sequence[int],
        *,
        normed: bool = False,
        forward: Sequence[TensorSpec] = (),
        backward: Sequence[TensorSpec] = (),
        messages: Sequence[Collective] = (),
        messages_back: Sequence[Collective] = (),
    ) -> Tensor:
        """From [..., columns] to the shape `output`, in the dtype of `hidden`.

        Saves the input of the product. `normed`: a norm of this layer makes that input, so the norm's own input is
        saved too. Other arguments are those of `Kernel`.
        """
        matrix: list[TensorSpec] = [(hidden.shape, hidden.dtype)]
        backward = list(backward)
        if self.fp8 is not None:
            # Gradients of the output are quantized twice, because the two products of the backward pass read them in
            # different directions.
            matrix = _make_quantized(hidden.shape, self.fp8)
            backward += 2 * _make_quantized(output, self.fp8)
            self._keep_copies(weights)
            note("elementwise", "quantize", nbytes=4 * hidden.numel())
        if normed:
            note("elementwise", "norm", nbytes=2 * count_bytes([hidden]))
        rows: list[TensorSpec] = [(hidden.shape[:-1], torch.float32)]
        saves_input = self.fp8 is None or self.save_original_input
        kernel = Kernel(
            "linear",
            [(output, hidden.dtype)],
            keeps=[0] if normed or saves_input else [],
            saved=[*(matrix if normed or not saves_input else []), *(rows if normed else [])],
            forward=forward,
            backward=backward,
            product=self._build_product(hidden, weights, output),
            messages=messages,
            messages_back=messages_back,
        )
        result: Tensor = run(kernel, hidden, *weights)
        return result

    def _build_product(self, hidden: Tensor, weights: Sequence[Tensor], output: Sequence[int]) -> Product:
        # With sequence parallelism the input is gathered before the product, or the output scattered after it.
        rows = max(math.prod(hidden.shape[:-1]), math.prod(output[:-1]))
        dtype = name_of(hidden.dtype) if self.fp8 is None else "fp8"
        number = sum(weight.dim() == 2 for weight in weights)
        return Product(rows, hidden.shape[-1], output[-1], dtype, number)

    def _keep_copies(self, weights: Sequence[Tensor]) -> None:
        # Weights have a copy of one byte a number for each of the two directions in which products read them, made in
        # the first forward pass. FP8 parameters are such copies themselves: bfloat16 ones stand for them, as large.
        assert self.fp8 is not None
        copies = self.__dict__.setdefault("_fp8_workspaces", {})  # the name that Transformer Engine's layers have
        if not self.fp8.parameters and not copies:
            with kind("FP8 weights"):
                for number, weight in enumerate(weights):
                    copies[str(number)] = weight.new_empty(2, *weight.shape, dtype=torch.uint8)


def _make_quantized(shape: Sequence[int], fp8: Fp8Config) -> list[TensorSpec]:
    """List an FP8 matrix, in one of two directions, and its scales."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    scales: dict[str, TensorSpec] = {
        "blockwise": ((math.ceil(rows / 128), columns), torch.float32),
        "mxfp8": ((math.ceil(rows / 32), columns), torch.uint8),
    }
    return [((rows, columns), torch.uint8), scales.get(fp8.recipe, ((1,), torch.float32))]


class ShapedColumnLinear(Quantizable, ColumnParallelLinear):
    """Transformer Engine's linear layer whose rows are split over ranks."""

    normed = False

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Multiply; returns no bias.

        [tokens of this rank, sequences, columns] becomes [tokens, sequences, rows of this rank].
        """
        tokens = input_.shape[0] * (self.tp_group.size() if self.sequence_parallel else 1)
        gathered: list[TensorSpec] = [((tokens, *input_.shape[1:]), input_.dtype)] if self.sequence_parallel else []
        parameters = list(self.parameters())
        output = (tokens, *input_.shape[1:-1], self.weight.shape[0])
        numbers, group = tokens * math.prod(input_.shape[1:]), self.tp_group
        nbytes = numbers * input_.element_size()
        # In FP8 the input is quantized before it is gathered, one byte for each number; gradients travel as they are.
        gather = [Collective("allgather", nbytes if self.fp8 is None else numbers, group)] if gathered else []
        multiplied = self.multiply(
            input_,
            parameters,
            output,
            normed=self.normed,
            forward=gathered,
            backward=gathered * 2,
            messages=gather,
            messages_back=[*gather, Collective("reduce_scatter" if gathered else "allreduce", nbytes, group)],
        )
        return multiplied, None


class ShapedNormColumnLinear(ShapedColumnLinear):
    """Transformer Engine's norm and linear layer in one."""

    normed = True

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **keywords: Any) -> None:
        super().__init__(input_size, output_size, config=config, **keywords)
        weight: Any = torch.nn.Parameter(self.weight.new_empty(input_size))
        weight.sequence_parallel = config.sequence_parallel  # Megatron-Core adds up its gradient over the ranks
        self.layer_norm_weight = weight


class ShapedLinear(Quantizable, ReplicatedLinear):
    """Transformer Engine's linear layer that tensor parallelism does not split."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        """From [..., columns] to [..., rows], and no bias."""
        return self.multiply(hidden, [self.weight], (*hidden.shape[:-1], len(self.weight))), None


class ShapedRowLinear(Quantizable, RowParallelLinear):
    """Transformer Engine's linear layer whose columns are split over ranks."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Multiply; the bias is not added.

        [tokens, sequences, columns of this rank] becomes [tokens of this rank, sequences, rows].
        """
        parts = self.tp_group.size() if self.sequence_parallel else 1
        full_shape = (*input_.shape[:-1], self.weight.shape[0])
        gathered: list[TensorSpec] = [(full_shape, input_.dtype)] if self.sequence_parallel else []
        output = (full_shape[0] // parts, *full_shape[1:])
        nbytes, group = math.prod(full_shape) * input_.element_size(), self.tp_group
        return self.multiply(
            input_,
            [self.weight],
            output,
            forward=gathered,
            backward=gathered,
            messages=[Collective("reduce_scatter" if self.sequence_parallel else "allreduce", nbytes, group)],
            messages_back=[Collective("allgather", nbytes, group)] if self.sequence_parallel else [],
        ), self.bias


class ShapedGroupedLinear(Quantizable, torch.nn.Module):
    """Transformer Engine's grouped linear layer: a matrix for each local expert.

    `split_axis`: the dimension that expert-tensor parallelism splits.
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: Any,
        split_axis: int,
        bias: bool,
        skip_bias_add: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        self._groups, self._axis, self.num_gemms = pg_collection, split_axis, num_gemms
        self._returns_bias = bias and skip_bias_add
        sizes = [output_size, input_size]
        sizes[split_axis] //= pg_collection.expt_tp.size()
        shapes = {"weight": sizes, **({"bias": sizes[:1]} if bias else {})}
        for name, number in product(shapes, range(num_gemms)):
            empty = torch.empty(*shapes[name], dtype=config.params_dtype, device=config.platform.device)
            parameter: Any = torch.nn.Parameter(empty)
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=split_axis, stride=1)
            # Megatron-Core reads this mark to reduce gradients over the data-parallel ranks of the expert.
            parameter.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"{name}{number}", parameter)

    def forward(self, hidden: Tensor, _tokens_of_experts: Sequence[int]) -> tuple[Tensor, Sequence[Tensor] | None]:
        """Multiply, [tokens of local experts, columns] to [tokens, rows]; returns biases to add."""
        weights = [parameter for name, parameter in self.named_parameters() if name.startswith("weight")]
        biases: list[Tensor] = [parameter for name, parameter in self.named_parameters() if name.startswith("bias")]
        added = [] if self._returns_bias else biases
        output = self.multiply(hidden, [*weights, *added], (hidden.shape[0], weights[0].shape[0]))
        return output, biases if self._returns_bias else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Build the checkpoint's entries, named as those of separate experts."""
        tensors: dict[str, Any] = {}
        parts, first = self._groups.ep.size(), self._groups.ep.rank() * self.num_gemms
        for name, parameter in self.named_parameters():
            part = name.rstrip("0123456789")
            if part not in ("weight", "bias"):
                continue
            number = int(name.removeprefix(part))
            offset = (len(sharded_offsets), first + number, parts * self.num_gemms)
            sharded = make_sharded_tensors_for_checkpoint(
                {part: parameter},
                "",
                {"weight": self._axis},
                (*sharded_offsets, offset),
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(sharded, "", prefix)
            shard = sharded[part]
            shard.replica_id = (*shard.replica_id[:2], self._groups.expt_dp.rank())
            tensors[prefix + name] = shard
        return tensors


class ShapedModules(LocalSpecProvider):
    """Stand-ins for the modules of Transformer Engine that layers are made of."""

    @override
    def linear(self) -> type:
        return ShapedLinear

    @override
    def column_parallel_linear(self) -> type:
        return ShapedColumnLinear

    @override
    def row_parallel_linear(self) -> type:
        return ShapedRowLinear

    @override
    def fuse_layernorm_and_linear(self) -> bool:
        return True

    @override
    def column_parallel_layer_norm_linear(self) -> type:
        return ShapedNormColumnLinear

    @override
    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return ShapedNorm

    @override
    def core_attention(self) -> type:
        return ShapedAttention

    @override
    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Callable[..., TEGroupedMLP]:
        column, row = (partial(ShapedGroupedLinear, split_axis=axis) for axis in (0, 1))
        return partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(linear_fc1=column, linear_fc2=row))
