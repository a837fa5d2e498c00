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
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_grpo.weight_sync.boxes import Box, Range, to_slices

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

# Ends the name of a matrix that latent attention derives from a tensor.
_IN_ATTENTION = " in attention"

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


def compute_fingerprint(values: Tensor) -> Fingerprint:
    """Compute the fingerprint of a matrix, [..., columns], or of a vector, [rows]."""
    matrix = values[:, None] if values.dim() == 1 else values.reshape(-1, values.shape[-1])
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
    # Engines add derived matrices, which must equal the tensor.
    errors = {
        name: measure_difference(expected[name.removesuffix(_IN_ATTENTION)], values) for name, values in actual.items()
    }
    # "not <=", so that NaN counts as a difference.
    return {name: error for name, error in errors.items() if not error <= actual[name][DIRECTIONS + 1] + rounding}


def name_boxes(boxes: Sequence[Box]) -> Iterator[tuple[str, Box]]:
    """Name the boxes of a rank for fingerprints.

    The name is that of the tensor, with the indices if it has several boxes. Boxes of experts have the name of the
    expert ("model.layers.0.mlp.experts.3"); a box of several experts is split.
    """
    counts = Counter(box.tensor for box in boxes)
    for box in boxes:
        if is_expert(box):
            yield from _split_experts(box)
        elif box.tensor:
            spans = [f"{indices.begin}:{indices.end}:{indices.step}" for indices in box.layout.tensor]
            yield box.tensor + (f" [{', '.join(spans)}]" if counts[box.tensor] > 1 else ""), box


def _split_experts(box: Box) -> Iterator[tuple[str, Box]]:
    # The first dimension of the parameter counts the rank's experts, and so may a dimension of the tensor.
    axis = box.layout.order[0]
    if axis < 0:  # the tensor of one expert, such as "experts.3.up_proj.weight", or one expert of a packed tensor
        packed = set(range(len(box.layout.tensor))).difference(box.layout.order)
        numbers = [box.layout.tensor[axis].begin for axis in packed]
        yield f"{box.tensor.rpartition('.')[0]}.{numbers[0]}" if numbers else box.tensor.rsplit(".", 2)[0], box
        return
    for index in range(box.layout.parameter[0].size):
        ranges = box.layout.tensor[axis], box.layout.parameter[0]
        expert, local = (indices.begin + index * indices.step for indices in ranges)
        tensor = (*box.layout.tensor[:axis], Range(expert, expert + 1), *box.layout.tensor[axis + 1 :])
        cut = box.layout._replace(tensor=tensor, parameter=(Range(local, local + 1), *box.layout.parameter[1:]))
        yield f"{box.tensor.rpartition('.')[0]}.{expert}", box._replace(layout=cut)


def is_expert(box: Box) -> bool:
    """True for matrices and biases of experts, which are compared by their experts' outputs."""
    return box.parameter.endswith((".w13_weight", ".w2_weight", ".w13_bias", ".w2_bias")) and bool(box.tensor)


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
def fingerprint_engine(model: nn.Module, dtype: torch.dtype, boxes: Sequence[Box]) -> dict[str, Fingerprint]:
    """Compute fingerprints of the weights in a worker's kernels, by the names of `name_boxes`.

    The matrix that latent attention derives from a tensor has the tensor's name plus " in attention". vLLM's
    configuration has to be set (`set_current_vllm_config`); `dtype` is that of the model's activations.
    """
    fingerprints: dict[str, Fingerprint] = {}
    by_module: defaultdict[str, dict[str, Box]] = defaultdict(dict)
    for name, box in name_boxes(boxes):
        by_module[box.parameter.rpartition(".")[0]][name] = box
    layers: dict[str, Any] = dict(model.named_modules())
    for module, named in by_module.items():
        if is_expert(next(iter(named.values()))):
            fingerprints |= _fingerprint_experts(module, layers[module], named, dtype)
        else:
            fingerprints |= _fingerprint_layer(layers[module], named, dtype)
    for name, attention in layers.items():
        if isinstance(getattr(attention, "W_UV", None), Tensor):
            origin = f"{name.split('.self_attn')[0]}.self_attn.kv_b_proj.weight"
            # The projection from latent vectors that decoding uses, in the order of kv_b_proj:
            # [heads * (length of a key's plain part + length of a value), rank].
            absorbed = torch.cat([attention.W_UK_T, attention.W_UV.transpose(1, 2)], dim=1).flatten(0, 1)
            fingerprints[f"{origin}{_IN_ATTENTION}"] = [*compute_fingerprint(absorbed), fingerprints[origin][-1]]
    return fingerprints


