"""Errors that a command line reports without a traceback, and their texts."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megatron_grpo.config.hiding import hide_secrets
from megatron_grpo.config.outside_text import make_line, replace_all_controls

_MAX_VALUE_CHARACTERS, _MAX_SUBJECT_CHARACTERS = 120, 2000


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a configuration: its subject, usually key=value, and advice; without secrets."""

    subject: str
    text: str

    def __post_init__(self) -> None:
        subject = self.subject if len(self.subject) <= _MAX_SUBJECT_CHARACTERS else make_line(self.subject)
        object.__setattr__(self, "subject", hide_secrets(subject))
        object.__setattr__(self, "text", hide_secrets(self.text))

    @property
    def key(self) -> str:
        """The configuration key at the start of the subject."""
        return self.subject.partition("=")[0]


class ConfigError(ValueError):
    """All problems of a configuration: a headline and a line for each, aligned."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a configuration error without a problem"
        self.problems = tuple(problems)
        # One long subject does not push the texts of all others to the right.
        width = min(max(len(problem.subject) for problem in problems), 60)
        lines = (f"  {problem.subject:<{width}}  {problem.text}" for problem in problems)
        super().__init__("\n".join([f"configuration has {format_count('problem', len(problems))}:", *lines]))


class RunError(RuntimeError):
    """A failure that the user can act on, with the whole message, without secrets."""

    def __init__(self, text: str = "") -> None:
        super().__init__(hide_secrets(str(text)))


class ResponseError(RunError):
    """Code failed over a response, which is perhaps to blame: that is tried (rollouts/failures.py)."""


class SamplingError(RunError):
    """Sampling or scoring failed; models are unchanged and can be saved."""


class DisagreementError(SamplingError):
    """Training and generation disagree too much to learn from a step.

    `metrics` has the metrics of the step.
    """

    def __init__(self, text: str, metrics: Mapping[str, float]) -> None:
        super().__init__(text)
        self.metrics = metrics


class ModelLostError(RunError):
    """A rank of a model is gone or hangs; nothing can be saved."""


class EngineLostError(RuntimeError):
    """An engine has ended or hangs, and has to be replaced."""


class CanaryError(RuntimeError):
    """An engine with the policy's weights computes different numbers."""


def format_count(word: str, count: int) -> str:
    """Write a number with its noun: "1 row", "2 rows"."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def suggest_name(name: str, candidates: Iterable[str], form: str = "{}", otherwise: str | None = None) -> str:
    """End a message about an unknown name: "; did you mean policy?".

    `form` has {} for a candidate. `otherwise` is the end if no candidate is similar; None: a list of all candidates.
    """
    names = list(candidates)
    if close := difflib.get_close_matches(name, names, n=1):
        return f"; did you mean {form.format(close[0])}?"
    return f"; there is {', '.join(map(form.format, names)) or 'none'}" if otherwise is None else otherwise


def select_first_line(error: BaseException) -> str:
    """Select the first line of an error's message; its class if it has none."""
    # The other lines of a library's message often say where it was raised.
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip()


def to_text(value: object) -> str:
    """Format a value for one line; None as null, long values cut."""
    try:
        text = "null" if value is None else str(value)
    except ValueError:  # Python does not convert integers of more than 4300 digits to text
        return "(a number of thousands of digits)"
    if len(text) > _MAX_VALUE_CHARACTERS:
        text = f"{text[:_MAX_VALUE_CHARACTERS]}... ({len(text)} characters)"
    return replace_all_controls(text)
