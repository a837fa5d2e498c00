"""Fingerprints of weights, by which the weights of an engine are compared with the policy's.

A fingerprint of a matrix W, [rows, columns], is u_k^T W v_k for DIRECTIONS fixed pairs of normal random vectors, and
|W|^2. The mean of (u_k^T D v_k)^2 is |D|^2 for any matrix D (Frobenius norm), so the fingerprints of two matrices give
the norm of their difference relative to the norm of either, whatever the layouts that they are stored in. It sees a
changed element, exchanged rows, a stale scale and another sign; where both sides hold equal numbers, it is 0 up to the
rounding of float64.

vLLM repacks, pads, shuffles and quantises weights in ways that differ by kernel, device and release, so an engine's
parameters are not read but *used*: a linear layer is applied to the unit vectors, which gives the columns of the matrix
that its kernel multiplies by. In an exact dtype these are the very numbers, since every other product is 0. Experts
have a nonlinearity between their matrices, so an expert is applied to PROBES random vectors, and the fingerprint is
that of its outputs. Embeddings, norms and biases are read.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import Destination, RankShard, find_destinations
from megatron_grpo.models.weight_map import ModelMap, iter_entries

logger = logging.getLogger(__name__)

DIRECTIONS = 8
PROBES = 4  # random inputs of an expert
# Most elements of a matrix that are converted to float64 at a time.
_ELEMENTS = 1 << 24
_SEEDS = {"rows": 1, "columns": 2, "probes": 3}
# Columns of a linear layer's matrix that are computed at a time.
_COLUMNS = 256

# Largest differences, relative to the norm, that rounding explains:
# Both sides hold the same numbers. One element of 10^8 in bfloat16 that is off by its last bit is 4e-7.
EXACT_TOLERANCE = 1e-8
# Outputs of an expert: a few roundings of intermediate values, each of 2^-24, 2^-11 or 2^-9.
OUTPUT_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# E4M3 has three bits behind the first, so rounding to it moves numbers by 2.6% (root mean square), and INT8 by less;
# FP4 moves them by 10%.
QUANTISED_TOLERANCE = 0.12
# Experts with quantised weights, whose inputs and intermediate values are rounded too.
QUANTISED_OUTPUT_TOLERANCE = 0.25

# DIRECTIONS projections and the squared norm; from an engine also the largest difference that rounding explains.
Fingerprint = list[float]


class Sketch:
    """Fingerprint of a matrix whose columns are added block by block."""

    def __init__(self, rows: int) -> None:
        self._rows, self._columns = rows, 0
        self._sums: Tensor | None = None

    def add(self, block: Tensor) -> None:
        """Add the next columns, [rows, columns], of any float type."""
        values, width = block.double(), block.shape[1]
        row_vectors = _draw_vectors("rows", self._rows, values.device)
        # Rounded up, so that few sizes are drawn and cached; longer vectors begin with the shorter ones.
        size = -(-(self._columns + width) // 1024) * 1024
        column_vectors = _draw_vectors("columns", size, values.device)
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
    """Find the relative differences, by name, that rounding does not explain.

    `expected` are the policy's, cut as one worker keeps them; `actual` are that worker's, with tolerances. `rounding`
    is added to these if the two sides have different dtypes.
    """
    # Engines add derived matrices, "NAME in attention", which must equal the tensor NAME.
    errors = {name: measure_difference(expected[name.partition(" ")[0]], values) for name, values in actual.items()}
    # "not <=", so that NaN counts as a difference.
    return {name: error for name, error in errors.items() if not error <= actual[name][DIRECTIONS + 1] + rounding}


def list_kept_parts(model_map: ModelMap, shard: RankShard) -> Iterator[Destination]:
    """List the parts of tensors that an engine's rank keeps."""
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
    """Draw [DIRECTIONS, size], float64, equal everywhere; larger sizes begin with these."""
    generator = torch.Generator().manual_seed(_SEEDS[kind])
    return torch.randn(size, DIRECTIONS, dtype=torch.float64, generator=generator).T.contiguous().to(device)