def _fingerprint_layer(layer: Any, boxes: Mapping[str, Box], dtype: torch.dtype) -> dict[str, Fingerprint]:
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    fingerprints, regions = {}, {}
    for name, box in boxes.items():
        parameter = box.parameter.rpartition(".")[2]
        # vLLM keeps the kernels of a convolution, [channels, 1, kernel], in a linear layer that it never applies.
        is_matrix = len(box.layout.parameter) == 2
        if is_matrix and parameter == "weight" and isinstance(layer, LinearBase | ParallelLMHead):
            regions[name] = box.layout.parameter
        else:
            values = _read_parameter(layer, parameter)[to_slices(box.layout.parameter)]
            fingerprints[name] = [*compute_fingerprint(values), EXACT_TOLERANCE]
    if not regions:
        return fingerprints
    is_exact = isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    limit = EXACT_TOLERANCE if is_exact else QUANTISED_TOLERANCE
    sketches = {name: Sketch(rows.size) for name, (rows, _) in regions.items()}
    inputs, device = max(columns.end for _, columns in regions.values()), next(layer.parameters()).device
    for begin in range(0, inputs, _COLUMNS):
        width = min(_COLUMNS, inputs - begin)
        unit_vectors = torch.zeros(width, inputs, dtype=getattr(layer, "params_dtype", dtype), device=device)
        unit_vectors[:, begin:].fill_diagonal_(1.0)
        outputs = layer.quant_method.apply(layer, unit_vectors).T
        for name, (rows, columns) in regions.items():
            common = columns.find_overlap(Range(begin, begin + width))
            if common is not None:
                indices = slice(common.begin - begin, common.end - begin, common.step)
                sketches[name].add(outputs[slice(*rows), indices])
    return fingerprints | {name: [*sketch.compute(), limit] for name, sketch in sketches.items()}


def _read_parameter(layer: Any, parameter: str) -> Tensor:
    """Read a parameter in the order in which vLLM loads it."""
    loaded = getattr(layer, "_cpu_unpacked_conv_weight", None)
    if parameter != "weight" or loaded is None:
        return getattr(layer, parameter).data
    # On CPUs with products in bfloat16 the kernels of a convolution are packed, and vLLM keeps the loaded ones beside.
    from vllm._custom_ops import causal_conv1d_weight_pack

    is_used = torch.equal(causal_conv1d_weight_pack(loaded), layer.weight)
    return (loaded if is_used else torch.full_like(loaded, torch.nan))[:, None]


def _fingerprint_experts(
    module: str, layer: Any, experts: Mapping[str, Box], dtype: torch.dtype
) -> dict[str, Fingerprint]:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = layer.quant_method
    if method.is_monolithic:
        logger.warning("%s is not compared with the policy: vLLM's kernel for it chooses the experts itself", module)
        return {}
    limit = OUTPUT_TOLERANCES[dtype] if isinstance(method, UnquantizedFusedMoEMethod) else QUANTISED_OUTPUT_TOLERANCE
    device = next(layer.parameters()).device
    hidden, fingerprints = (
        next(iter(experts.values())).layout.parameter[1].end,
        {},
    )  # of a down projection, the last one
    inputs = functional.pad(draw_probes(hidden, device), (0, layer.hidden_size - hidden)).to(dtype)
    for name in experts:
        expert = int(name.rpartition(".")[2])
        # The expert gets all inputs with a weight of 1; a token's other choices are other experts with a weight of 0.
        chosen = (torch.arange(layer.top_k, device=device) + expert) % layer.global_num_experts
        chosen = chosen.to(method.topk_indices_dtype or torch.int32).expand(PROBES, -1).contiguous()
        weights = torch.zeros(PROBES, layer.top_k, device=device)
        weights[:, 0] = 1.0
        routing = {"topk_weights": weights, "topk_ids": chosen, "shared_experts": None, "shared_experts_input": None}
        outputs = method.apply(layer=layer, x=inputs.clone(), **routing)
        fingerprints[name] = [*compute_fingerprint(outputs[:, :hidden]), limit]
    return fingerprints
