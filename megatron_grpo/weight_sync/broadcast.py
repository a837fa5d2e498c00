"""Refit by broadcast: `BroadcastTransport` runs on the driver, and `BroadcastReceiver` in an engine's worker. Ranks of
the policy send over the links of a reshard, but to every worker a copy of the whole model."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.weight_layouts import RankShard, shard_policy
from megatron_grpo.weight_sync.engine_layers import ModelReload
from megatron_grpo.weight_sync.reshard import ReshardReceiver, ReshardTransport
from megatron_grpo.weight_sync.transfer_plan import tensor_name


class BroadcastTransport(ReshardTransport):
    """Every worker receives whole tensors and keeps its shard with vLLM's own loaders, whatever the two layouts are."""

    mode: ClassVar[RefitMode] = "broadcast"

    def _engine_shards(self) -> list[RankShard]:
        return shard_policy(ParallelConfig(), self._policy.settings.shape)  # one rank that keeps the whole model


class BroadcastReceiver(ReshardReceiver):
    """The receiving end of a worker's links; a tensor is loaded once all of its pieces have come intact."""

    def _loaded_model(self, worker: Any) -> Any:
        self._begun: dict[str, Tensor] = {}
        """Tensors, [rows, columns], of which some pieces have come."""
        self._missing: dict[str, int] = {}
        """Number of elements of each of these tensors that have not come yet."""
        return ModelReload(worker)

    def _write(self, number: int, message: Tensor) -> None:
        """Add the pieces of a message, [bytes], uint8, to their tensors, and load those that are complete."""
        complete: list[tuple[str, Tensor]] = []
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
                complete.append((name, self._begun.pop(name).view(shape)))
        if complete:
            self._model.load(complete)
