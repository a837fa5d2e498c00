"""Loader of training prompts by level, which follows accuracy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from xxhash import xxh3_64_intdigest

from megatron_grpo.batch.trajectory import Outcome
from megatron_grpo.config.data_schema import CurriculumConfig
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.data.loader import BatchLoader, Prompts
from megatron_grpo.data.processors import DatumSpec


class CurriculumLoader(BatchLoader):
    """Batches of prompts of one level at a time, from the lowest.

    An epoch is a pass over the rows of a level in a random order; a remainder at its end is dropped. A level begins its
    own pass, and the highest one stays. `levels`: of each row. The order of a pass follows from seed, level and number
    of the epoch, and the position is part of a checkpoint, so a resumed run continues with the same prompts.
    """

    def __init__(
        self, dataset: Prompts, levels: Sequence[int], config: CurriculumConfig, *, prompts_per_batch: int, seed: int
    ) -> None:
        self.prompts_per_batch = prompts_per_batch
        self._dataset, self._config, self._seed = dataset, config, seed
        self._row_levels = list(levels)
        self._rows: dict[int, list[int]] = defaultdict(list)  # rows of each level
        for number, level in enumerate(levels):
            self._rows[level].append(number)
        self.level = min(self._rows)
        self._drawn = self._batches = 0  # of the current pass
        self._verdicts: list[bool] = []  # of the last responses to rows of the level, at most config.window

    def __iter__(self) -> Iterator[list[DatumSpec]]:
        """Yield the batches of the rest of the pass.

        It ends early when `observe` goes on to the next level. RunError: a whole pass has too few prompts for a batch.
        """
        level, rows, batch = self.level, self._shuffle_rows(), list[DatumSpec]()
        if self._drawn == 0:
            self.left_out = 0
        while self._drawn < len(rows):
            datum = self._dataset[rows[self._drawn]]
            self._drawn += 1
            if datum["loss_multiplier"] == 0:
                self.left_out += 1
                continue
            batch.append(datum)
            if len(batch) == self.prompts_per_batch:
                self._batches += 1
                yield batch
                batch = []
                if self.level != level:
                    return
        if self._batches == 0:
            text = f"not one batch of {self.prompts_per_batch} prompts of level {level}: it has {len(rows)} rows"
            raise RunError(f"{text}, of which {self.left_out} are left out as too long or refused")
        self.epoch += 1
        self._drawn = self._batches = 0

    def observe(self, outcomes: Sequence[Outcome]) -> str | None:
        """Count responses; if they are accurate, begin the next level and describe why."""
        level, window = self.level, self._config.window
        verdicts = [bool(outcome.correct) for outcome in outcomes if self._row_levels[outcome.prompt_idx] == level]
        self._verdicts = [*self._verdicts, *verdicts][-window:]
        higher, accuracy = [number for number in self._rows if number > level], sum(self._verdicts) / window
        if not higher or len(self._verdicts) < window or accuracy < self._config.raise_at:
            return None
        self.level, self._verdicts = min(higher), []
        self._drawn = self._batches = 0
        return f"{accuracy:.0%} of {window} responses to level {level} are correct: level {self.level} begins"

    def state_dict(self) -> dict[str, Any]:
        position = {"epoch": self.epoch, "left_out": self.left_out, "drawn": self._drawn, "batches": self._batches}
        return {**position, "level": self.level, "verdicts": list(self._verdicts), "rows": len(self._row_levels)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("level") not in self._rows or state["rows"] != len(self._row_levels):
            text = "the checkpoint was written by a run with other rows, or without a curriculum"
            raise ConfigError([Problem(f"data.curriculum.column={self._config.column}", text)])
        self.epoch, self.left_out, self._drawn = state["epoch"], state["left_out"], state["drawn"]
        self._batches, self.level, self._verdicts = state["batches"], state["level"], list(state["verdicts"])

    def _shuffle_rows(self) -> list[int]:
        rows = self._rows[self.level]
        identity = f"{self._seed} {self.level} {self.epoch}"
        generator = torch.Generator().manual_seed(xxh3_64_intdigest(identity.encode()) >> 1)
        return [rows[index] for index in torch.randperm(len(rows), generator=generator).tolist()]


def read_levels(rows: Iterable[Mapping[str, Any]], column: str) -> list[int]:
    """Read the level of each row; ValueError: a row has none."""
    levels = []
    for number, row in enumerate(rows):
        level = row.get(column)
        if not isinstance(level, int) or isinstance(level, bool) or level < 0:
            raise ValueError(f"names no level: usable row {number} has {level!r} there, not a whole number from 0")
        levels.append(level)
    return levels
