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

from megatron_grpo.models.hf_weights import bind_entries, is_adapter_parameter, list_local_experts
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
            if not any(is_adapter_parameter(name) for name, _ in module.named_parameters(recurse=False)):
                continue
            for adapter in module.adapters:
                bound = published[id(adapter.weight)]
                has_moved |= bool(adapter.lora_b.any())
                if text := _find_fault(bound.compute_weight(), adapter):
                    names = ", ".join(
                        bound.entry.name_tensors(bound.layer, list_local_experts(chunk, shape)[bound.expert])
                    )
                    faults.append(f"{names}: {text}")
    return AdapterCheck(faults, has_moved)


def _find_fault(published: Tensor, adapter: Any) -> str | None:
    width = published.shape[1]
    columns = torch.arange(0, width, -(-width // COLUMNS), device=published.device)
    published, base = published[:, columns].float(), adapter.weight.detach()[:, columns].float()
    computed = adapter.compute_columns(columns)
    size = float((computed - base).norm())
    # Half a unit in the last place of the published dtype, and one of the float32 sum that is rounded to it.
    rounding = torch.finfo(adapter.weight.dtype).eps / 2 + torch.finfo(torch.float32).eps
    error = published - computed
    limit = rounding * computed.abs() + TOLERANCE * size / math.sqrt(error.numel())
    if bool((error.abs() <= limit).all()):  # False for NaN
        return None
    if torch.equal(published, base):
        return "published without the layer's adapter"
    return f"published with an error of norm {float(error.norm()):.2g}; the layer's adapter has {size:.2g}"
