"""Fingerprints of weights, by which the weights of an engine are compared with the policy's.

A fingerprint of a matrix W, [rows, columns], is u_k^T W v_k for DIRECTIONS fixed pairs of normal random vectors, and
|W|^2. The mean of (u_k^T D v_k)^2 is |D|^2 for any matrix D (Frobenius norm), so the fingerprints of two matrices give
the norm of their difference relative to the norm of either, whatever the layouts that they are stored in. It sees a
changed element, exchanged rows, a stale scale and another sign; where both sides hold equal numbers, it is 0 up to the
rounding of float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache

import torch
from torch import Tensor

from megatron_grpo.models.weight_layouts import Destination, RankShard, find_destinations
from megatron_grpo.models.weight_map import ModelMap, iter_entries

DIRECTIONS = 8
PROBES = 4  # random inputs of an expert
# Most elements of a matrix that are converted to float64 at a time.
_ELEMENTS = 1 << 24
_SEEDS = {"rows": 1, "columns": 2, "probes": 3}

Fingerprint = list[float]
"""DIRECTIONS projections and the squared norm; from an engine also the largest difference that rounding explains."""


class Sketch:
    """Fingerprint of a matrix of `rows` rows, whose columns are added block by block."""

    def __init__(self, rows: int) -> None:
        self._rows, self._columns = rows, 0
        self._sums: Tensor | None = None

    def add(self, block: Tensor) -> None:
        """Add the next columns, [rows, columns], of any float type."""
        values, width = block.double(), block.shape[1]
        row_vectors = _draw_vectors("rows", self._rows, values.device)
        column_vectors = _draw_vectors("columns", -(-(self._columns + width) // 1024) * 1024, values.device)
        columns = column_vectors[:, self._columns : self._columns + width]
        projected = ((row_vectors @ values) * columns).sum(dim=1)
        sums = torch.cat([projected, values.square().sum()[None]])
        self._sums = sums if self._sums is None else self._sums + sums
        self._columns += width

    def compute(self) -> Fingerprint:
        """Compute the fingerprint so far; NaN becomes the largest float."""
        assert self._sums is not None, "a matrix has columns"
        return list(torch.nan_to_num(self._sums, nan=torch.finfo(torch.float64).max).tolist())


def compute_fingerprint(matrix: Tensor) -> Fingerprint:
    """Compute the fingerprint of a matrix, [rows, columns], or of a vector, [rows]."""
    matrix = matrix if matrix.dim() == 2 else matrix[:, None]
    sketch = Sketch(len(matrix))
    for block in matrix.split(max(_ELEMENTS // max(len(matrix), 1), 1), dim=1):
        sketch.add(block)
    return sketch.compute()


def measure_difference(expected: Fingerprint, actual: Fingerprint) -> float:
    """Estimate |expected - actual| / |expected|; inf if only `expected` is zero."""
    distance = math.dist(expected[:DIRECTIONS], actual[:DIRECTIONS]) / math.sqrt(DIRECTIONS)
    norm = math.sqrt(expected[DIRECTIONS])
    if norm == 0:
        return math.inf if distance or actual[DIRECTIONS] else 0.0
    return distance / norm


def find_differing(
    expected: Mapping[str, Fingerprint], actual: Mapping[str, Fingerprint], rounding: float = 0.0
) -> dict[str, float]:
    """Find the tensors and experts whose difference, relative to the norm, rounding does not explain.

    `expected` are the policy's, cut as one worker keeps them. `rounding` explains other dtypes of the two sides.
    """
    errors = {name: measure_difference(expected[name.partition(" ")[0]], values) for name, values in actual.items()}
    # "not <=", so that NaN counts as a difference.
    return {name: error for name, error in errors.items() if not error <= actual[name][DIRECTIONS + 1] + rounding}


def list_kept_parts(model_map: ModelMap, shard: RankShard) -> Iterator[Destination]:
    """List the parts of Hugging Face tensors that an engine's rank keeps."""
    shape = model_map.shape
    for entry, layer, _ in iter_entries(model_map.entries, shape, list(range(shape.layers))):
        if not entry.copy and shard.keeps(entry, layer):
            for expert in range(*shard.experts) if entry.per_expert else [0]:
                yield from find_destinations(entry, shape, shard, layer, expert)


def name_expert(tensor: str) -> str:
    """Name the expert that has a tensor: "model.layers.0.mlp.experts.3"."""
    return tensor.rsplit(".", 2)[0]


@cache
def draw_probes(hidden: int, device: torch.device) -> Tensor:
    """Draw the inputs of experts: [PROBES, hidden], float32, exact in bfloat16."""
    return _draw_vectors("probes", hidden, torch.device("cpu"))[:PROBES].bfloat16().float().to(device)


@cache
def _draw_vectors(kind: str, size: int, device: torch.device) -> Tensor:
    """Draw [DIRECTIONS, size], float64: the same in every process, and for larger sizes."""
    generator = torch.Generator().manual_seed(_SEEDS[kind])
    return torch.randn(size, DIRECTIONS, dtype=torch.float64, generator=generator).T.contiguous().to(device)
