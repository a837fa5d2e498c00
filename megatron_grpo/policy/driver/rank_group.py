"""A model in training as the driver sees it: many Megatron-Core ranks behind one object."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import ray
import torch
from torch import Tensor

from megatron_grpo.cluster.futures import gather
from megatron_grpo.data.packing import plan_microbatches
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.losses.interface import GlobalCounts, LossFunction, combine_metrics
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.policy.interface import NonFiniteGradientError, StepShare, TrainedModel, TrainResult
from megatron_grpo.policy.rank.actor import RankActor, RankPlace, RankSettings, load_checkpoint, save_checkpoint


@dataclass(frozen=True, slots=True)
class _Shard:
    """What one data-parallel replica works on."""

    microbatches: list[list[int]]
    """Indices into the whole batch."""
    local: ray.ObjectRef
    """(its batch, its microbatches as indices into that), in the object store."""

    @property
    def indices(self) -> list[int]:
        """Sequences of the replica, in the order of its batch."""
        return [index for microbatch in self.microbatches for index in microbatch]


class RankGroup(TrainedModel):
    """A model spread over a Ray worker group, one actor per rank of tensor * pipeline * context * data.

    Args:
        settings: what every rank builds.
        actor_options: Ray options by rank.
        startup_timeout_s: deadline for all ranks to be up.
    """

    label: ClassVar[str]
    """What messages call the model."""

    def __init__(
        self, settings: RankSettings, actor_options: Callable[[int], dict[str, Any]], startup_timeout_s: float
    ) -> None:
        self.settings = settings
        self._config = settings.config
        self._startup_timeout_s = startup_timeout_s
        world = settings.config.parallel.world_size
        threads = settings.config.threads or max(1, (os.cpu_count() or 1) // world)
        actor = ray.remote(RankActor)
        self.workers = [
            actor.options(**actor_options(rank)).remote(f"{self.label} rank {rank}", rank, world, threads)
            for rank in range(world)
        ]
        self._places: list[RankPlace] = []
        self._starting: list[ray.ObjectRef] = []

    def start(self) -> None:
        """Begin building the model on every rank; returns once the ranks know each other."""
        timeout_s = self._startup_timeout_s
        (address,) = self._gather([self.workers[0].open_store.remote(timeout_s)], f"{self.label} start", timeout_s)
        self._starting = [worker.start.remote(self.settings, address) for worker in self.workers]

    def wait_ready(self) -> None:
        """Block until every rank holds its weights.

        Raises:
            RunError: a rank failed or the start-up deadline passed.
        """
        self._places = self._gather(self._starting, f"{self.label} start", self._startup_timeout_s)

    def submit(self, fn: Callable[..., Any], *args: Any) -> list[ray.ObjectRef]:
        """Run fn(engine, *args) on every rank; one reference per rank, in rank order."""
        return [worker.run.remote(fn, *args) for worker in self.workers]

    @abstractmethod
    def per_token(self, batch: SequenceBatch) -> Tensor:
        """The model's output for every token: [sum(lengths)], float32."""

    def train(self, batch: SequenceBatch, loss_fn: LossFunction) -> TrainResult:
        counts = GlobalCounts.of(batch)
        shards = self._shards(batch, self._config.microbatch_tokens)
        refs = self._call("train", shards, loss_fn, counts)
        shares = self._gather(refs, "training step")
        if not math.isfinite(shares[0].grad_norm):
            raise NonFiniteGradientError(shares[0].grad_norm, self._suspects(batch, shards, shares))
        metrics = combine_metrics(one for share in shares for one in share.metrics or [])
        return TrainResult(
            loss=metrics.pop("loss"),
            grad_norm=shares[0].grad_norm,
            learning_rate=shares[0].learning_rate,
            metrics=metrics,
        )

    @property
    def shape(self) -> ModelShape:
        return self.settings.shape

    @property
    def device_name(self) -> str:
        return self._places[0].device_name

    def save_checkpoint(self, folder: str) -> None:
        self._gather(self.submit(save_checkpoint, folder), "checkpoint")

    def load_checkpoint(self, folder: str) -> None:
        self._gather(self.submit(load_checkpoint, folder), "loading the checkpoint")

    def shutdown(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []

    def _gather(self, refs: list[ray.ObjectRef], what: str, deadline_s: float | None = None) -> list[Any]:
        deadline_s = deadline_s or self._config.timeout_s
        return gather(refs, deadline_s=deadline_s, what=what, name=f"{self.label} rank {{}}".format)

    def _suspects(self, batch: SequenceBatch, shards: Sequence[_Shard], shares: Sequence[StepShare]) -> list[int]:
        """Sequences that a gradient which is not finite can come from, as far as that can be told.

        Those of the microbatches whose loss is not finite (of all when every loss is); and of these, if there are any,
        those with a token whose output is not finite.
        """
        found: list[int] = []
        for place, share in zip(self._places, shares, strict=True):
            microbatches = shards[place.data].microbatches
            for indices, metrics in zip(microbatches, share.metrics or [], strict=place.is_reporter):
                if not math.isfinite(metrics["loss"]):
                    found += indices
        suspects = sorted(found) or list(range(len(batch)))
        pieces = self.per_token(batch).split(batch.lengths)
        return [index for index in suspects if not pieces[index].isfinite().all()] or suspects

    def _shards(self, batch: SequenceBatch, microbatch_tokens: int) -> list[_Shard]:
        """The batch dealt out over data-parallel replicas."""
        plan = plan_microbatches(
            batch.lengths,
            data_parallel=self._config.parallel.data,
            microbatch_tokens=microbatch_tokens,
            pad_to_multiple=self._config.parallel.sequence_multiple,
        )
        shards = []
        for microbatches in plan:
            indices = [i for microbatch in microbatches for i in microbatch]
            position = {index: place for place, index in enumerate(indices)}
            local = [[position[i] for i in microbatch] for microbatch in microbatches]
            shards.append(_Shard(microbatches, ray.put((batch.select(indices), local))))
        return shards

    def _call(self, method: str, shards: Sequence[_Shard], *args: Any) -> list[ray.ObjectRef]:
        """Call an engine method on every rank with the shard of its replica."""
        return [
            worker.call.remote(method, shards[place.data].local, *args)
            for worker, place in zip(self.workers, self._places, strict=True)
        ]

    def _gather_tokens(self, batch: SequenceBatch, method: str, what: str) -> Tensor:
        """[sum(lengths)]: what an engine method returns of each token of the batch."""
        config = self._config
        shards = self._shards(batch, config.logprob_microbatch_tokens or config.microbatch_tokens)
        results = self._gather(self._call(method, shards), what)
        by_sequence: list[Tensor] = [torch.empty(0)] * len(batch)
        for place, values in zip(self._places, results, strict=True):
            if place.is_reporter:
                indices = shards[place.data].indices
                for index, piece in zip(indices, values.split([batch.lengths[i] for i in indices]), strict=True):
                    by_sequence[index] = piece
        return torch.cat(by_sequence)
