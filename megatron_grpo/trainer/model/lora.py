"""LoRA: low-rank adapters on a rank's linear layers, trained in place of their frozen weights (Hu et al. 2021, eq. 3).

A layer computes W x + (alpha / rank) B A x. A has `rank` rows, B `rank` columns. One A serves all of a merged matrix
(queries, keys and values; gate and up), and B has its rows in the order of the weight's: each Hugging Face matrix gets
the shared A and its own rows of B, which is a valid adapter of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.models.megatron_names import iterate_layers

# Dimension along which tensor parallelism splits a matrix, if it does.
_SPLIT_AXIS = {"lora_a": 1, "lora_b": 0}


class AdaptedLinear:
    """An adapter, a mixin of linear layers (`layers.apply_mixin`).

    The adapter acts in `_forward_impl`, the product with this rank's weight. Gathering the input before it and reducing
    the output after it stay those of the layer. Where tensor parallelism splits the layer's rows, each rank has all of
    A and its rows of B. Where it splits the columns, a rank has its columns of A and all of B: the adapter's term is
    then a partial sum, like the product itself, and the layer's own reduction completes both in one message.
    """

    config: Any
    weight: Tensor
    lora_a: Tensor
    lora_b: Tensor
    tp_group: Any
    adapter_on = True

    def __init__(self, *arguments: Any, lora: LoraConfig, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.scale = lora.alpha / lora.rank
        self.split_matrix = "lora_b" if isinstance(self, ColumnParallelLinear) else "lora_a"
        rows, columns = self.weight.shape
        for name, shape in (("lora_a", (lora.rank, columns)), ("lora_b", (rows, lora.rank))):
            parameter: Any = torch.nn.Parameter(self.weight.new_empty(shape))
            # By these marks Megatron-Core counts a parameter that is not split only once in the gradient norm.
            parameter.tensor_model_parallel = name == self.split_matrix
            parameter.partition_dim = _SPLIT_AXIS[name] if name == self.split_matrix else -1
            parameter.partition_stride = 1
            if name == "lora_a" and self.split_matrix == "lora_b":
                # Each rank sees only its tokens, so Megatron-Core has to sum the gradients of A over ranks.
                parameter.sequence_parallel = self.config.sequence_parallel
            setattr(self, name, parameter)

    @torch.no_grad()
    def initialize_adapter(self, name: str) -> None:
        """Draw A within 1 / sqrt(columns), like torch, and set B to zero."""
        parts, part = (self.tp_group.size(), self.tp_group.rank()) if self.split_matrix == "lora_a" else (1, 0)
        rows, columns = len(self.lora_a), self.lora_a.shape[1] * parts
        # Of the unsplit matrix, and seeded by the layer's name in the model, so that every layout draws the same.
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        drawn = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed))
        self.lora_a.copy_(((2 * drawn - 1) / columns**0.5).chunk(parts, dim=1)[part])
        self.lora_b.zero_()

    def merge_weight(self) -> Tensor:
        """W + scale * B A of this rank, rounded once from float32."""
        added = self.lora_b.float() @ self.lora_a.float()
        return (self.weight.float() + self.scale * added).to(self.weight.dtype)

    @torch.no_grad()
    def compute_columns(self, columns: Tensor) -> Tensor:
        """Compute columns of the matrix that the forward pass multiplies by.

        They are the layer's outputs for unit vectors, computed in float32: columns of the weight, plus the adapter's
        term as the forward pass adds it. They are computed without `merge_weight`, which they check. `columns`, [n],
        int64, are the same on all tensor-parallel ranks; collective over these.
        """
        gathers = self.split_matrix == "lora_b" and self.config.sequence_parallel
        parts = self.tp_group.size() if gathers else 1
        padded = F.pad(columns, (0, -len(columns) % parts))  # ranks have equal shares of the sequence
        units = F.one_hot(padded, self.weight.shape[1]).float()[:, None].chunk(parts)
        fp8_before = getattr(self, "fp8_on", False)
        self.fp8_on = False  # no simulated FP8 (`RoundedLinear`): engines round published weights themselves
        try:
            product = self._forward_impl(
                input=units[self.tp_group.rank() if gathers else 0],
                weight=self.weight.float(),
                bias=None,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=False,
                sequence_parallel=gathers,
                tp_group=self.tp_group,
            )
        finally:
            self.fp8_on = fp8_before
        return product[: len(columns), 0].T

    def _forward_impl(self, input: Tensor, weight: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        output: Tensor = super()._forward_impl(input, weight, *arguments, **keywords)  # type: ignore[misc]
        return output + self._compute_term(input) if self.adapter_on else output

    def _compute_term(self, hidden: Tensor) -> Tensor:
        low, lora_b = F.linear(hidden, self.lora_a.to(hidden.dtype)), self.lora_b.to(hidden.dtype)
        if self.split_matrix == "lora_a":  # each rank's columns give a partial gradient of B, which backward sums
            lora_b = copy_to_tensor_model_parallel_region(lora_b, group=self.tp_group)
        elif self.config.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.tp_group)
        else:  # backward sums the gradients that come through each rank's rows of B
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        return self.scale * F.linear(low, lora_b)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        split = make_sharded_tensors_for_checkpoint(
            {self.split_matrix: getattr(self, self.split_matrix)},
            prefix,
            {self.split_matrix: _SPLIT_AXIS[self.split_matrix]},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        # Gate above up, stored as two matrices, which other layouts split singly.
        if prefix.endswith("linear_fc1.") and self.config.gated_linear_unit:
            single = metadata.get("singleton_local_shards", False)
            split = {key: apply_swiglu_sharded_factory(shard, sharded_offsets, single) for key, shard in split.items()}
        return state | split


def train_adapters_alone(chunk: Any) -> None:
    """Freeze all parameters but the adapters', and initialize the adapters."""
    chunk.requires_grad_(False)
    for name, layer in _iter_adapted_layers(chunk):
        layer.initialize_adapter(name)
        layer.lora_a.requires_grad_(True)
        layer.lora_b.requires_grad_(True)
    if chunk.pre_process:
        # Recomputed layers have a gradient only if their input has one, and no frozen layer before them gives it one.
        chunk.embedding.register_forward_hook(
            lambda _module, _inputs, embedded: embedded.requires_grad_(torch.is_grad_enabled())
        )


@contextmanager
def adapters_off(chunks: Sequence[Any]) -> Iterator[None]:
    """Switch a model's adapters off in the body."""
    layers = [layer for chunk in chunks for _, layer in _iter_adapted_layers(chunk)]
    assert layers, "the model has no adapters"
    for layer in layers:
        layer.adapter_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.adapter_on = True


def _iter_adapted_layers(chunk: Any) -> Iterator[tuple[str, AdaptedLinear]]:
    for layer, _, layer_module in iterate_layers(chunk):
        for name, module in layer_module.named_modules():
            if isinstance(module, AdaptedLinear):
                yield f"layers.{layer}.{name}", module
