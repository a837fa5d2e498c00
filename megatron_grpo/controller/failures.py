"""What happens when a reward, a log-probability or a gradient is NaN or infinite: the step stops and says for whom."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.cluster.futures import stored
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.data.batch import token_places
from megatron_grpo.data.step_batch import StepBatch
from megatron_grpo.data.trajectory import Outcome, SampledGroup, Trajectory
from megatron_grpo.observability.run_files import write_json

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_NAMED = 8
"""Prompts that the message names; the file names all."""

Fetch = Callable[[Sequence[SampledGroup]], list[list[Trajectory]]]
"""What brings the tokens and texts of groups to the driver (`StepTokens.fetch`)."""


@dataclass(frozen=True, slots=True)
class FiniteGuard:
    """Looks for numbers that are not finite, and ends the run on them with a file that holds the responses."""

    run_dir: Path
    fetch: Fetch

    def require_finite_samples(self, groups: Sequence[SampledGroup], step: int, data: str = "training") -> None:
        """Check the rewards and the sampling log-probabilities of one generation batch.

        Args:
            groups: rollouts of the generation batch, a group for each prompt.
            step: number of the step, or of the last one before a validation.
            data: which data the prompts are rows of, for the message.

        Raises:
            SamplingError: a reward is not finite.
            RunError: a sampling log-probability is not finite.
        """
        outcomes = [outcome for group in groups for outcome in group.outcomes]
        guard = StepGuard(self, groups, step, data)
        broken = [number for number, one in enumerate(outcomes) if not one.finite_logprobs]
        if broken:  # the weights themselves may be broken
            guard.stop("a sampling log-probability", broken)
        rewards = [number for number, one in enumerate(outcomes) if not _all_fit([one.reward])]
        if rewards:
            guard.stop("the reward", rewards, error=SamplingError)
        parts = [number for number, one in enumerate(outcomes) if not _all_fit(one.reward_parts.values())]
        if parts:
            guard.stop("a reward function's reward", parts, error=SamplingError)


@dataclass(frozen=True, slots=True)
class StepGuard:
    """A `FiniteGuard` for the responses of one step."""

    guard: FiniteGuard
    groups: Sequence[SampledGroup]
    step: int
    data: str = "training"

    def require_finite(self, entry: str, finite: NDArray[np.bool_], batch: StepBatch) -> None:
        """Check what was computed for every token.

        Args:
            entry: name of the entry, for the message.
            finite: [sequences], bool: whether the entry is finite wherever it is looked at.
            batch: the step's batch, one sequence for each response.

        Raises:
            RunError: the entry is not finite somewhere (`stop` makes the message).
        """
        if not finite.all():
            wrong = np.flatnonzero(~finite)
            self.stop(f"an entry of {entry}", wrong.tolist(), {entry: _rows(batch, entry, wrong)})

    def stop(
        self,
        what: str,
        bad: Sequence[int],
        more: Mapping[str, Sequence[object]] | None = None,
        error: type[RunError] = RunError,
    ) -> NoReturn:
        """Write the offending responses to run_dir/non_finite_step_N.json and end the run.

        In the file the values are the strings NaN, Infinity and -Infinity: JSON has no such numbers.

        Args:
            what: name of what is not finite, for the message.
            bad: numbers of the responses in the step.
            more: further entries of the file by name, an item for each response.
            error: class of the error to raise.

        Raises:
            RunError: always; names the prompts, as rows of the data.
        """
        file = self.guard.run_dir / f"non_finite_step_{self.step}.json"
        outcomes: list[Outcome] = [outcome for group in self.groups for outcome in group.outcomes]
        places = [(number, row) for number, group in enumerate(self.groups) for row in range(len(group.outcomes))]
        concerned = sorted({places[index][0] for index in bad})
        fetched = dict(zip(concerned, self.guard.fetch([self.groups[one] for one in concerned]), strict=True))
        rows = [
            # The group's place in the step, whatever generation batch it came from.
            {**fetched[places[index][0]][places[index][1]].to_row(), "group": outcomes[index].group}
            for index in bad
        ]
        prompts = sorted({outcomes[index].prompt_idx for index in bad})
        found = {
            "step": self.step,
            "what": what,
            "data": self.data,
            "prompt_ids": prompts,
            "trajectories": rows,
            **(more or {}),
        }
        write_json(file, json.loads(json.dumps(found), parse_constant=str))
        named = ", ".join(map(str, prompts[:_NAMED])) + (", ..." if len(prompts) > _NAMED else "")
        raise error(
            f"step {self.step}: {what} is not finite for {len(bad)} response(s) to prompt(s) {named} of the "
            f"{self.data} data; no weights were changed by it and nothing of this step was saved; {file} has the "
            "responses"
        )


def _all_fit(values: Any) -> bool:
    """Whether all values that are there are finite, also as the float32 that is computed with."""
    return all(value is None or abs(value) <= LARGEST_FLOAT32 for value in values)  # false for NaN


def _rows(batch: StepBatch, entry: str, sequences: NDArray[np.int64]) -> list[list[float]]:
    """The numbers of an entry in sequences [chosen], int64; brings the tokens of their shards to this process."""
    if entry == "advantages" and batch.advantages is not None:
        return [[float(batch.advantages[number])] for number in sequences]
    rows = {}
    for shard, reference in zip(batch.shards, batch.fields[entry], strict=True):
        for place in np.flatnonzero(np.isin(shard, sequences)):
            tokens = token_places(batch.lengths[shard], np.array([place]))
            rows[int(shard[place])] = stored([reference], entry)[0][tokens].tolist()
    return [rows[int(number)] for number in sequences]
