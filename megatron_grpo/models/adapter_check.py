"""Runs on ranks of a model: compares published weights with what layers with adapters compute.

All weights that leave a model, to engines or to a folder, come from `BoundEntry.compute_weight`, which merges a layer's
adapter. Nothing derived from them can show a fault in it: an adapter that is missing in the weights is missing in their
fingerprints too. So the layer's forward pass, the one that training uses, is applied to unit vectors in float32, which
gives columns of the matrix that it multiplies by. The published weight has to be this matrix, rounded once.

The test looks at single elements and not at norms, because the adapter of the first steps is small: in bfloat16 it
changes only the few elements of a merged weight that are small themselves, and those exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.models.hf_weights import bind_entries
from megatron_grpo.models.shape import ModelShape

# Most columns of a matrix that are compared, at equal distances.
COLUMNS = 64

# Largest difference that the order of float32 sums explains, relative to the root mean square of an adapter's product.
# A sum has as many terms as the adapter has ranks, and errs by about 1e-7.
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class AdapterCheck:
    """The result of comparing one rank's layers."""

    faults: list[str]  # a text on each layer whose published weight is not what the layer computes with
    has_moved: bool  # some adapter of the rank is not zero, without which the comparison shows nothing


@torch.no_grad()
def check_adapters(chunks: Sequence[Any], shape: ModelShape) -> AdapterCheck:
    """Compare published weights with what a rank's adapted layers compute.

    These layers are found by their parameters, whatever the weight map says of them. Collective over tensor-parallel
    ranks.
    """
    published = {id(bound.parameter): bound for bound in bind_entries(chunks, shape)}
    faults: list[str] = []
    has_moved = False
    for chunk in chunks:
        for module in chunk.modules():
            if "lora_b" not in dict(module.named_parameters(recurse=False)):
                continue
            bound = published[id(module.weight)]
            has_moved |= bool(module.lora_b.any())
            if text := _find_fault(bound.compute_weight(), module):
                names = ", ".join(part.name for part in bound.entry.list_slices(shape, bound.layer, 0, 1))
                faults.append(f"{names}: {text}")
    return AdapterCheck(faults, has_moved)


def _find_fault(published: Tensor, layer: Any) -> str | None:
    width = published.shape[1]
    columns = torch.arange(0, width, -(-width // COLUMNS), device=published.device)
    published, base = published[:, columns].float(), layer.weight.detach()[:, columns].float()
    computed = layer.compute_columns(columns)
    size = float((computed - base).norm())
    # Half a unit in the last place of the published dtype, and one of the float32 sum that is rounded to it.
    rounding = torch.finfo(layer.weight.dtype).eps / 2 + torch.finfo(torch.float32).eps
    error = published - computed
    limit = rounding * computed.abs() + TOLERANCE * size / math.sqrt(error.numel())
    if bool((error.abs() <= limit).all()):  # False for NaN
        return None
    if torch.equal(published, base):
        return "published without the layer's adapter"
    return f"published with an error of norm {float(error.norm()):.2g}; the layer's adapter has {size:.2g}"
