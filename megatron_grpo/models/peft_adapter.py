"""Adapters of a model in the format of the peft package: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.models.hf_folder import new_folder
from megatron_grpo.models.hf_weights import bound_entries
from megatron_grpo.models.merge import split_parameter
from megatron_grpo.models.shape import ModelShape

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
"""What peft puts before the names of the model that it wraps."""


@torch.no_grad()
def iter_adapter_tensors(chunks: Sequence[Any], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    """Every adapter's A and B under the names of peft, for each Hugging Face matrix that has one.

    Matrices that share a Megatron parameter share its A: each gets a copy, and its own rows of B.

    Args:
        chunks: the whole model, on one rank.
        shape: sizes of the model.

    Yields:
        Names with A, [rank, columns], and B, [rows, rank], in the model's dtype.
    """
    for bound in bound_entries(chunks, shape):
        if bound.adapted is None:
            continue
        slices = bound.entry.slices(shape, bound.layer, 0, 1)
        rows_of_b = split_parameter(bound.entry, bound.adapted.lora_b.detach(), slices, shape)
        for matrix, lora_b in zip(slices, rows_of_b, strict=True):
            name = _PREFIX + matrix.name.removesuffix(".weight")
            yield f"{name}.lora_A.weight", bound.adapted.lora_a.detach()
            yield f"{name}.lora_B.weight", lora_b


def write_peft_folder(
    chunks: Sequence[Any], shape: ModelShape, lora: LoraConfig, base_model: str, output: str | Path
) -> None:
    """Write the adapters of a model as a folder that peft loads, under a temporary name until it is complete.

    Args:
        chunks: the whole model, on one rank.
        shape: sizes of the model.
        lora: settings of its adapters.
        base_model: path or hub name of the model that the adapters belong to.
        output: folder to make; must not exist, or be empty.

    Raises:
        ValueError: `output` already holds something.
    """
    # Copies: matrices with one A share its memory, which safetensors refuses to write.
    tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, tensor in iter_adapter_tensors(chunks, shape)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "use_rslora": False,
        "inference_mode": True,
    }
    with new_folder(output) as folder:
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
