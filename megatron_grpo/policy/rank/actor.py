"""The Ray actor around one rank of the policy or of the value model."""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.models.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class RankSettings(ABC):
    """What every rank of a model builds its engine from."""

    config: PolicyConfig
    shape: ModelShape
    folder: str
    decay_steps: int
    seed: int

    @abstractmethod
    def build_rank(self) -> Any:
        """This rank's engine; called on the rank, where torch and Megatron-Core may be imported."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in the layout."""

    data: int
    is_reporter: bool
    device_name: str
    """As the vendor calls it; "cpu" without one."""


class RankActor:
    """Ray actor: holds a rank's engine and runs functions on it; what a rank can do is written in those functions."""

    def __init__(self, rank: int, world_size: int, threads: int) -> None:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # read when torch is first imported, in `start`
        self.rank, self.world_size, self.threads = rank, world_size, threads

    def open_store(self, timeout_s: float) -> tuple[str, int]:
        """Open the store in which all ranks meet, in this process; its address."""
        from megatron_grpo.cluster.rendezvous import node_address, open_store

        self.store = open_store(node_address(), timeout_s)
        return self.store.host, self.store.port

    def start(self, settings: RankSettings, store_address: tuple[str, int]) -> RankPlace:
        """Join the group, build the model and load this rank's weights."""
        from megatron_grpo.cluster.rendezvous import reach_store
        from megatron_grpo.platform.device import current_platform
        from megatron_grpo.platform.megatron_cpu import apply_patches

        apply_patches()
        import torch
        from megatron.core import parallel_state

        from megatron_grpo.policy.rank.parallel import initialize_parallel

        if current_platform().name == "cpu":
            torch.set_num_threads(self.threads)
        initialize_parallel(
            settings.config.parallel,
            rank=self.rank,
            world_size=self.world_size,
            store=reach_store(*store_address, settings.config.timeout_s),
            seed=settings.seed,
            timeout_s=settings.config.timeout_s,
        )
        self.engine = settings.build_rank()
        gc.freeze()  # nothing made so far is garbage; looking through all of it takes a third of a second each time
        return RankPlace(
            data=parallel_state.get_data_parallel_rank(),
            is_reporter=self.engine.is_reporter,
            device_name=torch.cuda.get_device_name() if current_platform().name == "cuda" else "cpu",
        )

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(engine, *args)."""
        return fn(self.engine, *args)

    def call(self, method: str, shard: tuple[Any, ...], *args: Any) -> Any:
        """engine.method(*shard, *args); `shard` is this rank's part of the batch."""
        return getattr(self.engine, method)(*shard, *args)


def save_checkpoint(engine: Any, folder: str) -> None:
    """Write this rank's part of a checkpoint; runs on every rank."""
    from megatron_grpo.policy.rank.checkpoint import save_rank
    from megatron_grpo.policy.rank.checkpoint_errors import errors_told

    with errors_told(f"{folder} cannot be written"):
        save_rank(engine, folder)


def load_checkpoint(engine: Any, folder: str) -> None:
    """Load this rank's part of a checkpoint; runs on every rank."""
    from megatron_grpo.policy.rank.checkpoint import load_rank
    from megatron_grpo.policy.rank.checkpoint_errors import errors_told

    with errors_told(f"{folder} cannot be loaded"):
        load_rank(engine, folder)
