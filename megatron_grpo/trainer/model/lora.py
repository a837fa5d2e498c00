"""LoRA: low-rank adapters on a rank's linear layers, trained in place of their frozen weights (Hu et al. 2021, eq. 3).

A layer computes W x + (alpha / rank) B A x. A has `rank` rows, B `rank` columns. One A serves all of a merged matrix
(queries, keys and values; gate and up), and B has its rows in the order of the weight's: each Hugging Face matrix gets
the shared A and its own rows of B, which is a valid adapter of it. Each expert of a mixture has adapters of its own.
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
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor

from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.models.megatron_names import iterate_layers, name_in_model

# Dimension along which tensor parallelism splits a matrix, if it does.
_SPLIT_AXIS = {"lora_a": 1, "lora_b": 0}


class Adapter:
    """A rank's part of a weight W, and its adapter.

    Where tensor parallelism splits the rows of W, each rank has all of A and its rows of B. Where it splits the
    columns, a rank has its columns of A and all of B: the adapter's term is then a partial sum, like the product
    itself, and what reduces the product completes both in one message.
    """

    weight: Tensor
    lora_a: Tensor
    lora_b: Tensor
    scale: float
    split_matrix: str  # the matrix that tensor parallelism splits: lora_a or lora_b
    tp_group: Any
    splits_sequence: bool  # each rank's input is its own part of the tokens, which the layer gathers
    is_gathered: bool  # a dispatcher has gathered the input, and sums the input's gradients over ranks

    @torch.no_grad()
    def initialize_adapter(self, name: str) -> None:
        """Draw A within 1 / sqrt(columns), like torch, and set B to zero."""
        parts, part = (get_pg_size(self.tp_group), get_pg_rank(self.tp_group)) if self._splits_columns else (1, 0)
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

    def compute_columns(self, columns: Tensor) -> Tensor:
        """Compute columns of the matrix that the forward pass multiplies by, in float32.

        They are computed without `merge_weight`, which they check. `columns`, [n], int64, are the same on all
        tensor-parallel ranks; collective over these.
        """
        raise NotImplementedError

    @property
    def _splits_columns(self) -> bool:
        return self.split_matrix == "lora_a"

    def compute_term(self, hidden: Tensor) -> Tensor:
        lora_a, lora_b = self.lora_a.to(hidden.dtype), self.lora_b.to(hidden.dtype)
        if self._splits_columns:  # each rank's columns give a partial gradient of B, which backward sums
            lora_b = copy_to_tensor_model_parallel_region(lora_b, group=self.tp_group)
        elif self.is_gathered:  # as each rank's rows of B give a partial gradient of A
            lora_a = copy_to_tensor_model_parallel_region(lora_a, group=self.tp_group)
        low = F.linear(hidden, lora_a)
        if self.splits_sequence:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.tp_group)
        elif not self._splits_columns and not self.is_gathered:  # of A and of the input, through each rank's rows of B
            low = copy_to_tensor_model_parallel_region(low, group=self.tp_group)
        return self.scale * F.linear(low, lora_b)

    def add_parameters(self, layer: torch.nn.Module, rank: int, suffix: str = "") -> None:
        """Give `layer` the parameters A and B of `weight`, their names followed by `suffix`."""
        rows, columns = self.weight.shape
        for name, shape in (("lora_a", (rank, columns)), ("lora_b", (rows, rank))):
            parameter: Any = torch.nn.Parameter(self.weight.new_empty(shape))
            # By these marks Megatron-Core counts a parameter that is not split only once in the gradient norm.
            parameter.tensor_model_parallel = name == self.split_matrix
            parameter.partition_dim = _SPLIT_AXIS[name] if name == self.split_matrix else -1
            parameter.partition_stride = 1
            # Each rank sees only its tokens, so Megatron-Core has to sum the gradients of A over ranks.
            parameter.sequence_parallel = name == "lora_a" and self.splits_sequence
            layer.register_parameter(f"{name}{suffix}", parameter)


class AdaptedLinear(Adapter):
    """An adapter, a mixin of linear layers (`layers.apply_mixin`).

    The adapter acts in `_forward_impl`, the product with this rank's weight. Gathering the input before it and reducing
    the output after it stay those of the layer.
    """

    config: Any
    explicit_expert_comm: bool
    adapter_on = True

    def __init__(self, *arguments: Any, lora: LoraConfig, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.scale = lora.alpha / lora.rank
        self.split_matrix = "lora_b" if isinstance(self, ColumnParallelLinear) else "lora_a"
        self.is_gathered = self.explicit_expert_comm
        is_split = self.config.sequence_parallel and not self.is_gathered
        self.splits_sequence = is_split and not self._splits_columns
        layer: Any = self
        self.add_parameters(layer, lora.rank)

    @property
    def adapters(self) -> list[Adapter]:
        """The layer's adapters, here one."""
        return [self]

    @torch.no_grad()
    def compute_columns(self, columns: Tensor) -> Tensor:
        """Compute columns of the matrix that the forward pass multiplies by, in float32.

        They are the layer's outputs for unit vectors: columns of the weight, plus the adapter's term as the forward
        pass adds it.
        """
        gathers = self.splits_sequence
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
        return output + self.compute_term(input) if self.adapter_on else output

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