@torch.no_grad()
def fingerprint_engine(
    model: nn.Module, dtype: torch.dtype, model_map: ModelMap, shard: RankShard
) -> dict[str, Fingerprint]:
    """Compute fingerprints of the weights in a worker's kernels.

    They are by the name of a Hugging Face tensor, or of an expert ("model.layers.0.mlp.experts.3"). The matrix that
    latent attention derives from a tensor has the tensor's name plus " in attention". vLLM's configuration has to be
    set (`set_current_vllm_config`); `dtype` is that of the model's activations.
    """
    fingerprints: dict[str, Fingerprint] = {}
    parts_by_module: defaultdict[str, list[Destination]] = defaultdict(list)
    for part in list_kept_parts(model_map, shard):
        parts_by_module[part.parameter.rpartition(".")[0]].append(part)
    layers: dict[str, Any] = dict(model.named_modules())
    for module, parts in parts_by_module.items():
        if module not in layers:  # broadcast and files load models whose layers our table of parameters does not know
            logger.warning("%s is not compared with the policy: vLLM's model has no such layer", module)
        elif parts[0].expert is not None:
            fingerprints |= _fingerprint_experts(module, layers[module], parts, dtype, model_map.shape, shard)
        else:
            fingerprints |= _fingerprint_layer(layers[module], parts, dtype)
    for name, attention in layers.items():
        if isinstance(getattr(attention, "W_UV", None), Tensor):
            origin = f"{name.split('.self_attn')[0]}.self_attn.kv_b_proj.weight"
            # The projection from latent vectors that decoding uses, in the order of kv_b_proj:
            # [heads * (length of a key's plain part + length of a value), rank].
            absorbed = torch.cat([attention.W_UK_T, attention.W_UV.transpose(1, 2)], dim=1).flatten(0, 1)
            fingerprints[f"{origin} in attention"] = [*compute_fingerprint(absorbed), fingerprints[origin][-1]]
    return fingerprints


def _fingerprint_layer(layer: Any, parts: Sequence[Destination], dtype: torch.dtype) -> dict[str, Fingerprint]:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    fingerprints, matrix_parts = {}, []
    for part in parts:
        parameter = part.parameter.rpartition(".")[2]
        if parameter == "weight" and isinstance(layer, LinearBase | ParallelLMHead):
            matrix_parts.append(part)
        else:
            rows = slice(part.row, part.row + part.part.local_shape[0])
            fingerprints[part.part.name] = [*compute_fingerprint(getattr(layer, parameter).data[rows]), EXACT_TOLERANCE]
    if not matrix_parts:
        return fingerprints
    is_exact = isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    limit = EXACT_TOLERANCE if is_exact else QUANTISED_TOLERANCE
    sketches = {part.part.name: Sketch(part.part.local_shape[0]) for part in matrix_parts}
    inputs, device = matrix_parts[0].part.local_shape[1], next(layer.parameters()).device
    for begin in range(0, inputs, _COLUMNS):
        width = min(_COLUMNS, inputs - begin)
        unit_vectors = torch.zeros(width, inputs, dtype=getattr(layer, "params_dtype", dtype), device=device)
        unit_vectors[:, begin:].fill_diagonal_(1.0)
        columns = layer.quant_method.apply(layer, unit_vectors).T
        for part in matrix_parts:
            sketches[part.part.name].add(columns[part.row : part.row + part.part.local_shape[0]])
    return fingerprints | {name: [*sketch.compute(), limit] for name, sketch in sketches.items()}


def _fingerprint_experts(
    module: str, layer: Any, parts: Sequence[Destination], dtype: torch.dtype, shape: ModelShape, shard: RankShard
) -> dict[str, Fingerprint]:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = layer.quant_method
    if method.is_monolithic:
        logger.warning("%s is not compared with the policy: vLLM's kernel for it chooses the experts itself", module)
        return {}
    names = dict.fromkeys(name_expert(part.part.name) for part in parts)
    limit = OUTPUT_TOLERANCES[dtype] if isinstance(method, UnquantizedFusedMoEMethod) else QUANTISED_OUTPUT_TOLERANCE
    device = next(layer.parameters()).device
    inputs = functional.pad(draw_probes(shape.hidden, device), (0, layer.hidden_size - shape.hidden)).to(dtype)
    fingerprints = {}
    for expert, name in enumerate(names, start=shard.experts[0]):
        # The expert gets all inputs with a weight of 1; a token's other choices are other experts with a weight of 0.
        chosen = (torch.arange(layer.top_k, device=device) + expert) % layer.global_num_experts
        chosen = chosen.to(method.topk_indices_dtype or torch.int32).expand(PROBES, -1).contiguous()
        weights = torch.zeros(PROBES, layer.top_k, device=device)
        weights[:, 0] = 1.0
        routing = {"topk_weights": weights, "topk_ids": chosen, "shared_experts": None, "shared_experts_input": None}
        outputs = method.apply(layer=layer, x=inputs.clone(), **routing)
        fingerprints[name] = [*compute_fingerprint(outputs[:, : shape.hidden]), limit]
    return fingerprints
