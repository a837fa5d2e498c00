"""A driver that samples ahead of its steps, over made-up prompts, until it is killed; and what it is compared with."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_grpo.algorithms.sample_buffer import SampleBuffer
from megatron_grpo.batch.trajectory import SampledGroup, Trajectory
from megatron_grpo.config.loop_schema import AsyncGRPOConfig, SampledLoopConfig
from megatron_grpo.data.loader import PromptLoader, PromptSampler, iterate_batches
from megatron_grpo.observability.timing import StepTimer
from tests.support.fake_rollouts import FakeRollouts
from tests.support.fake_run import SETTINGS
from tests.support.trajectories import make_trajectory


@dataclass(frozen=True)
class Prompts:
    """Prompts of which only the number counts; the last one is too long."""

    rows: int
    per_batch: int
    epochs: int

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, idx: int) -> Any:
        return {"idx": idx, "loss_multiplier": float(idx != self.rows - 1)}

    @property
    def batches(self) -> int:
        """Of all epochs; what does not fill one at the end of an epoch is dropped."""
        return self.rows // self.per_batch * self.epochs

    def loader(self, position: dict[str, Any] | None = None) -> PromptLoader:
        order = PromptSampler([self.rows], [1.0], shuffle=True, seed=3)
        loader = PromptLoader(self, prompts_per_batch=self.per_batch, order=order)
        if position is not None:
            loader.load_state_dict(position)
        return loader

    def in_turn(self, position: dict[str, Any] | None = None) -> list[list[int]]:
        """Rows by batch, from a position on, as a loop takes them that samples when it needs to."""
        return [[prompt["idx"] for prompt in batch] for batch in iterate_batches(self.loader(position), self.epochs)]


class Process:
    """A driver from its start until it is killed: it takes batches, and saves its position as a checkpoint would."""

    def __init__(
        self,
        sampler: type[SampleBuffer],
        prompts: Prompts,
        config: AsyncGRPOConfig,
        *,
        checkpoint: dict[str, Any] | None = None,
        steps: int = 99,
        next_complete: Callable[[int], int] | None = None,
    ) -> None:
        """
        Args:
            sampler: what samples ahead.
            prompts: the data.
            config: how far ahead.
            checkpoint: what an earlier process saved, from which this one goes on; None: the run begins.
            steps: how many steps the whole run has.
            next_complete: which of so many prompts is complete next; None: FakeRollouts' own choice.
        """
        self.loader = prompts.loader(None if checkpoint is None else checkpoint["position"])
        self.taken = 0 if checkpoint is None else checkpoint["taken"]
        self.rollouts = FakeRollouts(_answers)
        if next_complete is not None:
            self.rollouts.next_complete = next_complete
        rollouts: Any = self.rollouts
        loop = SampledLoopConfig(num_generations_per_prompt=2, seed=5, max_num_steps=steps, async_grpo=config)
        self.buffer = sampler(rollouts, self.loader, loop, SETTINGS, self.taken)
        self.batches = iterate_batches(self.loader, prompts.epochs)

    def take_groups(self) -> list[SampledGroup] | None:
        groups = self.buffer.take(self.batches, self.taken, StepTimer())
        self.taken += groups is not None
        return groups

    def take(self) -> list[int] | None:
        """Rows of the next step; None: none are left."""
        groups = self.take_groups()
        return None if groups is None else [group.outcomes[0].prompt_idx for group in groups]

    def rest(self) -> list[list[int]]:
        """Rows of all steps that are left."""
        rest = []
        while (rows := self.take()) is not None:
            rest.append(rows)
        return rest

    def checkpoint(self) -> dict[str, Any]:
        saved: dict[str, Any] = json.loads(json.dumps({"position": self.buffer.loader_state, "taken": self.taken}))
        return saved


def course(start: Callable[[dict[str, Any] | None], Process], lives: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Rows of the steps that a run is made of which is killed again and again.

    Args:
        start: makes a process that goes on from a checkpoint, or begins.
        lives: of each process but the last, steps before its last checkpoint, and those after it, which are undone.
    """
    trained: list[list[int]] = []
    checkpoint = None
    for saved, undone in lives:
        process = start(checkpoint)
        trained += [rows for _ in range(saved) if (rows := process.take()) is not None]
        checkpoint = process.checkpoint()
        for _ in range(undone):
            process.take()
    return trained + start(checkpoint).rest()


def _answers(prompts: Sequence[Any], samples: int) -> list[list[Trajectory]]:
    return [[make_trajectory(prompt_idx=prompt["idx"], sample=i) for i in range(samples)] for prompt in prompts]
