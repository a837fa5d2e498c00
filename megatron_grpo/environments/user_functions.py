"""Imports a user's reward functions and agents, and checks their parameters."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.paths import import_callable
from megatron_grpo.data.scores import REWARD_ARGUMENTS

# Takes prompts=, completions= and columns; returns a reward (None: no reward) per completion, or a coroutine of them.
RewardFunction = Callable[..., Any]
# Takes prompt=, access= and the columns of the row; returns any value, or a coroutine of it.
AgentFunction = Callable[..., Any]


def load_reward_function(path: str) -> RewardFunction:
    """Import a reward function, or instantiate its class."""
    function = import_callable("reward function", path, instance=True)
    check_parameters(path, function)
    return function


def check_parameters(path: str, function: RewardFunction, columns: Collection[str] | None = None) -> None:
    """Check that a function accepts prompts, completions and columns by name.

    `columns` are all columns of the rows that the function will score; None: unknown. RunError if it does not.
    """
    text = f"reward function {path} must take prompts and completions by name (or **kwargs)"
    # A wrapper may turn keywords into positions, so the parameters of the wrapper itself count here.
    required = list_required_parameters(function, follow_wrapped=False)
    unnamed = [parameter.name for parameter in required if parameter.kind is inspect.Parameter.POSITIONAL_ONLY]
    if unnamed:
        raise RunError(f"{text}; it takes {', '.join(unnamed)} by position only: leave the / out of its parameters")
    names = list_accepted_names(function)
    if names is not None and not names & {"prompts", "completions", "completion_ids"}:
        raise RunError(f"{text}; it takes {', '.join(sorted(names)) or 'nothing'}")
    check_columns(f"reward function {path}", function, REWARD_ARGUMENTS, columns)


def check_columns(
    subject: str, function: Callable[..., Any], arguments: Sequence[str], columns: Collection[str] | None
) -> None:
    """Check that the data has every column that a function needs; RunError if not."""
    required_names = [parameter.name for parameter in list_required_parameters(function)]
    missing = [name for name in required_names if name not in (*arguments, *(columns or ()))]
    if columns is not None and missing:
        names = ", ".join(sorted(columns)) or "none"
        raise RunError(f"{subject} takes {', '.join(missing)}, and the data has no such column; it has {names}")


def load_agent_function(path: str) -> AgentFunction:
    """Import an agent from package.module.function; RunError if unusable."""
    function = import_callable("agent", path)
    try:
        inspect.signature(function).bind_partial(prompt="", access=None)
    except (TypeError, ValueError) as error:
        raise RunError(f"agent {path} must take prompt and access by name (or **kwargs): {error}") from error
    return function


def find_place(error: Exception, owner: Any) -> str:
    """Find an exception's file and line, in the owner's module if possible."""
    frames = traceback.extract_tb(error.__traceback__)
    module = sys.modules.get(getattr(owner, "__module__", None) or "")
    # The innermost frame of the user's module: an exception of a library would name a file that the user did not write.
    inner = [frame for frame in frames if frame.filename == getattr(module, "__file__", None)]
    frame = (inner or frames)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _list_parameters(function: RewardFunction, follow_wrapped: bool = True) -> Sequence[inspect.Parameter]:
    try:
        return list(inspect.signature(function, follow_wrapped=follow_wrapped).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def list_accepted_names(function: RewardFunction) -> frozenset[str] | None:
    """List the names that a function accepts; None: any name."""
    parameters = _list_parameters(function)
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_name)


def list_required_parameters(function: RewardFunction, follow_wrapped: bool = True) -> list[inspect.Parameter]:
    """List the parameters that a call must give."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        parameter
        for parameter in _list_parameters(function, follow_wrapped)
        if parameter.kind not in variadic and parameter.default is inspect.Parameter.empty
    ]
