"""Refit by broadcast: a group for each pipeline stage of the policy, all generation workers in each."""

from __future__ import annotations

from typing import ClassVar

import ray
from torch.distributed import Store

from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.refit.broadcast.sender import connect_sender, send_weights
from megatron_grpo.refit.groups import Rendezvous
from megatron_grpo.refit.transport import GroupTransport


class BroadcastTransport(GroupTransport):
    """Every worker gets whole tensors and keeps its shard, whatever the two layouts are."""

    mode: ClassVar[RefitMode] = "broadcast"

    def _connect_senders(self, store: Store, rendezvous: Rendezvous) -> list[ray.ObjectRef]:
        return self._policy.submit(connect_sender, rendezvous, self._bucket_bytes)

    def _send(self, version: int) -> list[ray.ObjectRef]:
        return self._policy.submit(send_weights, version, self._bucket_bytes)
