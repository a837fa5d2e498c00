"""Runs on ranks of the policy: their side of the checks that follow a refit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.models.adapter_check import AdapterCheck, check_adapters
from megatron_grpo.models.families import build_model_map
from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.models.routed_experts import UNKNOWN, RoutedForm
from megatron_grpo.models.weight_layouts import Destination, RankShard
from megatron_grpo.weight_sync.fingerprints import (
    Fingerprint,
    compute_fingerprint,
    draw_probes,
    list_kept_parts,
    name_expert,
)

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import PolicyRank

Logprobs = tuple[tuple[float, ...], ...]  # of all tokens but the first of each sequence


def score_canary(rank: PolicyRank, sequences: tuple[tuple[int, ...], ...]) -> Logprobs | None:
    """Compute log-probabilities of the canary at temperature 1; None except on output ranks.

    Every rank of the policy calls it; all replicas compute the same, since they may share experts.
    """
    lengths = [len(sequence) for sequence in sequences]
    fields = TokenFields(token_ids=torch.tensor([token for tokens in sequences for token in tokens], dtype=torch.int32))
    if rank.routing is not None and rank.routing.replays:  # nothing is recorded, so that routers choose
        form = RoutedForm.from_shape(rank.shape)
        fields.routed_experts = torch.full((sum(lengths), form.columns), UNKNOWN, dtype=torch.int16)
    settings = rank.settings
    # vLLM computes those of a prompt without a temperature and without filters.
    rank.settings = replace(settings, temperature=1.0, token_filter=None)
    try:
        logprobs = rank.compute_logprobs(TokenBatch(lengths, fields), [list(range(len(lengths)))])
    finally:
        rank.settings = settings
    return None if logprobs is None else tuple(tuple(part[1:].tolist()) for part in logprobs.split(lengths))


def score_canary_without_adapters(rank: PolicyRank, sequences: tuple[tuple[int, ...], ...]) -> Logprobs | None:
    """Compute log-probabilities of the canary under the base model, as `score_canary`."""
    # Imported here because the driver, which names this function, does not need Megatron.
    from megatron_grpo.trainer.model.lora import adapters_off

    with adapters_off(rank.chunks):
        return score_canary(rank, sequences)


def check_rank_adapters(rank: PolicyRank) -> AdapterCheck:
    return check_adapters(rank.gather_chunks(), rank.shape)


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


@torch.no_grad()
def fingerprint_policy(rank: PolicyRank, engine: Sequence[RankShard]) -> list[dict[str, Fingerprint]]:
    """Compute fingerprints of this stage's weights for each rank of an engine.

    They are by the names of `fingerprint_engine`. Collective over the stage; empty except on its first rank.
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
        by_bounds: dict[tuple[tuple[int, int], ...], Fingerprint | None] = {}
        for engine_rank, part in parts_by_tensor[name]:
            is_expert, bounds = part.expert is not None, part.part.bounds
            if bounds not in by_bounds:  # several ranks may keep the same part
                values = tensor[part.part.region]
                by_bounds[bounds] = experts.add(part, values) if is_expert else compute_fingerprint(values)
            fingerprint = by_bounds[bounds]
            if fingerprint is not None:
                fingerprints[engine_rank][name_expert(name) if is_expert else name] = fingerprint
    return fingerprints


class _ExpertOutputs:
    """Outputs of experts, whose tensors come one at a time: gate, up, then down."""

    def __init__(self, hidden: int, activation: Callable[[Tensor], Tensor]) -> None:
        self._hidden, self._activation = hidden, activation
        # [PROBES, width of the part], float32, by expert and begin of the part: the gate, then the gated values.
        self._values: dict[tuple[str, int], Tensor] = {}

    def add(self, part: Destination, values: Tensor) -> Fingerprint | None:
        """Add a part of a tensor; an expert's last one completes its fingerprint."""
        begin = max(begin for begin, _ in part.part.bounds)  # of the cut; the other dimension begins at 0
        key, weight = (name_expert(part.part.name), begin), values.float()
        if not part.parameter.endswith(".w13_weight"):
            return compute_fingerprint(self._values.pop(key) @ weight.T)
        projected = draw_probes(self._hidden, values.device) @ weight.T
        self._values[key] = self._values[key] * projected if key in self._values else self._activation(projected)
        return None
