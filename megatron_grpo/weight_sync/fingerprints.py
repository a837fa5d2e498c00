"""Fingerprints of weights, by which an engine's weights, as its kernels hold them, are compared with the policy's.

A fingerprint of a matrix W, [rows, columns], is u_k^T W v_k for DIRECTIONS fixed pairs of normal random vectors, and
|W|^2. The mean of (u_k^T D v_k)^2 is |D|^2 for any matrix D (Frobenius norm), so the fingerprints of two matrices give
the norm of their difference relative to the norm of either, whatever the layouts that they are kept in. It sees a
changed element, exchanged rows, a stale scale and another sign; where both sides hold equal numbers, it is 0 up to the
rounding of float64.

vLLM repacks, pads, shuffles and quantises weights in ways that differ by kernel, device and release, so its parameters
are not read but *used*: a linear layer is applied to the unit vectors, which gives the columns of the matrix that its
kernel multiplies by. In an exact dtype these are the very numbers, since every other product is 0. Experts have a
nonlinearity between their matrices, so an expert is applied to PROBES random vectors, and the fingerprint is that of
its outputs. Embeddings, norms and biases are read.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import Destination, RankShard, find_destinations
from megatron_grpo.models.weight_map import WeightSlice, iter_entries

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank

logger = logging.getLogger(__name__)

DIRECTIONS = 8
PROBES = 4
"""Random inputs of an expert."""
_ELEMENTS = 1 << 24
"""Most elements of a matrix that are converted to float64 at a time."""
_SEEDS = {"rows": 1, "columns": 2, "probes": 3}

# Largest differences, relative to the norm, that rounding explains.
EXACT = 1e-8
"""Both sides hold the same numbers. One element of 10^8 in bfloat16 that is off by its last bit is 4e-7."""
OF_OUTPUTS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Outputs of an expert: a few roundings of intermediate values, each of 2^-24, 2^-11 or 2^-9."""
QUANTISED = 0.12
"""E4M3 has three bits behind the first, so rounding to it moves numbers by 2.6% (root mean square), and INT8 by less;
FP4 moves them by 10%."""
QUANTISED_OUTPUTS = 0.25
"""Experts with quantised weights, whose inputs and intermediate values are rounded too."""

Fingerprint = list[float]
"""DIRECTIONS projections and the squared norm; from an engine also the largest difference that rounding explains."""


