"""Options of users' classes and functions: parameters, converted by their annotations."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_grpo.config.errors import suggest_name, to_text


@functools.cache
def list_parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """List the parameters that may be given by name."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # an annotation names a class that only type checkers import
        signature = inspect.signature(function)
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: parameter for name, parameter in signature.parameters.items() if parameter.kind in by_keyword}


def convert_options(
    owner: str, parameters: Mapping[str, inspect.Parameter], options: Mapping[str, Any]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Convert options to the types of parameters.

    Values are converted like those of the configuration: "3" is accepted as a number, "three" is not. `owner` is the
    name of the class or function. Problems are pairs of NAME=VALUE and reason.
    """
    arguments: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    for name, value in options.items():
        if name not in parameters:
            problems.append(
                (f"{name}={to_text(value)}", f"is not an option of {owner}{suggest_name(name, parameters)}")
            )
            continue
        try:
            hint = parameters[name].annotation
            has_type = hint is not inspect.Parameter.empty and not isinstance(hint, str)
            # As a list of one: pydantic refuses `config` for a type with a configuration of its own (a dataclass).
            list_type: Any = GenericAlias(list, hint if has_type else Any)
            adapter = TypeAdapter(list_type, config=ConfigDict(coerce_numbers_to_str=True))
            (arguments[name],) = adapter.validate_python([value])
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            problems.append((f"{name}={to_text(value)}", f"does not fit {owner}: {reason}"))
    required = (name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty)
    return arguments, problems + [(name, f"is required by {owner}") for name in required if name not in options]
