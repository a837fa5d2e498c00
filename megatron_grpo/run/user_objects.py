"""Objects that a script passes to a run: reward functions, a tokenizer, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_grpo.config.errors import RunError


class Callback:
    """Base class of callbacks, which the driver calls between stages."""

    def on_start(self, step: int, run_dir: Path) -> None:
        """Called when all processes are up, after `step` steps."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool | Literal["save"] | None:
        """Called after a step was logged.

        Args:
            step: steps so far.
            metrics: the figures of the step, as in metrics.jsonl.

        Returns:
            True ends training after this step, which is then validated and saved like every last step. "save" writes a
            checkpoint, for which on_checkpoint is called; python -m megatron_grpo.export makes a model of its folder.
        """
        return None

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a validation; `metrics` are its figures, as in validation.jsonl."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called when a checkpoint is complete in `folder`."""

    def on_end(self, step: int) -> None:
        """Called when training has ended and its last checkpoint is written."""


class Callbacks:
    """Several callbacks as one."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        self.wants_stop = False
        """True: on_step of a callback has asked to end training."""
        self.wants_checkpoint = False
        """True: on_step of a callback has asked for a checkpoint of the last step."""

    def notify(self, event: str, *arguments: Any) -> None:
        """Call a method of every callback; raises RunError if that fails."""
        if event == "on_step":
            self.wants_checkpoint = False
        for callback in self._callbacks:
            try:
                answer = getattr(callback, event)(*arguments)
            except RunError:
                raise
            except Exception as error:  # a script's callback may raise anything
                name = f"{type(callback).__name__}.{event}"
                raise RunError(f"callback {name} raised {type(error).__name__}: {error}") from error
            if event == "on_step":
                self.wants_checkpoint = self.wants_checkpoint or answer == "save"
                self.wants_stop = self.wants_stop or (bool(answer) and answer != "save")


@dataclass(frozen=True, slots=True, kw_only=True)
class UserObjects:
    """Objects that a script passes to a run."""

    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Reward functions that cannot be imported, by their name in reward_funcs."""
    tokenizer: Any = None
    """Tokenizer of the prompts; None: the tokenizer of the model's folder."""
    callbacks: Sequence[Callback] = ()
