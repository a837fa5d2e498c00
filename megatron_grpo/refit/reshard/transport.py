"""Refit shard to shard: the driver plans once, from the two layouts, who sends what to whom."""

from __future__ import annotations

from typing import ClassVar

import ray
from torch.distributed import Store

from megatron_grpo.config.generation_schema import RefitMode
from megatron_grpo.models.places import engine_places, training_places
from megatron_grpo.refit.groups import Rendezvous
from megatron_grpo.refit.reshard.links import write_plan
from megatron_grpo.refit.reshard.plan import plan_pieces
from megatron_grpo.refit.reshard.schedule import schedule
from megatron_grpo.refit.reshard.sender import connect_shards, send_shards
from megatron_grpo.refit.reshard.wire import wire_dtypes
from megatron_grpo.refit.transport import GroupTransport


class ReshardTransport(GroupTransport):
    """Every rank of an engine gets the slices that it keeps, from ranks of the policy that have them."""

    mode: ClassVar[RefitMode] = "reshard"

    def _connect_senders(self, store: Store, rendezvous: Rendezvous) -> list[ray.ObjectRef]:
        settings, layout = self._policy.settings, self._generation.parallel
        places = training_places(settings.config.parallel, settings.shape)
        engine = engine_places(layout, settings.shape)
        dtypes = wire_dtypes(settings.shape, settings.config.precision, self._config.fp8_blocks)
        limit, beside = self._bucket_bytes // 2, self._generation.colocated
        engines = rendezvous.receivers // len(engine)
        pieces = plan_pieces(settings.shape, places, engine, engines, dtypes, limit, beside=beside)
        scheduled = schedule(pieces, self._bucket_bytes)
        write_plan(store, scheduled, len(places), rendezvous.receivers, dtypes, self._config.shared_memory)
        return self._policy.submit(connect_shards, rendezvous, places)

    def _send(self, version: int) -> list[ray.ObjectRef]:
        return self._policy.submit(send_shards, version)
