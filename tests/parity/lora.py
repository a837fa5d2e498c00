"""Adapters on ranks and in peft: the same values in both, whatever the layout."""

import hashlib
import re
from typing import Any

import torch
from megatron.core import parallel_state
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from torch import Tensor

from megatron_grpo.trainer.rank import PolicyRank
from tests.parity.adapters import LORA, MATRICES, adapted_layers
from tests.parity.ranks import Layout

LAYERS = "model.layers"
"""Name of the layers in a language model of transformers."""


def fill_b(rank: PolicyRank) -> None:
    """Put numbers into B that depend on the layer alone: its whole matrix, of which a rank takes its rows."""
    size, index = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    for name, layer in adapted_layers(rank).items():
        rows = len(layer.lora_b) * (size if layer.split_matrix == "lora_b" else 1)
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
        full = 0.3 * torch.randn(rows, LORA.rank, generator=torch.Generator().manual_seed(seed))
        if layer.split_matrix == "lora_b":
            matrices = full.chunk(2) if "fc1" in name else (full,)
            full = torch.cat([matrix.chunk(size)[index] for matrix in matrices])
        layer.lora_b.data.copy_(full)


def own_parts(rank: PolicyRank, gradients: bool) -> dict[str, Tensor]:
    """This rank's A and B, or their gradients, by "LAYER.NAME.lora_a"."""
    return {
        f"{name}.{part}": (getattr(layer, part).main_grad if gradients else getattr(layer, part)).detach().clone()
        for name, layer in adapted_layers(rank).items()
        for part in ("lora_a", "lora_b")
    }


def join(by_rank: list[dict[str, Tensor]], layout: Layout) -> dict[str, Tensor]:
    """Whole A and B from what every rank has: tensor-parallel neighbours are consecutive, other copies are equal."""
    full_tensors: dict[str, Tensor] = {}
    for begin in range(0, layout.ranks, layout.tensor):
        neighbours = by_rank[begin : begin + layout.tensor]
        for name in neighbours[0]:
            value = _join(name, [neighbour[name] for neighbour in neighbours])
            torch.testing.assert_close(value, full_tensors.setdefault(name, value), atol=0, rtol=0)
    return full_tensors


def _join(name: str, parts: list[Tensor]) -> Tensor:
    column = "linear_qkv" in name or "linear_fc1" in name
    if column == name.endswith("lora_a"):  # every rank has all of it
        for part in parts:
            torch.testing.assert_close(part, parts[0], atol=0, rtol=0)
        return parts[0]
    if "linear_fc1" in name:
        return torch.cat([part.chunk(2)[half] for half in (0, 1) for part in parts])
    return torch.cat(parts, dim=0 if column else 1)


def rows_of(model: Any, matrix: str, lora_b: Tensor) -> Tensor:
    """The rows of a whole B that belong to a matrix of transformers, group by group."""
    shape = model.shape
    if matrix in ("mlp.gate_proj", "mlp.up_proj"):
        return lora_b.chunk(2)[matrix == "mlp.up_proj"]
    if matrix in ("self_attn.o_proj", "mlp.down_proj"):
        return lora_b
    heads, rows, begin = shape.attention_heads // shape.key_value_heads, [], 0
    for _ in range(shape.key_value_heads):
        query, key = begin + heads * shape.head_dim, begin + (heads + 1) * shape.head_dim
        end = key + shape.head_dim
        ranges = {"q": (begin, query), "k": (query, key), "v": (key, end)}
        rows += range(*ranges[matrix[len("self_attn.")]])
        begin = end
    return lora_b[rows]


def peft_oracle(model: Any, full_tensors: dict[str, Tensor], layers: str = LAYERS) -> PeftModel:
    """The model in transformers with adapters of peft in these layers, whose A and B are these."""
    targets = [matrix.rpartition(".")[2] for matrices in MATRICES.values() for matrix in matrices]
    pattern = rf"{re.escape(layers)}\..*\.({'|'.join(targets)})"
    config = PeftConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=pattern, task_type="CAUSAL_LM")
    oracle = get_peft_model(model.load(), config)
    for name, of_a, of_b, matrix in list_matrices(oracle, full_tensors, layers):
        assert of_a.shape == full_tensors[f"{name}.lora_a"].shape
        of_a.data.copy_(full_tensors[f"{name}.lora_a"])
        of_b.data.copy_(rows_of(model, matrix, full_tensors[f"{name}.lora_b"]))
    return oracle


def list_matrices(
    oracle: PeftModel, full_tensors: dict[str, Tensor], layers: str = LAYERS
) -> list[tuple[str, Tensor, Tensor, str]]:
    """For every matrix of transformers: its adapted layer, its A and B in peft, and its name."""
    parameters = dict(oracle.named_parameters())
    weights = []
    for name in sorted({key.rpartition(".")[0] for key in full_tensors}):
        layer, _, megatron = name.partition(".")
        for matrix in MATRICES[megatron]:
            inside = f"base_model.model.{layers}.{layer}.{matrix}"
            lora_a, lora_b = (parameters[f"{inside}.lora_{part}.default.weight"] for part in "AB")
            weights.append((name, lora_a, lora_b, matrix))
    return weights


def expect_gradients_of_adapters(
    model: Any, oracle: PeftModel, values: dict[str, Tensor], gradients: dict[str, Tensor], layers: str = LAYERS
) -> None:
    """Expect gradients of whole A and B, "LAYER.NAME.lora_a", to be those that peft's adapters have."""
    of_a: dict[str, Tensor] = {}
    for name, lora_a, lora_b, matrix in list_matrices(oracle, values, layers):
        of_a[name] = of_a.get(name, 0) + lora_a.grad  # matrices that are merged share their A
        error = (rows_of(model, matrix, gradients[f"{name}.lora_b"]) - lora_b.grad).norm() / lora_b.grad.norm()
        assert error < 1e-4, f"{model.name} {name} {matrix} B: relative error {error:.1e}"
    for name, expected in of_a.items():
        error = (gradients[f"{name}.lora_a"] - expected).norm() / expected.norm()
        assert error < 1e-4, f"{model.name} {name} A: relative error {error:.1e}"
