"""Objects that a script passes to a run: reward functions, a tokenizer, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError


class Callback:
    """Override what is of interest. Called in the driver, between the stages of the run, which waits for it."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """After a step was logged.

        Args:
            step: steps so far.
            metrics: the figures of the step, as in metrics.jsonl.

        Returns:
            True ends training after this step, which is validated and saved as the last one always is.
        """
        return None

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """After a validation; its figures, as in validation.jsonl."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """When a checkpoint is complete in its folder."""

    def on_end(self, step: int) -> None:
        """When training has ended, and its last checkpoint is written; not after a failure."""


class Callbacks:
    """Several callbacks as one; what they raise ends the run, and says whose it was."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        self.stop = False
        """Whether one of them wants training to end."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell all; sets `stop` when one of them says so."""
        answers = self._tell("on_step", step, metrics)
        self.stop = self.stop or any(answers)

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Tell all."""
        self._tell("on_validation", step, metrics)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Tell all."""
        self._tell("on_checkpoint", step, folder)

    def on_end(self, step: int) -> None:
        """Tell all."""
        self._tell("on_end", step)

    def _tell(self, event: str, *arguments: Any) -> list[Any]:
        answers = []
        for callback in self._callbacks:
            try:
                answers.append(getattr(callback, event)(*arguments))
            except RunError:
                raise
            except Exception as error:  # whatever a script's callback raises
                name = f"{type(callback).__name__}.{event}"
                raise RunError(f"callback {name} raised {type(error).__name__}: {error}") from error
        return answers


@dataclass(frozen=True, slots=True, kw_only=True)
class UserObjects:
    """Objects of a script; the defaults are those of the command line, which has none."""

    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Reward functions that cannot be imported, by their entry in reward_funcs."""
    tokenizer: Any = None
    """Tokenizer of the prompts; None: that of the model's folder."""
    callbacks: Sequence[Callback] = ()
