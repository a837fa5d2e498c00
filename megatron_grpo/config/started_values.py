"""Values of a recorded configuration that start something: programs, code, connections."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_grpo.config.conversion import convert_argument
from megatron_grpo.config.data_schema import EnvironmentConfig, is_built_in
from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.paths import list_import_folders
from megatron_grpo.config.schema import Config
from megatron_grpo.config.section import CONNECTS, IMPORTS, SENDS_SECRET, Starts

TRUST = "trust_run"  # argument of commands that says that a run may start what it recorded
# Options of built-in environments that start something, with what they do.
STARTING_OPTIONS = {
    "judge": {"url": CONNECTS, "api_key_variable": SENDS_SECRET},
    "openenv": {"url": CONNECTS, "api_key_variable": SENDS_SECRET},
    "tools": {"servers": "starts a program, or connects to a server"},
    "verifiers": {"python": "starts a program", "environment": IMPORTS, "arguments": IMPORTS},
}
_ANYTHING = "may start anything, as the environment's class does"


@dataclass(frozen=True, slots=True)
class StartedValue:
    """A value that starts something, and its key in parts."""

    path: tuple[str, ...]
    value: Any
    effect: str

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.path)


def list_started_values(config: Config) -> list[StartedValue]:
    """List the values that start something, by the marks of the schema."""
    started = list(_walk(Config, config, ()))
    for task, environment in config.env.items():
        started += _list_started_options(environment, ("env", task, "options"))
    return started


def list_code_folders(config: Config) -> tuple[str, ...]:
    """List the folders in which a run's processes find the user's modules."""
    values = [str(started.value) for started in list_started_values(config) if started.effect == IMPORTS]
    return list_import_folders(config.run_dir, values)


def find_untrusted_values(
    config: Config, source: str, overrides: Iterable[str], sections: Sequence[str]
) -> list[Problem]:
    """Report recorded values that a command would start.

    Args:
        config: recorded values with overrides.
        source: file that recorded them, for messages.
        overrides: keys that the command line gives.
        sections: beginnings of keys that the command reads, such as "policy."; "" stands for all.
    """
    # Compared by their parts, since a recorded name may have dots that make it look like another key.
    command_line_keys = [tuple(key.split(".")) for key in overrides]
    return [
        Problem(
            f"{started.key}={to_text(started.value)}",
            f"is recorded in {source} and {started.effect}; give {TRUST}=true if you trust the run, "
            "or this key yourself",
        )
        for started in list_started_values(config)
        # Every command asks the algorithm, of the user's own folder too, what a run has.
        if started.key.startswith(("algorithm", *sections))
        and not any(started.path[: len(key)] == key for key in command_line_keys)
    ]


def split_trust(arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Split trust_run=VALUE from other arguments; ValueError: VALUE is not understood."""
    remaining = [argument for argument in arguments if not argument.startswith(f"{TRUST}=")]
    texts = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"{TRUST}=")]
    return all(convert_argument(TRUST, text, bool) for text in texts) and bool(texts), remaining


def _walk(hint: Any, value: Any, path: tuple[str, ...], mark: Starts | None = None) -> Iterator[StartedValue]:
    """Yield the marked values below a value of a type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        marks = [annotation for annotation in arguments[1:] if isinstance(annotation, Starts)]
        yield from _walk(arguments[0], value, path, marks[0] if marks else mark)
    elif origin in (types.UnionType, typing.Union):
        (member, *_) = (member for member in arguments if member is not type(None))
        yield from _walk(member, value, path, mark) if value is not None else ()
    elif origin is dict:
        for name, element in value.items():
            yield from _walk(arguments[1], element, (*path, str(name)), mark)
    elif origin is list:
        for element in value:
            yield from _walk(arguments[0], element, path, mark)
    elif isinstance(hint, type) and dataclasses.is_dataclass(hint):
        hints = _read_hints(hint)
        for field in dataclasses.fields(hint):
            yield from _walk(hints[field.name], getattr(value, field.name), (*path, field.name))
    elif mark is not None and not mark.is_harmless(value):
        yield StartedValue(path, value, mark.effect)


@cache
def _read_hints(section: type) -> dict[str, Any]:
    return typing.get_type_hints(section, include_extras=True)


def _list_started_options(environment: EnvironmentConfig, path: tuple[str, ...]) -> Iterator[StartedValue]:
    starting = STARTING_OPTIONS.get(environment.type, {})
    if not is_built_in(environment.type):
        starting = dict.fromkeys(environment.options, _ANYTHING)
    for name, value in environment.options.items():
        if name in starting:
            yield from _list_texts(value, (*path, name), starting[name])


def _list_texts(value: Any, path: tuple[str, ...], effect: str) -> Iterator[StartedValue]:
    """Yield the leaves of an option, except numbers, which start nothing."""
    if isinstance(value, dict):
        for name, element in value.items():
            yield from _list_texts(element, (*path, str(name)), effect)
    elif isinstance(value, list | str) and value:
        yield StartedValue(path, value, effect)
