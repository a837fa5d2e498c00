"""Defects of engines and of the policy's ranks, planted into the real code by `sitecustomize`.

Engines receive right weights in the first refits, which all checks of a run follow, and wrong ones after these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor

from megatron_grpo.models.megatron_names import iterate_layers

RIGHT_REFITS = 3
"""Refits that are received as they are sent."""

Spoil = Callable[[Any, Any, Tensor, Tensor | None], tuple[Any, Tensor]]
"""Region, values and the values before of a piece of a weight, to what is written: region and values. The first
argument is the writer."""


def _times(factor: float, module: str) -> Spoil:
    def spoil(_: Any, to: Any, values: Tensor, before: Tensor | None) -> tuple[Any, Tensor]:
        return to, factor * values if to.module.endswith(module) and to.name == "weight" else values

    return spoil


def _make_spoil(*parts: str) -> Spoil:
    """Modules, by parts of their names, that keep the weights of the refit before."""

    def spoil(_: Any, to: Any, values: Tensor, before: Tensor | None) -> tuple[Any, Tensor]:
        return to, before if before is not None and any(part in to.module for part in parts) else values

    return spoil


def _keys_and_values(writer: Any, to: Any, values: Tensor, _: Tensor | None) -> tuple[Any, Tensor]:
    """Layer 1 holds keys where values belong."""
    if not to.module.endswith("layers.1.self_attn.qkv_proj") or to.name != "weight":
        return to, values
    layer = writer._layers[to.module]
    queries, keys = layer.num_heads * layer.head_size, layer.num_kv_heads * layer.head_size
    rows = to.ranges[0]
    if rows.begin < queries:
        return to, values
    shift = keys if rows.begin < queries + keys else -keys
    moved = rows._replace(begin=rows.begin + shift, end=rows.end + shift)
    return to._replace(ranges=(moved, *to.ranges[1:])), values


def _heads(writer: Any, to: Any, values: Tensor, _: Tensor | None) -> tuple[Any, Tensor]:
    """The query heads of layer 0 are in another order."""
    if not to.module.endswith("layers.0.self_attn.qkv_proj") or to.ranges[0].begin != 0:
        return to, values
    return to, values.roll(writer._layers[to.module].head_size, 0)


def _rows(_: Any, to: Any, values: Tensor, __: Tensor | None) -> tuple[Any, Tensor]:
    """Rows 3 and 17 of a matrix of layer 1 are in each other's place."""
    if not to.module.endswith("layers.1.mlp.down_proj") or to.ranges[0].begin != 0:
        return to, values
    order = list(range(len(values)))
    order[3], order[17] = 17, 3
    return to, values[order]


def _experts(_: Any, to: Any, values: Tensor, __: Tensor | None) -> tuple[Any, Tensor]:
    """Experts 0 and 1 of layer 1 are in each other's place."""
    slot, *parts = to.ranges
    is_moved = ".layers.1." in to.module and to.name in ("w13_weight", "w2_weight") and slot.begin in (0, 1)
    exchanged = slot._replace(begin=1 - slot.begin, end=2 - slot.begin)
    return (to._replace(ranges=(exchanged, *parts)) if is_moved else to), values


WRITERS: dict[str, Spoil] = {
    "matrix_off": _times(1.05, "layers.1.mlp.down_proj"),
    "stale_norm": _make_spoil("model.norm"),
    "stale_embedding": _make_spoil("embed_tokens", "lm_head"),
    "stale_layer": _make_spoil(".layers.1."),
    "stale_stage": _make_spoil(".layers.2.", ".layers.3.", "model.norm", "lm_head"),
    "stale_engine": _make_spoil(""),
    "keys_and_values": _keys_and_values,
    "heads_permuted": _heads,
    "experts_exchanged": _experts,
    "rows_exchanged": _rows,
}


def spoil_writer(module: ModuleType, defect: str) -> None:
    """The engine's worker writes something else than it receives."""
    if defect not in WRITERS:
        return
    spoil, begin, write = WRITERS[defect], module.ModelWriter.begin, module.ModelWriter.write

    def begin_counted(self: Any) -> None:
        vars(self)["refits"] = vars(self).get("refits", 0) + 1
        vars(self).setdefault("previous", {})
        begin(self)

    def write_spoiled(self: Any, message: int, position: int, values: Tensor, scales: Tensor | None = None) -> None:
        regions, previous = self._messages[message], self.previous
        to, before = regions[position], previous.get((message, position))
        if self.refits > RIGHT_REFITS:
            regions[position], written = spoil(self, to, values, before)
        else:
            written = values
        previous[message, position] = values.clone()
        write(self, message, position, written, scales)
        regions[position] = to

    module.ModelWriter.begin, module.ModelWriter.write = begin_counted, write_spoiled


def spoil_sender(module: ModuleType, defect: str) -> None:
    """The policy sends its weights without its adapters."""
    if defect != "adapters_missing":
        return
    bound, calls = module.bind_entries, []

    def bare(*arguments: Any) -> list[Any]:
        calls.append(1)
        entries = list(bound(*arguments))
        return entries if len(calls) <= RIGHT_REFITS else [replace(entry, adapted=None) for entry in entries]

    vars(module)["bind_entries"] = bare


def spoil_packing(module: ModuleType, defect: str) -> None:
    """Packed sequences of the policy see those before them."""
    if defect != "leak":
        return
    calls = module.build_attention_calls

    def leaking(layout: Any, window: int | None, move: Any) -> Any:
        joined = replace(layout, widths=np.array([layout.widths.sum()]), lengths=np.array([layout.widths.sum()]))
        return calls(joined, window, move)

    vars(module)["build_attention_calls"] = leaking


def spoil_rank(module: ModuleType, defect: str) -> None:
    """A rank of the policy computes something else than its weights say."""
    if defect == "vocabulary_shards":
        vars(module)["linear_logprobs"] = partial(_other_shard, module.linear_logprobs)
    if defect in ("stage_off", "replica_off", "no_temperature"):
        build = module.PolicyRank.__init__

        def build_spoiled(self: Any, settings: Any, *arguments: Any, **named: Any) -> None:
            if defect == "no_temperature":
                settings = replace(settings, temperature=1.0)
            build(self, settings, *arguments, **named)
            state = module.parallel_state
            is_spoiled = {
                "stage_off": state.get_pipeline_model_parallel_rank() > 0,
                "replica_off": state.get_data_parallel_rank() > 0,
            }
            if is_spoiled.get(defect):
                layers = (layer for _, halves, layer in iterate_layers(self.chunks[0]) if "mlp" in halves)
                next(layers).mlp.register_forward_hook(_weaker)

        module.PolicyRank.__init__ = build_spoiled


def _other_shard(logprobs: Any, *operands: Any, **part: Any) -> Any:
    """Log-probabilities as if the rank held the other one's part of the vocabulary."""
    if part["group"] is not None:
        other_rank = part["group"].size() - 1 - part["group"].rank()
        part["start"] = other_rank * len(operands[1])
    return logprobs(*operands, **part)


def _weaker(_module: Any, _inputs: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (0.9 * output[0], *output[1:])
    return 0.9 * output


def spoil_requests(module: ModuleType, defect: str) -> None:
    """Engines are asked for other sampling than the configuration says."""
    changes: dict[str, dict[str, float]] = {
        "top_p": {"top_p": 0.7},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "one_seed": {"seed": 1},
    }
    if defect not in changes:
        return
    arguments = module.make_sampling_arguments
    vars(module)["make_sampling_arguments"] = lambda *requests: {**arguments(*requests), **changes[defect]}