class AdaptedGroupedLinear:
    """Adapters of local experts, a mixin of grouped linear layers (`layers.apply_mixin`).

    Such a layer has the matrices of all local experts: those of Transformer Engine, or those of a dry run.
    """

    num_gemms: int
    adapter_on = True

    def __init__(self, *arguments: Any, lora: LoraConfig, config: Any, pg_collection: Any, **keywords: Any) -> None:
        super().__init__(*arguments, config=config, pg_collection=pg_collection, **keywords)  # type: ignore[call-arg]
        self.scale, self.process_groups = lora.alpha / lora.rank, pg_collection
        self._is_gated = config.gated_linear_unit
        layer: Any = self
        for number, adapter in enumerate(self.adapters):
            adapter.add_parameters(layer, lora.rank, str(number))

    @property
    def adapters(self) -> list[Adapter]:
        """Those of local experts, in their order."""
        return [ExpertAdapter(self, number) for number in range(self.num_gemms)]

    def forward(self, hidden: Tensor, tokens_of_experts: Sequence[int]) -> tuple[Tensor, Any]:
        """Multiply tokens, expert by expert: [tokens, columns] to [tokens, rows]."""
        output, bias = super().forward(hidden, tokens_of_experts)  # type: ignore[misc]
        if self.adapter_on:
            parts = zip(self.adapters, hidden.split(list(tokens_of_experts)), strict=True)
            output = output + torch.cat([adapter.compute_term(part) for adapter, part in parts])
        return output, bias

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        groups = self.process_groups
        first, count = groups.ep.rank() * self.num_gemms, groups.ep.size() * self.num_gemms
        for number, adapter in enumerate(self.adapters):
            offsets = (*sharded_offsets, (len(sharded_offsets), first + number, count))
            shards = make_sharded_tensors_for_checkpoint(
                {"lora_a": adapter.lora_a, "lora_b": adapter.lora_b},
                prefix,
                {adapter.split_matrix: _SPLIT_AXIS[adapter.split_matrix]},
                offsets,
                tp_group=groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            for name, shard in shards.items():
                shard.replica_id = (*shard.replica_id[:2], groups.expt_dp.rank())
                is_gated = self._is_gated and name.endswith("linear_fc1.lora_b")
                state[f"{name}{number}"] = apply_swiglu_sharded_factory(shard, offsets) if is_gated else shard
        return state


class ExpertAdapter(Adapter):
    """One expert's matrix in a grouped linear layer, and its adapter."""

    splits_sequence, is_gathered = False, True

    def __init__(self, layer: AdaptedGroupedLinear, number: int) -> None:
        self._layer, self._number = layer, number
        self.scale, self.tp_group = layer.scale, layer.process_groups.expt_tp
        weight: Any = self.weight
        self.split_matrix = "lora_b" if weight.partition_dim == 0 else "lora_a"

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "lora_a", "lora_b"):
            return getattr(self._layer, f"{name}{self._number}")
        raise AttributeError(name)

    @torch.no_grad()
    def compute_columns(self, columns: Tensor) -> Tensor:
        """Compute columns of the matrix that the forward pass multiplies by, in float32.

        The product with W is left out, because Transformer Engine multiplies in the dtype of W alone.
        """
        weight = self.weight[:, columns].float()
        if not self._layer.adapter_on:
            return weight
        return weight + self.compute_term(F.one_hot(columns, self.weight.shape[1]).float()).T


def train_adapters_alone(chunk: Any) -> None:
    """Freeze all parameters but the adapters', and initialize the adapters."""
    chunk.requires_grad_(False)
    experts = chunk.config.num_moe_experts or 0
    first_expert = chunk.pg_collection.ep.rank() * (experts // chunk.pg_collection.ep.size()) if experts else 0
    for layer, name, module in _iter_adapted_layers(chunk):
        for number, adapter in enumerate(module.adapters):
            adapter.initialize_adapter(f"layers.{layer}.{name_in_model(name, first_expert, number)}")
            adapter.lora_a.requires_grad_(True)
            adapter.lora_b.requires_grad_(True)
    if chunk.pre_process:
        # Recomputed layers have a gradient only if their input has one, and no frozen layer before them gives it one.
        chunk.embedding.register_forward_hook(
            lambda _module, _inputs, embedded: embedded.requires_grad_(torch.is_grad_enabled())
        )


@contextmanager
def adapters_off(chunks: Sequence[Any]) -> Iterator[None]:
    """Switch a model's adapters off in the body."""
    modules = [module for chunk in chunks for _, _, module in _iter_adapted_layers(chunk)]
    assert modules, "the model has no adapters"
    for module in modules:
        module.adapter_on = False
    try:
        yield
    finally:
        for module in modules:
            module.adapter_on = True


def _iter_adapted_layers(chunk: Any) -> Iterator[tuple[int, str, AdaptedLinear | AdaptedGroupedLinear]]:
    for layer, _, layer_module in iterate_layers(chunk):
        for name, module in layer_module.named_modules():
            if isinstance(module, (AdaptedLinear, AdaptedGroupedLinear)):
                yield layer, name, module
