"""Rows of reasoning_gym: a mixture of its tasks, by level, with held-out rows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_grpo.config.errors import select_first_line, suggest_name
from megatron_grpo.config.gym_schema import GymConfig

LEVEL = "level"  # column with the level of a row
ENTRY = "gym_entry"  # column with the `GymEntry` of a row

# The library draws a row from (seed + number of the row), so seeds that are near each other share rows.
SEED_DISTANCE = 2**20
_MOST_DRAWS = 20  # draws for a training row, each of which may give the question of a held-out row


class GymError(ValueError):
    """The library is not installed, or cannot make these rows."""


@dataclass(frozen=True, slots=True)
class GymEntry:
    """A row as the scorer of its task needs it."""

    task: str
    options: Mapping[str, Any] = field(repr=False)  # of the task's dataset
    item: Mapping[str, Any] = field(repr=False)  # question, answer and metadata, as the library made them


def import_library() -> Any:
    """Import reasoning_gym; GymError: it is not installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise GymError(f"needs the library: pip install 'megatron_grpo[reasoning_gym]' ({error})") from error
    return reasoning_gym


def create_dataset(task: str, options: Mapping[str, Any]) -> Any:
    """Make a task's dataset; GymError: unknown task, or options that do not fit."""
    library = import_library()
    if task not in library.factory.DATASETS:
        raise GymError(f"has no task {task}{suggest_name(task, library.factory.DATASETS)}")
    try:
        return library.create_dataset(task, **options)
    except Exception as error:  # tasks check their options with assertions, and raise anything
        raise GymError(f"refuses {dict(options)} of the task {task}: {select_first_line(error)}") from error


class GymRows:
    """The rows of a split: train, or test with held-out rows; a `Source`.

    Training rows with the question of a held-out row are drawn again.
    """

    name = "reasoning_gym"
    media: Mapping[str, str] = {}  # rows are texts

    def __init__(self, config: GymConfig, split: str) -> None:
        if not config.tasks:
            raise GymError("has no tasks; give data.reasoning_gym.tasks.NAME.weight=1")
        if split not in ("train", "test"):
            raise GymError(f"has no split {split!r}; there are train, and test with held-out rows")
        count = config.rows if split == "train" else config.held_out_rows
        if count * _MOST_DRAWS >= SEED_DISTANCE:
            raise GymError(f"makes at most {SEED_DISTANCE // _MOST_DRAWS} rows of each level, not {count}")
        self._config, self._split, self._count = config, split, count
        self._datasets: dict[tuple[str, int, int], Any] = {}  # by task, level and draw
        held_out: set[str] = (
            {row["prompt"] for row in GymRows(config, "test").read_all()} if split == "train" else set()
        )
        levels = range(config.levels or 1)
        self.rows: list[dict[str, Any]] = [
            self._draw_row(level, number, held_out) for level in levels for number in range(count)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        return self.rows[number]

    def read_all(self) -> Iterator[dict[str, Any]]:
        """Read all rows in order."""
        return iter(self.rows)

    def locate(self, number: int) -> str:
        """Locate a row for messages."""
        return f"{self.name}, row {number} of the split {self._split}"

    def _draw_row(self, level: int, number: int, held_out: set[str]) -> dict[str, Any]:
        tasks = sorted(self._config.tasks)
        weights = [self._config.tasks[name].weight for name in tasks]
        (task,) = random.Random(f"{self._seed} {level} {number}").choices(tasks, weights)
        for draw in range(_MOST_DRAWS):
            options, dataset = self._open_dataset(task, level, draw)
            item = dataset[number]
            if item["question"] not in held_out:
                # Some tasks have no reference answer; only their scorers know which answers are right.
                answer = "" if item["answer"] is None else str(item["answer"])
                entry = GymEntry(task, options, item)
                return {"prompt": item["question"], "answer": answer, "gym_task": task, LEVEL: level, ENTRY: entry}
        raise GymError(
            f"makes hardly a question of {task} (level {level}) that is not held out; give fewer "
            "data.reasoning_gym.held_out_rows, or options with more questions"
        )

    @property
    def _seed(self) -> int:
        return (2 * self._config.seed + (self._split == "test")) * SEED_DISTANCE

    def _open_dataset(self, task: str, level: int, draw: int) -> tuple[dict[str, Any], Any]:
        key = task, level, draw
        if key not in self._datasets:
            options = find_options(task, self._config, level)
            seed = self._seed + draw * self._count
            self._datasets[key] = options, create_dataset(task, {**options, "seed": seed, "size": self._count})
        return self._datasets[key]


def find_options(task: str, config: GymConfig, level: int) -> dict[str, Any]:
    """Find a task's options at a level of the library's curriculum.

    GymError: the task has no curriculum, or it has an unusable option or level.
    """
    options = config.tasks[task].options
    for name in {"seed", "size"} & options.keys():
        raise GymError(f"sets {name} of {task} by data.reasoning_gym.{'seed' if name == 'seed' else 'rows'}")
    if config.levels is None:
        return dict(options)
    factory = import_library().factory
    if not factory.has_curriculum(task):
        raise GymError(f"has no curriculum for {task}; leave data.reasoning_gym.levels=null")
    curriculum = factory.create_curriculum(task)
    level_count = max((len(attribute.levels) for attribute in curriculum.attributes.values()), default=0)
    if config.levels > level_count:
        raise GymError(
            f"has {level_count} levels of {task}, not {config.levels}; give data.reasoning_gym.levels={level_count}"
        )
    curriculum.set_global_level(level)
    try:
        return asdict(curriculum.generate_configuration(defaults=dict(options)))
    except TypeError as error:
        raise GymError(f"refuses {dict(options)} of the task {task}: {select_first_line(error)}") from error
