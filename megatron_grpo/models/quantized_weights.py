"""Weights that released models store in FP8 or MXFP4, by config.json and the headers of their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.shape import read_config_json
from megatron_grpo.models.stored_tensors import StoredTensor

FP8, MXFP4 = "fp8", "mxfp4"
"""`quant_method` of the forms that are read."""
_FORMATS = (None, "e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn")
"""Names of the one format of FP8 numbers that is read, as released models have them under `fmt`."""
SCALES = "_scale_inv"  # behind the name of an FP8 tensor
BLOCKS, EXPONENTS = "_blocks", "_scales"  # behind the name of an MXFP4 tensor
_INPUT_SCALE = ".activation_scale"  # of a layer that computes in FP8
SHARED = 32  # numbers of MXFP4 that share an exponent


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a folder's quantized weights are stored."""

    method: str  # FP8 or MXFP4
    block: tuple[int, int] | None = None
    """Rows and columns of an FP8 matrix that share a scale; None: all of them do."""


def read_quantization(raw: Mapping[str, Any], family: str | None = None) -> Quantization | None:
    """Read a config.json's quantization; None: it has none.

    `family`: the model's, if known. ValueError: the weights are stored in a way that is not read.
    """
    settings = raw.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if method == MXFP4 and family in (None, "gpt_oss"):
        return Quantization(MXFP4)
    if method != FP8 or settings.get("fmt") not in _FORMATS:
        refuse_quantized(settings, "quantization_config")
    block = settings.get("weight_block_size")
    if block is None:
        return Quantization(FP8)
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ValueError(f"weight_block_size={to_text(block)} of quantization_config must be two numbers, or null")
    return Quantization(FP8, (block[0], block[1]))


def is_quantized(folder: str | Path) -> bool:
    """Whether the weights in a folder are quantized in a form that is read."""
    return read_quantization(read_config_json(Path(folder) / "config.json")) is not None


def refuse_quantized(settings: Any, key: str) -> None:
    """Refuse a model whose files have quantization settings, under this key."""
    if settings is None:
        return
    method = None
    if isinstance(settings, dict):
        method = settings.get("quant_method") or settings.get("quant_algo") or settings.get("format")
    kind = f" ({method})" if isinstance(method, str) else ""
    raise ValueError(
        f"{key}{kind}: weights that are quantized so cannot be read; convert the model to bfloat16 first, "
        "as docs/layouts.md shows"
    )


def describe_values(tensors: Mapping[str, StoredTensor], quantization: Quantization) -> dict[str, StoredTensor]:
    """Describe tensors as they are read: those of a quantized weight become one.

    ValueError: scales are missing, or are of other sizes than the weight implies.
    """
    described: dict[str, StoredTensor] = {}
    factors = (SCALES, _INPUT_SCALE) if quantization.method == FP8 else (EXPONENTS,)
    for name, tensor in tensors.items():
        if quantization.method == MXFP4 and name.endswith(BLOCKS):
            if tensor.shape[3:] != (SHARED // 2,):
                raise ValueError(f"{name} has shape {list(tensor.shape)}, which is not that of blocks of MXFP4")
            weight = name.removesuffix(BLOCKS)
            _require_shape(tensors, weight + EXPONENTS, tensor.shape[:3])
            described[weight] = replace(tensor, shape=unpack_shape(tensor.shape), dtype="BF16")
        elif quantization.method == FP8 and tensor.dtype == "F8_E4M3":
            _require_shape(tensors, name + SCALES, count_scales(tensor.shape, quantization))
            described[name] = replace(tensor, dtype="BF16")
        elif not name.endswith(factors):
            described[name] = tensor
    return described


def unpack_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Compute the shape of a tensor of experts from that of its MXFP4 blocks."""
    experts, rows, groups, _ = blocks
    return experts, groups * SHARED, rows


def count_scales(shape: tuple[int, ...], quantization: Quantization) -> tuple[int, ...]:
    """Count the scales of an FP8 matrix by dimension; (): one scale."""
    if quantization.block is None:
        return ()
    return tuple(-(-size // width) for size, width in zip(shape, quantization.block, strict=False))


def _require_shape(tensors: Mapping[str, StoredTensor], name: str, expected: tuple[int, ...]) -> None:
    if name not in tensors:
        raise ValueError(f"the folder has no tensor {name}, without which a quantized weight cannot be read")
    shape = tensors[name].shape
    if shape != expected and not (shape == (1,) and expected == ()):
        raise ValueError(f"{name} has shape {list(shape)}, but the weight implies {list(expected)}")
