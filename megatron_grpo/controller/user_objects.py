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
    """Several callbacks as one."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = list(callbacks)
        self.stop = False
        """Whether the answer of one of them to on_step ends training."""

    def tell(self, event: str, *arguments: Any) -> None:
        """Call a method of every callback.

        Raises:
            RunError: one raised something; says which and what.
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
    """Objects of a script; the defaults are those of the command line, which has none."""

    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Reward functions that cannot be imported, by their entry in reward_funcs."""
    tokenizer: Any = None
    """Tokenizer of the prompts; None: that of the model's folder."""
    callbacks: Sequence[Callback] = ()
