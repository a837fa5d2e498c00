"""Runs on ranks of the policy: their side of the checks that follow a refit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, assert_never

import torch
from torch import Tensor
from torch.nn import functional

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.models.adapter_check import AdapterCheck, check_adapters
from megatron_grpo.models.hf_weights import BoundEntry, iter_hf_tensors
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.models.shape import Activation
from megatron_grpo.weight_sync.boxes import Box, to_slices, unpack_boxes
from megatron_grpo.weight_sync.fingerprints import (
    PROBES,
    Fingerprint,
    compute_fingerprint,
    draw_probes,
    is_expert,
    name_boxes,
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
        nothing = rank.routing.select_layers(form.concatenate([(sum(lengths), None)]))
        fields.routed_experts = torch.from_numpy(nothing)
    settings = rank.settings
    # vLLM computes those of a prompt without a temperature and without filters.
    rank.settings = replace(settings, temperature=1.0, token_filter=None, never_sampled=())
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


def apply_activation(activation: Activation, projected: Tensor) -> Tensor:
    """Compute what lies between an expert's matrices.

    `projected`: [tokens, rows], with rows in the order of vLLM's parameter.
    """
    match activation:
        case "silu":
            return _multiply_gate(projected, functional.silu)
        case "gelu_tanh":
            return _multiply_gate(projected, partial(functional.gelu, approximate="tanh"))
        case "relu2":
            return functional.relu(projected).square()
        case "clamped_swiglu":  # vLLM keeps rows of gate and up by turns
            gate, up = projected[:, ::2].clamp(max=7.0), projected[:, 1::2].clamp(-7.0, 7.0)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
        case _:  # every activation of a family has a case, which mypy checks
            assert_never(activation)


def _multiply_gate(projected: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    gate, up = projected.chunk(2, dim=-1)
    return function(gate) * up


@torch.no_grad()
def fingerprint_policy(rank: PolicyRank, engine: Sequence[str], of_base: bool = False) -> list[dict[str, Fingerprint]]:
    """Compute fingerprints of this stage's weights for each rank of an engine.

    `engine` are the packed boxes of an engine's ranks. `of_base`: without adapters, which engines hold apart.
    Fingerprints are by the names of `fingerprint_engine`. Collective over the stage; empty except on its first rank.
    """
    by_tensor: defaultdict[str, list[tuple[int, str, Box]]] = defaultdict(list)
    experts: dict[tuple[int, str], _ExpertOutput] = {}
    fingerprints: list[dict[str, Fingerprint]] = [{} for _ in engine]
    value = BoundEntry.compute_base if of_base else BoundEntry.compute_weight
    for name, tensor in iter_hf_tensors(rank.gather_chunks(), rank.shape, value):
        if tensor is None:
            continue
        if not by_tensor:  # on the first rank of the stage only
            for engine_rank, text in enumerate(engine):
                for box_name, box in name_boxes(unpack_boxes(text)):
                    by_tensor[box.tensor].append((engine_rank, box_name, box))
                    if is_expert(box):
                        hidden = rank.shape.sizes["expert_hidden"]
                        new = _ExpertOutput(hidden, rank.shape.activation)
                        experts.setdefault((engine_rank, box_name), new).expect(box)
        by_cut: dict[object, Fingerprint] = {}
        for engine_rank, box_name, box in by_tensor[name]:
            if is_expert(box):
                values = box.layout.compute(tensor[to_slices(box.layout.tensor)])
                output = experts[engine_rank, box_name].add(box, values)
                if output is not None:
                    fingerprints[engine_rank][box_name] = output
                continue
            cut = box.layout._replace(parameter=())
            if cut not in by_cut:  # several ranks may keep the same part
                by_cut[cut] = compute_fingerprint(box.layout.compute(tensor[to_slices(box.layout.tensor)]))
            fingerprints[engine_rank][box_name] = by_cut[cut]
    return fingerprints


class _ExpertOutput:
    """Output of an expert for the probes.

    Its tensors come one at a time, the second matrix behind the first.
    """

    def __init__(self, hidden: int, activation: Activation) -> None:
        self._hidden, self._activation = hidden, activation
        self._boxes = self._rows = 0  # that are still to come; of the first matrix
        self._projected: Tensor | None = None  # [PROBES, rows], float32, by the first matrix
        self._output: Tensor | None = None  # [PROBES, hidden], float32

    def expect(self, box: Box) -> None:
        """Count a box that will come."""
        self._boxes += 1
        if ".w13_" in box.parameter:
            self._rows = max(self._rows, box.layout.parameter[1].end)

    def add(self, box: Box, values: Tensor) -> Fingerprint | None:
        """Add values of a box, [1, rows(, columns)]; the last ones complete the fingerprint."""
        part, rows = values[0].float(), slice(*box.layout.parameter[1])
        is_bias = box.parameter.endswith("_bias")
        if ".w13_" in box.parameter:
            if self._projected is None:
                self._projected = part.new_zeros(PROBES, self._rows)
            self._projected[:, rows] += part if is_bias else draw_probes(self._hidden, part.device) @ part.T
        else:
            assert self._projected is not None, "the first matrix of an expert comes before the second"
            if self._output is None:
                self._output = part.new_zeros(PROBES, self._hidden)
                self._projected = apply_activation(self._activation, self._projected)
            columns = None if is_bias else slice(*box.layout.parameter[2])
            self._output[:, rows] += part if columns is None else self._projected[:, columns] @ part.T
        self._boxes -= 1
        if self._boxes or self._output is None:
            return None
        fingerprint = compute_fingerprint(self._output)
        self._projected = self._output = None
        return fingerprint