class Sketch:
    """The fingerprint of a matrix of `rows` rows, whose columns are added block by block."""

    def __init__(self, rows: int) -> None:
        self._rows, self._columns = rows, 0
        self._sums: Tensor | None = None

    def add(self, block: Tensor) -> None:
        """Add the next columns, [rows, columns], of any float type."""
        values, width = block.double(), block.shape[1]
        left = _vectors("rows", self._rows, values.device)
        right = _vectors("columns", -(-(self._columns + width) // 1024) * 1024, values.device)
        projected = ((left @ values) * right[:, self._columns : self._columns + width]).sum(dim=1)
        sums = torch.cat([projected, values.square().sum()[None]])
        self._sums = sums if self._sums is None else self._sums + sums
        self._columns += width

    def fingerprint(self) -> Fingerprint:
        """[DIRECTIONS + 1] numbers of the columns so far; NaN and infinities become the largest floats."""
        assert self._sums is not None, "a matrix has columns"
        return list(torch.nan_to_num(self._sums, nan=torch.finfo(torch.float64).max).tolist())


def fingerprint(matrix: Tensor) -> Fingerprint:
    """The fingerprint of a matrix, [rows, columns], or of a vector, [rows], of any float type."""
    matrix = matrix if matrix.dim() == 2 else matrix[:, None]
    sketch = Sketch(len(matrix))
    for block in matrix.split(max(_ELEMENTS // max(len(matrix), 1), 1), dim=1):
        sketch.add(block)
    return sketch.fingerprint()


def difference(expected: Fingerprint, found: Fingerprint) -> float:
    """Estimate of |expected - found| / |expected|, Frobenius norms of two matrices; inf if only `expected` is zero."""
    distance = math.dist(expected[:DIRECTIONS], found[:DIRECTIONS]) / math.sqrt(DIRECTIONS)
    norm = math.sqrt(expected[DIRECTIONS])
    if norm == 0:
        return math.inf if distance or found[DIRECTIONS] else 0.0
    return distance / norm


def differing(
    expected: Mapping[str, Fingerprint], found: Mapping[str, Fingerprint], rounding: float = 0.0
) -> dict[str, float]:
    """Names of the tensors and experts that rounding does not explain, with the relative norm of their difference.

    Args:
        expected: fingerprints of the policy's weights, cut as one worker of an engine keeps them.
        found: fingerprints of that worker's.
        rounding: difference that is explained by other dtypes of the two sides.
    """
    errors = {name: difference(expected[name.partition(" ")[0]], one) for name, one in found.items()}
    return {name: error for name, error in errors.items() if not error <= found[name][DIRECTIONS + 1] + rounding}


def kept_parts(shape: ModelShape, shard: RankShard) -> Iterator[Destination]:
    """Yield the parts of Hugging Face tensors that a rank of an engine keeps, in the order of the weight map."""
    for entry, layer, _ in iter_entries(build_weight_map(shape), shape, list(range(shape.layers))):
        if not entry.copy and shard.keeps(entry, layer):
            for expert in range(*shard.experts) if entry.per_expert else [0]:
                yield from find_destinations(entry, shape, shard, layer, expert)


def expert_name(tensor: str) -> str:
    """Name of the expert that has a tensor: "model.layers.0.mlp.experts.3"."""
    return tensor.rsplit(".", 2)[0]


# --- in an engine's worker ---


@torch.no_grad()
def engine_fingerprints(
    model: nn.Module, dtype: torch.dtype, shape: ModelShape, shard: RankShard
) -> dict[str, Fingerprint]:
    """Fingerprints of the weights that the kernels of one worker of vLLM use.

    Args:
        model: vLLM's model; its configuration has to be set (`set_current_vllm_config`).
        dtype: dtype of the model's activations.
        shape: sizes of the whole model.
        shard: the part of the model that the worker holds.

    Returns:
        By the name of a Hugging Face tensor, or of an expert ("model.layers.0.mlp.experts.3"). The matrix that latent
        attention derives from a tensor has the tensor's name plus " in attention".
    """
    found: dict[str, Fingerprint] = {}
    parts: defaultdict[str, list[Destination]] = defaultdict(list)
    for part in kept_parts(shape, shard):
        parts[part.parameter.rpartition(".")[0]].append(part)
    layers: dict[str, Any] = dict(model.named_modules())
    for module, held in parts.items():
        if module not in layers:  # broadcast and files load models whose layers our table of parameters does not know
            logger.warning("%s is not compared with the policy: vLLM's model has no such layer", module)
        elif held[0].expert is not None:
            found |= _experts(module, layers[module], held, dtype, shape, shard)
        else:
            found |= _layer(layers[module], held, dtype)
    for name, attention in layers.items():
        if isinstance(getattr(attention, "W_UV", None), Tensor):
            origin = f"{name.split('.self_attn')[0]}.self_attn.kv_b_proj.weight"
            found[f"{origin} in attention"] = [*fingerprint(_absorbed(attention)), found[origin][-1]]
    return found


def _layer(layer: Any, parts: Sequence[Destination], dtype: torch.dtype) -> dict[str, Fingerprint]:
    """Fingerprints of the tensors that a layer without experts keeps."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    found, used = {}, []
    for part in parts:
        last = part.parameter.rpartition(".")[2]
        if last == "weight" and isinstance(layer, LinearBase | ParallelLMHead):
            used.append(part)
        else:
            rows = slice(part.row, part.row + part.part.local_shape[0])
            found[part.part.name] = [*fingerprint(getattr(layer, last).data[rows]), EXACT]
    if not used:
        return found
    exact = isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    sketches = {part.part.name: Sketch(part.part.local_shape[0]) for part in used}
    for block in _columns(layer, used[0].part.local_shape[1], getattr(layer, "params_dtype", dtype)):
        for part in used:
            sketches[part.part.name].add(block[part.row : part.row + part.part.local_shape[0]])
    limit = EXACT if exact else QUANTISED
    return found | {name: [*sketch.fingerprint(), limit] for name, sketch in sketches.items()}


def _columns(layer: Any, inputs: int, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the columns of the matrix that a linear layer multiplies by, in blocks of [outputs, columns]."""
    device, width = next(layer.parameters()).device, 256
    for begin in range(0, inputs, width):
        units = torch.zeros(min(width, inputs - begin), inputs, dtype=dtype, device=device)
        units[:, begin:].fill_diagonal_(1.0)
        yield layer.quant_method.apply(layer, units).T


def _experts(
    module: str, layer: Any, parts: Sequence[Destination], dtype: torch.dtype, shape: ModelShape, shard: RankShard
) -> dict[str, Fingerprint]:
    """Fingerprints of the outputs of a layer's experts, each of which gets all PROBES inputs, with a weight of 1."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    method = layer.quant_method
    if method.is_monolithic:
        logger.warning("%s is not compared with the policy: vLLM's kernel for it chooses the experts itself", module)
        return {}
    names = dict.fromkeys(expert_name(part.part.name) for part in parts)
    limit = OF_OUTPUTS[dtype] if isinstance(method, UnquantizedFusedMoEMethod) else QUANTISED_OUTPUTS
    device = next(layer.parameters()).device
    inputs = functional.pad(probes(shape.hidden, device), (0, layer.hidden_size - shape.hidden)).to(dtype)
    found = {}
    for number, name in enumerate(names, start=shard.experts[0]):
        # The other choices of a token are other experts, which get a weight of 0.
        chosen = (torch.arange(layer.top_k, device=device) + number) % layer.global_num_experts
        chosen = chosen.to(method.topk_indices_dtype or torch.int32).expand(PROBES, -1).contiguous()
        weights = torch.zeros(PROBES, layer.top_k, device=device)
        weights[:, 0] = 1.0
        outputs = method.apply(
            layer=layer,
            x=inputs.clone(),
            topk_weights=weights,
            topk_ids=chosen,
            shared_experts=None,
            shared_experts_input=None,
        )
        found[name] = [*fingerprint(outputs[:, : shape.hidden]), limit]
    return found


def _absorbed(attention: Any) -> Tensor:
    """[heads * (length of a key's plain part + length of a value), rank]: the projection from latent vectors that
    decoding uses, in the order of kv_b_proj."""
    keys, values = attention.W_UK_T, attention.W_UV.transpose(1, 2)
    return torch.cat([keys, values], dim=1).flatten(0, 1)


# --- on a rank of the policy ---


@torch.no_grad()
def policy_fingerprints(rank: PolicyRank, engine: Sequence[RankShard]) -> list[dict[str, Fingerprint]]:
    """Fingerprints of this stage's weights, cut as the ranks of an engine keep them; collective over the stage.

    Args:
        rank: the rank's model.
        engine: shards of the ranks of one engine, in their order.

    Returns:
        For each rank of the engine, fingerprints by the names of `engine_fingerprints`; empty except on the first rank
        of the stage.
    """
    parts: defaultdict[str, list[tuple[int, Destination]]] = defaultdict(list)
    for number, shard in enumerate(engine):
        for part in kept_parts(rank.shape, shard):
            parts[part.part.name].append((number, part))
    activation = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}
    experts = _Experts(rank.shape.hidden, activation[rank.shape.activation])
    found: list[dict[str, Fingerprint]] = [{} for _ in engine]
    for name, tensor in iter_hf_tensors(rank.gather_chunks(), rank.shape):
        prints: dict[tuple[int, int], Fingerprint] = {}
        for number, part in parts[name] if tensor is not None else ():
            assert tensor is not None
            of_expert, bounds = part.expert is not None, (part.part.start, part.part.stop)
            if bounds not in prints:
                cut = _cut(tensor, part.part)
                prints[bounds] = experts.add(part, cut) if of_expert else fingerprint(cut)
            if prints[bounds]:
                found[number][expert_name(name) if of_expert else name] = prints[bounds]
    return found


def _cut(tensor: Tensor, part: WeightSlice) -> Tensor:
    """A part of a full tensor, [...]."""
    return tensor if part.axis is None else tensor.narrow(part.axis, part.start, part.stop - part.start)


class _Experts:
    """Computes the outputs of experts, whose tensors come one at a time: gate, up and, after those of others, down."""

    def __init__(self, hidden: int, activation: Any) -> None:
        self._hidden, self._activation = hidden, activation
        self._values: dict[tuple[str, int], Tensor] = {}
        """[PROBES, width of the part], float32, by expert and begin of the part: the gate, then the gated values."""

    def add(self, part: Destination, cut: Tensor) -> Fingerprint:
        """Add a part of a tensor; returns the fingerprint of the outputs with the last one of an expert, else []."""
        key, weight = (expert_name(part.part.name), part.part.start), cut.float()
        if not part.parameter.endswith(".w13_weight"):
            return fingerprint(self._values.pop(key) @ weight.T)
        values = probes(self._hidden, cut.device) @ weight.T
        self._values[key] = self._values[key] * values if key in self._values else self._activation(values)
        return []


@cache
def probes(hidden: int, device: torch.device) -> Tensor:
    """[PROBES, hidden], float32: the inputs of experts, exact in bfloat16."""
    drawn = _drawn("probes", hidden)[:PROBES]
    return drawn.bfloat16().float().to(device)


@cache
def _vectors(kind: str, size: int, device: torch.device) -> Tensor:
    """[DIRECTIONS, size], float64: one vector of each pair."""
    return _drawn(kind, size).to(device)


def _drawn(kind: str, size: int) -> Tensor:
    """[DIRECTIONS, size], float64, normal: the same in every process, and the beginning of a larger size's."""
    generator = torch.Generator().manual_seed(_SEEDS[kind])
    return torch.randn(size, DIRECTIONS, dtype=torch.float64, generator=generator).T.contiguous()
