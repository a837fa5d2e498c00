"""The model of time of a simulated cluster, and ranks that compute nothing: they answer after the time that it gives.

All times of the model are seconds of the simulated cluster; `Times.speed_up` of them pass in one second of the clock.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from megatron_grpo.batch.generation_requests import GenerationRequest, SamplingSettings
from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.cluster.actor_processes import ActorProcesses
from megatron_grpo.losses.loss import GlobalCounts, LossFunction
from megatron_grpo.trainer.messages import ForwardResult, RankReport, RankSettings, RankTrainResult, ReplicaWork
from megatron_grpo.weight_sync.links import Side
from megatron_grpo.weight_sync.pieces import PIECE
from megatron_grpo.weight_sync.refit_group import FAILURE, FAILURE_CHECK_S, Rendezvous

RIGHT, WRONG = "right", "wrong"
"""Texts of responses."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """The model of time, and of the lengths of responses."""

    speed_up: float
    """Seconds of the simulated cluster in a second of the clock."""
    token_s: float
    """Seconds of a decoding step of an engine with one response."""
    response_s: float
    """Seconds that each further response adds to a decoding step."""
    train_tokens_per_s: float
    """Tokens that a GPU trains on in a second, forward and backward; log-probabilities take a third of the time."""
    refit_gb_per_s: float
    """Gigabytes (10^9) that a GPU sends or receives in a second."""
    message_s: float
    """Seconds of a message of a refit beside its bytes."""
    move_s: float
    """Seconds in which a GPU's weights or optimizer state, or an engine's part, move to host memory or back."""
    median_tokens: float
    """Tokens of half of the responses, at most: lengths are log-normal."""
    sigma: float
    """Standard deviation of the logarithm of the lengths."""
    right: float
    """Share of the responses with reward 1; the others have 0."""

    async def pass_by(self, seconds: float) -> None:
        """Wait for some seconds of the simulated cluster."""
        await asyncio.sleep(seconds / self.speed_up)

    def decoding_s(self, responses: int) -> float:
        """Seconds of a decoding step of an engine."""
        return self.token_s + self.response_s * (responses - 1)

    def drawn(self, request: GenerationRequest, settings: SamplingSettings) -> tuple[int, bool, bool]:
        """The response to a request, from its seed: tokens, whether it was cut off, and whether it is right."""
        generator = np.random.default_rng(request.seed)
        longest = min(request.max_new_tokens, settings.max_new_tokens)
        length = max(round(generator.lognormal(np.log(self.median_tokens), self.sigma)), 1)
        return min(length, longest), length >= longest, bool(generator.random() < self.right)


def right_answer(completions: Sequence[str], **_: Any) -> list[float]:
    """A reward function: 1 for right responses."""
    return [float(text == RIGHT) for text in completions]


class Member:
    """One member of a refit's group: reads its plan from the driver's store, and looks for failures as it waits."""

    def __init__(self, times: Times, rendezvous: Rendezvous, side: Side, number: int) -> None:
        self._times, self._store = times, rendezvous.connect()
        json.loads(self._store.get("plan"))
        pieces = np.frombuffer(zlib.decompress(self._store.get(f"{side}/{number}")), dtype=PIECE)
        self.bytes, self.pieces = int(pieces["bytes"].sum()), len(pieces)
        self.messages = len(np.unique(pieces["turn"]))

    async def transfer(self) -> None:
        """Pass the time of the member's messages, and look for a failure every `FAILURE_CHECK_S`.

        Raises:
            RuntimeError: another member failed, or the driver has closed the store.
        """
        seconds = self.bytes / (1e9 * self._times.refit_gb_per_s) + self.messages * self._times.message_s
        while seconds > 0:
            await self._times.pass_by(min(seconds, FAILURE_CHECK_S))
            seconds -= FAILURE_CHECK_S
            if self._store.check([FAILURE]):
                raise RuntimeError(f"given up, because {self._store.get(FAILURE).decode()}")


class SimulatedRank:
    """Stands in for `RankActor`; what it answers has the form and size of a real rank's answers."""

    def __init__(self, times: Times, name: str, rank: int, threads: int) -> None:
        self._times, self._rank, self._speed = times, rank, 1.0
        self._metrics: dict[str, float] = {}
        self._calls: Mapping[str, Callable[..., Any]] = {
            "connect_shards": self._connect,
            "send_shards": self._send,
        }

    def set_speed(self, speed: float) -> None:
        """From now on compute at this share of the usual speed."""
        self._speed = speed

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """No store: simulated ranks have no process group."""
        return "", 0

    def import_packages(self) -> None:
        """Nothing to import."""

    def start(self, settings: RankSettings, store_address: tuple[str, int]) -> RankReport:
        """Find the rank's place in the layout, in Megatron-Core's order: tp-cp-dp-pp."""
        self._parallel = parallel = settings.config.parallel
        inner = parallel.tensor * parallel.context
        data, stage = self._rank // inner % parallel.data, self._rank // (inner * parallel.data)
        self._is_last_stage = stage == parallel.pipeline - 1
        self._has_loss = self._is_last_stage and self._rank % parallel.tensor == 0
        self._is_output = self._has_loss and self._rank % inner == 0
        return RankReport(data_rank=data, device_name="cpu", startup_s={}, processes=ActorProcesses("here", ()))

    async def train(
        self, work: ReplicaWork, loss_fn: LossFunction, counts: GlobalCounts, limit: float | None = None
    ) -> RankTrainResult:
        """Pass the time of an optimizer step; metrics as from the real loss on one token, for each microbatch."""
        batch, microbatches = work
        await self._times.pass_by(self._seconds(batch.lengths, microbatches))
        metrics = None
        if self._has_loss:
            self._metrics = self._metrics or metrics_of_a_token(loss_fn, batch.fields)
            metrics = [dict(self._metrics) for _ in microbatches]
        return RankTrainResult(grad_norm=1.0, learning_rate=1e-6, metrics=metrics)

    async def compute(self, work: ReplicaWork, field: str) -> ForwardResult | None:
        """Pass the time of a forward pass; the output rank stores zeros for the tokens of each shard."""
        batch, microbatches = work
        await self._times.pass_by(self._seconds(batch.lengths, microbatches) / 3)
        if not self._is_output:
            return None
        tokens = [int(batch.lengths[shard].sum()) for shard in batch.partitions]
        shards = [ray.put(np.zeros(count, dtype=np.float32)) for count in tokens]
        return shards, np.ones(len(batch), dtype=np.bool_)

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run the simulated form of a function on a rank's model."""
        return await self._calls[function.__name__](*args)

    async def act(self, name: str, action: Callable[..., Any]) -> None:
        """Pass the time of a move: the ranks are asked for nothing else."""
        assert name in ("offload", "onload"), name
        await self._times.pass_by(self._times.move_s)

    def _seconds(self, lengths: Any, microbatches: Sequence[Sequence[int]]) -> float:
        """Seconds of a pass over microbatches by all ranks of the replica, with the bubble of the pipeline."""
        parallel = self._parallel
        ranks = parallel.world_size // parallel.data
        tokens = sum(int(lengths[rows].sum()) for rows in map(list, microbatches))
        bubble = 1 + (parallel.pipeline - 1) / max(len(microbatches), 1)
        return tokens / (self._times.train_tokens_per_s * ranks * self._speed) * bubble

    async def _connect(self, rendezvous: Rendezvous) -> None:
        # On a thread: each member waits for a name server and the store, on a cluster in a process of its own.
        self._member = await asyncio.to_thread(Member, self._times, rendezvous, "source", self._rank)

    async def _send(self, version: int) -> tuple[int, int, int]:
        await self._member.transfer()
        return self._member.bytes, self._member.pieces, self._member.messages


def metrics_of_a_token(loss_fn: LossFunction, names: Iterable[str]) -> dict[str, float]:
    """The metrics of a loss over one token, which has these stored fields."""
    unit = torch.ones(1, 1)
    entries = dict.fromkeys({"loss_mask"} | {"advantages", *names} & set(loss_fn.field_names), unit)
    counts = GlobalCounts(tokens=1.0, sequences=1.0, all_sequences=1.0)
    _, metrics = loss_fn(unit.clone().requires_grad_(), TokenFields(**entries), counts)
    return {name: float(value.detach()) for name, value in metrics.items()}
