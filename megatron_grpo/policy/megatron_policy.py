"""The policy as the driver sees it: many Megatron-Core ranks behind one object."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import ray
import torch
from torch import Tensor

from megatron_grpo.cluster.futures import gather
from megatron_grpo.data.packing import plan_microbatches
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.policy.interface import GlobalCounts, LossFunction, PolicyInterface, TrainResult
from megatron_grpo.policy.worker import EngineSettings, PolicyWorker, RankPlace, load_checkpoint, save_checkpoint


class MegatronPolicy(PolicyInterface):
    """A Ray worker group, one actor per rank of tensor * pipeline * context * data.

    Args:
        settings: what every rank builds.
        actor_options: Ray options by rank.
        startup_timeout_s: deadline for all ranks to be up.
    """

    def __init__(
        self, settings: EngineSettings, actor_options: Callable[[int], dict[str, Any]], startup_timeout_s: float
    ) -> None:
        self.settings = settings
        self._startup_timeout_s = startup_timeout_s
        world = settings.config.parallel.world_size
        threads = settings.config.threads or max(1, (os.cpu_count() or 1) // world)
        actor = ray.remote(PolicyWorker)
        self.workers = [actor.options(**actor_options(rank)).remote(rank, world, threads) for rank in range(world)]
        self._places: list[RankPlace] = []
        self._starting: list[ray.ObjectRef] = []

    def start(self) -> None:
        """Begin building the model on every rank; returns once the ranks know each other."""
        timeout_s = self._startup_timeout_s
        (address,) = gather([self.workers[0].open_store.remote(timeout_s)], deadline_s=timeout_s, what="policy start")
        self._starting = [worker.start.remote(self.settings, address) for worker in self.workers]

    def wait_ready(self) -> None:
        """Block until every rank holds its weights.

        Raises:
            RunError: a rank failed or the start-up deadline passed.
        """
        self._places = self._gather(self._starting, "policy start", self._startup_timeout_s)

    def submit(self, fn: Callable[..., Any], *args: Any) -> list[ray.ObjectRef]:
        """Run fn(engine, *args) on every rank; one reference per rank, in rank order."""
        return [worker.run.remote(fn, *args) for worker in self.workers]

    def get_logprobs(self, batch: SequenceBatch) -> Tensor:
        return self._logprobs(batch, "logprobs")

    def get_reference_logprobs(self, batch: SequenceBatch) -> Tensor:
        return self._logprobs(batch, "reference_logprobs")

    def train(self, batch: SequenceBatch, loss_fn: LossFunction) -> TrainResult:
        mask = batch.tokens["loss_mask"]
        in_loss = sum(1 for piece in mask.split(batch.lengths) if piece.any())
        counts = GlobalCounts(tokens=max(float(mask.sum()), 1.0), sequences=max(float(in_loss), 1.0))
        shards = self._shards(batch, self.settings.config.microbatch_tokens)
        refs = self._call("train", shards, loss_fn, counts)
        shares = self._gather(refs, "training step")
        metrics = combine_metrics(one for share in shares for one in share.metrics or [])
        return TrainResult(
            loss=metrics.pop("loss"),
            grad_norm=shares[0].grad_norm,
            learning_rate=shares[0].learning_rate,
            metrics=metrics,
        )

    def save_checkpoint(self, folder: str) -> None:
        self._gather(self.submit(save_checkpoint, folder), "checkpoint")

    def load_checkpoint(self, folder: str) -> None:
        self._gather(self.submit(load_checkpoint, folder), "loading the checkpoint")

    def shutdown(self) -> None:
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []

    def _gather(self, refs: list[ray.ObjectRef], what: str, deadline_s: float | None = None) -> list[Any]:
        deadline_s = deadline_s or self.settings.config.timeout_s
        return gather(refs, deadline_s=deadline_s, what=what, name="policy rank {}".format)

    def _shards(self, batch: SequenceBatch, microbatch_tokens: int) -> list[tuple[list[int], ray.ObjectRef]]:
        """Per data-parallel replica: which sequences it gets, and (its batch, its microbatches) in the object store."""
        plan = plan_microbatches(
            batch.lengths,
            data_parallel=self.settings.config.parallel.data,
            microbatch_tokens=microbatch_tokens,
            pad_to_multiple=self.settings.config.parallel.sequence_multiple,
        )
        shards = []
        for microbatches in plan:
            indices = [i for microbatch in microbatches for i in microbatch]
            position = {index: place for place, index in enumerate(indices)}
            local = [[position[i] for i in microbatch] for microbatch in microbatches]
            shards.append((indices, ray.put((batch.select(indices), local))))
        return shards

    def _call(self, method: str, shards: list[tuple[list[int], ray.ObjectRef]], *args: Any) -> list[ray.ObjectRef]:
        """Call an engine method on every rank with the shard of its replica."""
        return [
            worker.call.remote(method, shards[place.data][1], *args)
            for worker, place in zip(self.workers, self._places, strict=True)
        ]

    def _logprobs(self, batch: SequenceBatch, method: str) -> Tensor:
        config = self.settings.config
        shards = self._shards(batch, config.logprob_microbatch_tokens or config.microbatch_tokens)
        results = self._gather(self._call(method, shards), "log-probabilities")
        by_sequence: list[Tensor] = [torch.empty(0)] * len(batch)
        for place, values in zip(self._places, results, strict=True):
            if place.is_reporter:
                indices = shards[place.data][0]
                for index, piece in zip(indices, values.split([batch.lengths[i] for i in indices]), strict=True):
                    by_sequence[index] = piece
        return torch.cat(by_sequence)


def combine_metrics(shares: Iterable[dict[str, float]]) -> dict[str, float]:
    """Metrics of a step from the shares of its microbatches: sums, or extremes for names ending in _max or _min."""
    total: dict[str, float] = {}
    for share in shares:
        for name, value in share.items():
            if name not in total:
                total[name] = value
            elif name.endswith("_max"):
                total[name] = max(total[name], value)
            elif name.endswith("_min"):
                total[name] = min(total[name], value)
            else:
                total[name] += value
    return total
