"""Writing the rollouts of a step to the run's folder, while the step goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_grpo.cluster.futures import gather
from megatron_grpo.config.schema import LoggerConfig
from megatron_grpo.data.trajectory import SampledGroup
from megatron_grpo.observability.run_files import ROLLOUTS_FOLDER
from megatron_grpo.rollouts.pool import RolloutPool

DEADLINE_S = 600.0
"""For the rollouts of one step to be on disk, counted from when the step waits for them."""


class RolloutDumps:
    """Starts the writing as soon as a step has its rollouts; the step is reported only when they are on disk."""

    def __init__(self, rollouts: RolloutPool, config: LoggerConfig, run_dir: Path) -> None:
        """
        Args:
            rollouts: whose workers write.
            config: which rollouts are written.
            run_dir: the run's folder.
        """
        self._rollouts, self._config = rollouts, config
        self._folder = run_dir / ROLLOUTS_FOLDER
        self._writing: dict[int, Any] = {}

    def begin(self, step: int, groups: list[SampledGroup]) -> None:
        """Have the rollouts of a step written, as logger.rollouts says which."""
        if self._config.rollouts != "off":
            limit = self._config.rollouts_sample if self._config.rollouts == "sample" else None
            self._writing[step] = self._rollouts.dump(step, groups, self._folder, limit)

    def finish(self, step: int) -> None:
        """Return when the rollouts of a step are on disk.

        Raises:
            RunError: they could not be written.
        """
        if step in self._writing:
            name = "rollout worker {}".format
            gather(
                [self._writing.pop(step)], deadline_s=DEADLINE_S, what=f"writing the rollouts of step {step}", name=name
            )
