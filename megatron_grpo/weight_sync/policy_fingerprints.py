"""Runs on a rank of the policy: fingerprints of its weights, cut as the ranks of an engine keep them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from megatron_grpo.models.families import build_model_map
from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.models.weight_layouts import Destination, RankShard
from megatron_grpo.models.weight_map import WeightSlice
from megatron_grpo.weight_sync.fingerprints import (
    Fingerprint,
    compute_fingerprint,
    draw_probes,
    list_kept_parts,
    name_expert,
)

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


@torch.no_grad()
def fingerprint_policy(rank: PolicyRank, engine: Sequence[RankShard]) -> list[dict[str, Fingerprint]]:
    """Compute fingerprints of this stage's weights; collective over the stage.

    Returns:
        For each rank of the engine, fingerprints by the names of `fingerprint_engine`; empty except on the first rank
        of the stage.
    """
    model_map = build_model_map(rank.shape)
    parts_by_tensor: defaultdict[str, list[tuple[int, Destination]]] = defaultdict(list)
    for engine_rank, shard in enumerate(engine):
        for part in list_kept_parts(model_map, shard):
            parts_by_tensor[part.part.name].append((engine_rank, part))
    experts = _ExpertOutputs(rank.shape.hidden, _ACTIVATIONS[rank.shape.activation])
    fingerprints: list[dict[str, Fingerprint]] = [{} for _ in engine]
    for name, tensor in iter_hf_tensors(rank.gather_chunks(), rank.shape):
        if tensor is None:
            continue
        by_bounds: dict[tuple[int, int], Fingerprint | None] = {}
        for engine_rank, part in parts_by_tensor[name]:
            is_expert, bounds = part.expert is not None, (part.part.start, part.part.stop)
            if bounds not in by_bounds:  # several ranks may keep the same part
                values = _cut_tensor(tensor, part.part)
                by_bounds[bounds] = experts.add(part, values) if is_expert else compute_fingerprint(values)
            fingerprint = by_bounds[bounds]
            if fingerprint is not None:
                fingerprints[engine_rank][name_expert(name) if is_expert else name] = fingerprint
    return fingerprints


def _cut_tensor(tensor: Tensor, part: WeightSlice) -> Tensor:
    return tensor if part.axis is None else tensor.narrow(part.axis, part.start, part.stop - part.start)


class _ExpertOutputs:
    """Outputs of experts, whose tensors come one at a time: gate, up, then down."""

    def __init__(self, hidden: int, activation: Callable[[Tensor], Tensor]) -> None:
        self._hidden, self._activation = hidden, activation
        self._values: dict[tuple[str, int], Tensor] = {}
        """[PROBES, width of the part], float32, by expert and begin of the part: the gate, then the gated values."""

    def add(self, part: Destination, values: Tensor) -> Fingerprint | None:
        """Add a part of a tensor; an expert's last one completes its fingerprint."""
        key, weight = (name_expert(part.part.name), part.part.start), values.float()
        if not part.parameter.endswith(".w13_weight"):
            return compute_fingerprint(self._values.pop(key) @ weight.T)
        projected = draw_probes(self._hidden, values.device) @ weight.T
        self._values[key] = self._values[key] * projected if key in self._values else self._activation(projected)
        return None
