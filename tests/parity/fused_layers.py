"""Layers and experts of the form that they have on a GPU, with numbers on a CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from torch import Tensor

from megatron_grpo.planning.dry.stand_in_layers import ShapedGroupedLinear
from megatron_grpo.platform.device import detect_platform
from megatron_grpo.trainer import microbatch, rank
from megatron_grpo.trainer.model import build, layer_spec, megatron_config
from megatron_grpo.trainer.model.attention import TorchCoreAttention
from megatron_grpo.trainer.model.packed_sequences import PackedSequences, build_attention_calls, lay_out

UNFUSED = {"apply_rope_fusion": False, "moe_grouped_gemm": False, "moe_permute_fusion": False}
"""Settings of Megatron-Core for models of these layers, in place of kernels of Transformer Engine."""


class NormColumnLinear(ColumnParallelLinear):
    """A norm and a linear layer in one, with the names of Transformer Engine's parameters."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **keywords: Any) -> None:
        super().__init__(input_size, output_size, config=config, **keywords)
        weight: Any = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        weight.sequence_parallel = config.sequence_parallel
        self.layer_norm_weight, self.eps = weight, config.layernorm_epsilon

    def forward(self, input_: Tensor, *_: Any, **__: Any) -> Any:
        return super().forward(F.rms_norm(input_, self.layer_norm_weight.shape, self.layer_norm_weight, self.eps))


class ThdAttention(torch.nn.Module):
    """Attention of [tokens, heads, head_dim], which knows the sequences by their boundaries alone."""

    def __init__(self, config: TransformerConfig, *, k_channels: int = 0, v_channels: int = 0, **keywords: Any) -> None:
        super().__init__()
        assert keywords["attention_type"] == "self"
        self.channels, self.attention = (k_channels, v_channels), TorchCoreAttention(config, **keywords)
        self.context = parallel_state.get_context_parallel_rank(), config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: None,
        *,
        attn_mask_type: Any,
        packed_seq_params: Any,
        attention_bias: None = None,
    ) -> Tensor:
        """[tokens, heads * value_dim]."""
        assert packed_seq_params.qkv_format == "thd"
        assert attn_mask_type.name == "causal"
        if any(self.channels):  # latent attention, whose heads Transformer Engine takes in memory of their own alone
            assert self.channels == (key.shape[-1], value.shape[-1])
            assert all(tensor.is_contiguous() for tensor in (query, key, value))
        (number, size), lengths = self.context, packed_seq_params.cu_seqlens_kv_padded.diff().tolist()
        calls = build_attention_calls(lay_out(lengths, rank=number, size=size), None, torch.from_numpy)
        packed = PackedSequences(qkv_format="sbhd", calls=calls)
        tokens = (tensor[:, None] for tensor in (query, key, value))
        return self.attention(*tokens, packed_seq_params=packed)[:, 0]


class FusedModules(layer_spec.TorchModules):
    """Modules of layers as Transformer Engine divides them."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnLinear

    def core_attention(self) -> type:
        return ThdAttention


@contextmanager
def use_fused_layers() -> Iterator[None]:
    """Let this process build models of the layers above, until the end."""
    platform = replace(detect_platform(), layer_modules=FusedModules())
    changes: list[tuple[Any, str, Any]] = [
        *(
            (module, "uses_transformer_engine", lambda *_: True)
            for module in (layer_spec, build, megatron_config, microbatch)
        ),
        (rank, "detect_platform", lambda: platform),
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in changes]
    for module, name, value in changes:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in originals:
            setattr(module, name, value)


class PlainGroupedLinear(ShapedGroupedLinear):
    """A product for each expert, with the names and marks of Transformer Engine's parameters."""

    def forward(self, hidden: Tensor, tokens_of_experts: Sequence[int]) -> tuple[Tensor, None]:
        parts = enumerate(hidden.split(list(tokens_of_experts)))
        return torch.cat([F.linear(part, getattr(self, f"weight{number}")) for number, part in parts]), None


class GroupedModules(layer_spec.TorchModules):
    """Modules of layers, with experts as Transformer Engine has them."""

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        column, row = (partial(PlainGroupedLinear, split_axis=axis) for axis in (0, 1))
        return partial(TEGroupedMLP, submodules=GroupedMLPSubmodules(linear_fc1=column, linear_fc2=row))


@contextmanager
def use_grouped_experts(is_grouped: bool = True) -> Iterator[None]:
    """Let models be built with such experts, if `is_grouped`, until the end."""
    original = layer_spec.TorchModules
    if is_grouped:
        layer_spec.TorchModules = GroupedModules  # type: ignore[misc]
    try:
        yield
    finally:
        layer_spec.TorchModules = original  # type: ignore[misc]
