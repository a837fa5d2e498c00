"""A recording in the place of the loader of training prompts: which steps it has, where in the data each ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.recording import recorded_steps


class RecordedSteps:
    """The steps of an earlier run. Its position in the data goes along, so that checkpoints are as that run's."""

    def __init__(self, path: str, prompts_per_batch: int) -> None:
        """
        Args:
            path: folder of the run, or its folder of rollouts.
            prompts_per_batch: prompts that the run sampled together.
        """
        self.path, self.prompts_per_batch = path, prompts_per_batch
        self.epoch = 0
        """Epochs that the run had completed."""
        self.left_out = 0
        """No rows are left out: none are read."""
        self.files: Mapping[int, Path] = recorded_steps(path)
        """The file of each step."""
        self._position: dict[str, Any] = {"epoch": 0}

    def __iter__(self) -> Iterator[list[DatumSpec]]:
        """No prompts: the rollouts are there."""
        return iter(())

    def waiting_batches(self) -> Iterator[list[DatumSpec]]:
        """None."""
        return iter(())

    def state_dict(self) -> dict[str, Any]:
        """State of the run's loader after the last step that was read; JSON-serialisable."""
        return self._position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of the run's loader after a step."""
        self._position, self.epoch = state, int(state["epoch"])

    def require_reach(self, step: int) -> None:
        """Check that the recording has this step, the next one, or ended before it.

        Raises:
            ConfigError: it begins later.
        """
        if min(self.files) > step:
            text = f"begins with step {min(self.files)}, and this run with step {step}; start from the checkpoint that "
            raise ConfigError([Problem(f"debug.rollouts_from={self.path}", f"{text}the recorded run started from")])

    @property
    def used_up(self) -> str:
        """Why the run ends when no step is left."""
        return f"the recording is used up: {self.path} ends with step {max(self.files)}"
