"""The keys of rows that the library reasoning_gym makes."""

from __future__ import annotations

from dataclasses import field

from megatron_grpo.config.section import GymOptions, Positive, PositiveFloat, Section, Seed


class GymTaskConfig(Section):
    """One task of reasoning_gym."""

    weight: PositiveFloat = 1.0
    """Share of the rows, relative to the other tasks."""

    options: GymOptions = field(default_factory=dict)
    """Difficulty and further parameters of the task, such as min_digits; the library's documentation has them."""


class GymConfig(Section):
    """Rows of reasoning_gym, which data.train_path=reasoning_gym makes; docs/environments.md."""

    tasks: dict[str, GymTaskConfig] = field(default_factory=dict)
    """The tasks, by their names in the library, such as chain_sum."""

    rows: Positive = 4096
    """Training rows of each level. None of them has the question of a held-out row."""

    held_out_rows: Positive = 256
    """Rows of each level with the split test (data.val_split), made from other seeds than the training rows."""

    seed: Seed = 0
    """Seed of all rows."""

    levels: Positive | None = None
    """Levels of the library's curricula, from the easiest, each with its own rows; data.curriculum.column=level begins
    with the first. null: rows of the options alone."""
