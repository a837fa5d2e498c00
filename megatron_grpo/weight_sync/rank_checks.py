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
from megatron_grpo.models.hf_weights import iter_hf_tensors
from megatron_grpo.models.routed_experts import UNKNOWN, RoutedForm
from megatron_grpo.weight_sync.boxes import Box, to_slices, unpack_boxes
from megatron_grpo.weight_sync.fingerprints import Fingerprint, compute_fingerprint, draw_probes, is_expert, name_boxes

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
def fingerprint_policy(rank: PolicyRank, engine: Sequence[str]) -> list[dict[str, Fingerprint]]:
    """Compute fingerprints of this stage's weights for each rank of an engine.

    `engine` are the packed boxes of an engine's ranks. Fingerprints are by the names of `fingerprint_engine`.
    Collective over the stage; empty except on its first rank.
    """
    by_tensor: defaultdict[str, list[tuple[int, str, Box]]] = defaultdict(list)
    experts: dict[tuple[int, str], _ExpertOutput] = {}
    fingerprints: list[dict[str, Fingerprint]] = [{} for _ in engine]
    for name, tensor in iter_hf_tensors(rank.gather_chunks(), rank.shape):
        if tensor is None:
            continue
        if not by_tensor:  # on the first rank of the stage only
            for engine_rank, text in enumerate(engine):
                for box_name, box in name_boxes(unpack_boxes(text)):
                    by_tensor[box.tensor].append((engine_rank, box_name, box))
        by_cut: dict[object, Fingerprint] = {}
        for engine_rank, box_name, box in by_tensor[name]:
            if is_expert(box):
                values = box.cut.compute(tensor[to_slices(box.cut.tensor)])
                new = _ExpertOutput(rank.shape.hidden, _ACTIVATIONS[rank.shape.activation])
                output = experts.setdefault((engine_rank, box_name), new).add(box, values)
                if output is not None:
                    fingerprints[engine_rank][box_name] = output
                continue
            cut = box.cut._replace(parameter=())
            if cut not in by_cut:  # several ranks may keep the same part
                by_cut[cut] = compute_fingerprint(box.cut.compute(tensor[to_slices(box.cut.tensor)]))
            fingerprints[engine_rank][box_name] = by_cut[cut]
    return fingerprints


class _ExpertOutput:
    """Output of an expert, whose matrices come one at a time, down last."""

    def __init__(self, hidden: int, activation: Callable[[Tensor], Tensor]) -> None:
        self._hidden, self._activation = hidden, activation
        self._projected: list[Tensor] = []  # [PROBES, width of the part], float32, by the gate and by up

    def add(self, box: Box, values: Tensor) -> Fingerprint | None:
        """Add values of a box, [1, rows, columns]; the last ones complete the fingerprint."""
        weight = values[0].float()
        if box.parameter.endswith(".w2_weight"):
            gate, up = self._projected
            self._projected = []
            return compute_fingerprint((self._activation(gate) * up) @ weight.T)
        projected = draw_probes(self._hidden, values.device) @ weight.T
        is_gate = box.cut.parameter[1].begin == 0  # vLLM has the gate above
        self._projected.insert(0 if is_gate else 1, projected)
        return None
