"""Runs in an engine's worker: fingerprints of its weights as vLLM's kernels use them.

vLLM repacks, pads, shuffles and quantises weights in ways that differ by kernel, device and release, so its parameters
are not read but *used*: a linear layer is applied to the unit vectors, which gives the columns of the matrix that its
kernel multiplies by. In an exact dtype these are the very numbers, since every other product is 0. Experts have a
nonlinearity between their matrices, so an expert is applied to PROBES random vectors, and the fingerprint is that of
its outputs. Embeddings, norms and biases are read.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import Destination, RankShard
from megatron_grpo.models.weight_map import ModelMap
from megatron_grpo.weight_sync.fingerprints import (
    PROBES,
    Fingerprint,
    Sketch,
    compute_fingerprint,
    draw_probes,
    list_kept_parts,
    name_expert,
)

logger = logging.getLogger(__name__)

# Largest differences, relative to the norm, that rounding explains.
# Both sides hold the same numbers. One element of 10^8 in bfloat16 that is off by its last bit is 4e-7.
EXACT = 1e-8
# Outputs of an expert: a few roundings of intermediate values, each of 2^-24, 2^-11 or 2^-9.
OF_OUTPUTS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# E4M3 has three bits behind the first, so rounding to it moves numbers by 2.6% (root mean square), and INT8 by less;
# FP4 moves them by 10%.
QUANTISED = 0.12
# Experts with quantised weights, whose inputs and intermediate values are rounded too.
QUANTISED_OUTPUTS = 0.25

# Columns of a linear layer's matrix that are computed at a time.
_COLUMNS = 256


@torch.no_grad()
def fingerprint_engine(
    model: nn.Module, dtype: torch.dtype, model_map: ModelMap, shard: RankShard
) -> dict[str, Fingerprint]:
    """Compute fingerprints of the weights that the kernels of one worker use.

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

    fingerprints, multiplied = {}, []
    for part in parts:
        parameter = part.parameter.rpartition(".")[2]
        if parameter == "weight" and isinstance(layer, LinearBase | ParallelLMHead):
            multiplied.append(part)
        else:
            rows = slice(part.row, part.row + part.part.local_shape[0])
            fingerprints[part.part.name] = [*compute_fingerprint(getattr(layer, parameter).data[rows]), EXACT]
    if not multiplied:
        return fingerprints
    is_exact = isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    limit = EXACT if is_exact else QUANTISED
    sketches = {part.part.name: Sketch(part.part.local_shape[0]) for part in multiplied}
    inputs, device = multiplied[0].part.local_shape[1], next(layer.parameters()).device
    for begin in range(0, inputs, _COLUMNS):
        width = min(_COLUMNS, inputs - begin)
        units = torch.zeros(width, inputs, dtype=getattr(layer, "params_dtype", dtype), device=device)
        units[:, begin:].fill_diagonal_(1.0)
        columns = layer.quant_method.apply(layer, units).T
        for part in multiplied:
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
    limit = OF_OUTPUTS[dtype] if isinstance(method, UnquantizedFusedMoEMethod) else QUANTISED_OUTPUTS
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
