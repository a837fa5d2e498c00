"""Folders of models whose weights are stored in FP8 or MXFP4, as released models have them."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
FP8_WHOLE = {
    "activation_scheme": "static",
    "dequantize": False,
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "fp8",
    "weight_block_size": None,
}
MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def to_fp8(weight: Tensor, block: list[int] | None) -> tuple[Tensor, Tensor]:
    """A matrix in FP8, and its scales by block, or one for all of it."""
    if block is None:
        scale = weight.abs().max() / 448
        return (weight / scale).to(torch.float8_e4m3fn), scale
    rows, columns = (-(-size // width) for size, width in zip(weight.shape, block, strict=True))
    scales, numbers = torch.empty(rows, columns), torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            region = tuple(slice(n * w, (n + 1) * w) for n, w in zip((row, column), block, strict=True))
            scales[row, column] = weight[region].abs().max() / 448
            numbers[region] = (weight[region] / scales[row, column]).to(torch.float8_e4m3fn)
    return numbers, scales


def to_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor [experts, columns, rows] in MXFP4: [experts, rows, groups, 16] and [experts, rows, groups], uint8."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / exponents[..., None].exp2()
    codes = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8), (exponents + 127).to(torch.uint8)


def quantize_folder(source: Path, folder: Path, settings: dict[str, Any]) -> Path:
    """A copy of a model's folder with quantized matrices of layers (MXFP4: of experts), and these settings.

    The other tensors are in bfloat16.
    """
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_matrix = ".layers." in name and tensor.dim() == 2 and "proj" in name and "bias" not in name
        if settings["quant_method"] == "mxfp4" and tensor.dim() == 3:
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = to_mxfp4(tensor)
        elif settings["quant_method"] == "fp8" and is_matrix:
            tensors[name], tensors[f"{name}_scale_inv"] = to_fp8(tensor, settings["weight_block_size"])
            if settings["weight_block_size"] is None:
                tensors[name.replace("weight", "activation_scale")] = torch.tensor(1.0)
        else:
            tensors[name] = tensor.bfloat16()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
