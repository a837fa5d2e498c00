"""Objects that a script passes to a run: reward functions, a tokenizer, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError


class Callback:
    """Base class of callbacks. The driver calls their methods between the stages of a run, and waits for them."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Called after a step was logged.

        Args:
            step: steps so far.
            metrics: the figures of the step, as in metrics.jsonl.

        Returns:
            True ends training after this step, which is then validated and saved like every last step.
        """
        return None

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a validation; `metrics` are its figures, as in validation.jsonl."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called when a checkpoint is complete in `folder`."""

    def on_end(self, step: int) -> None:
        """Called when training has ended and its last checkpoint is written; not called after a failure."""


class Callbacks:
    """Several callbacks as one."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        self.stop = False
        """Whether on_step of a callback has asked to end training."""

    def tell(self, event: str, *arguments: Any) -> None:
        """Call a method of every callback.

        Raises:
            RunError: a callback raised an error; the message names both.
        """
        for callback in self._callbacks:
            try:
                answer = getattr(callback, event)(*arguments)
            except RunError:
                raise
            except Exception as error:  # whatever a script's callback raises
                name = f"{type(callback).__name__}.{event}"
                raise RunError(f"callback {name} raised {type(error).__name__}: {error}") from error
            self.stop = self.stop or (event == "on_step" and bool(answer))


@dataclass(frozen=True, slots=True, kw_only=True)
class UserObjects:
    """Objects that a script passes to a run; the defaults are for the command line, which passes none."""

    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Reward functions that cannot be imported, by their entry in reward_funcs."""
    tokenizer: Any = None
    """Tokenizer of the prompts; None: the tokenizer of the model's folder."""
    callbacks: Sequence[Callback] = ()
