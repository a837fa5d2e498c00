"""Refit by broadcast: `BroadcastTransport` runs on the driver, and `BroadcastReceiver` in an engine's worker. Ranks of
the policy send as in a reshard, but every worker receives all tensors whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.weights.families import shape_of_folder, weight_entries
from megatron_grpo.weights.layouts import RankShard, training_shards
from megatron_grpo.weights.refit.engine_layers import ModelReload
from megatron_grpo.weights.refit.groups import Rendezvous
from megatron_grpo.weights.refit.links import Links
from megatron_grpo.weights.refit.plan import tensor_name
from megatron_grpo.weights.refit.reshard import ReshardTransport


class BroadcastTransport(ReshardTransport):
    """Every worker receives whole tensors and keeps its shard with vLLM's own loaders, whatever the two layouts are."""

    mode: ClassVar[RefitMode] = "broadcast"

    def _engine_shards(self) -> list[RankShard]:
        return training_shards(ParallelConfig(), self._policy.settings.shape)  # one rank that keeps the whole model


class BroadcastReceiver:
    """The receiving end of a worker's links.

    Args:
        worker: vLLM's, with a model.
        rendezvous: address and size of the group.
        number: the worker's, counted over all engines.
    """

    def __init__(self, worker: Any, rendezvous: Rendezvous, number: int) -> None:
        self._reload = ModelReload(worker)
        self.abandon = self._reload.abandon
        self._shape = shape_of_folder(worker.vllm_config.model_config.model)
        self._entries = weight_entries(self._shape)
        self._links = Links(rendezvous, "target", number, worker.device, self._entries)
        self._begun: dict[str, Tensor] = {}
        """Tensors, [rows, columns], of which some pieces have come."""
        self._missing: dict[str, int] = {}
        """Numbers of each of them that have not come yet."""

    def receive(self, version: int) -> None:
        """Load every tensor once all of its pieces have come intact, and let vLLM compute with them.

        Raises:
            ValueError: a checksum was broken.
            RuntimeError: a rank of the policy stopped sending, or the links failed before.
        """
        self._begun.clear()
        self._reload.begin()
        self._links.receive(self._load, version)
        assert not self._begun, "every piece has come"
        self._reload.finish()

    def _load(self, number: int, message: Tensor) -> None:
        complete = list(self._complete(number, message))
        if complete:
            self._reload.load(complete)

    def _complete(self, number: int, message: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of the tensors that a message, [bytes], uint8, completes."""
        for piece, parcel in zip(self._links.messages[number], self._links.packed_pieces[number], strict=True):
            name = tensor_name(self._entries, piece)
            shape = self._entries[piece["entry"]].hf[piece["tensor"]].shape(self._shape)
            if name not in self._begun:
                self._begun[name] = torch.empty(shape, dtype=parcel.dtype, device=message.device).view(shape[0], -1)
                self._missing[name] = self._begun[name].numel()
            values = parcel.numbers(message)
            rows, columns = piece["rows"].tolist(), piece["columns"].tolist()
            self._begun[name][slice(*rows), slice(*columns)].copy_(values)
            self._missing[name] -= values.numel()
            if not self._missing[name]:
                yield name, self._begun.pop(name).view(shape)
