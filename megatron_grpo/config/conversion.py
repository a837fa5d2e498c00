"""Converts plain values into a typed Config, and reports misfits."""

from __future__ import annotations

import typing
from dataclasses import asdict
from itertools import islice
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megatron_grpo.config.algorithms import explain_foreign_key, find_algorithm
from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.keys import describe_type, find_key, flatten, list_members, read_keys
from megatron_grpo.config.loop_names import is_shared
from megatron_grpo.config.loop_schema import LOOPS, SampledLoopConfig
from megatron_grpo.config.schema import MISSING, Config
from megatron_grpo.config.suggestions import describe_unknown_key, list_unknown_keys

MOST_PROBLEMS = 100  # that a message has
_ADAPTER = TypeAdapter(Config)


def convert_values(values: dict[str, Any], algorithm: str) -> tuple[Config | None, list[Problem]]:
    """Convert values to a Config (None if that fails), and report their problems.

    Wrong values are removed from `values`, so that keys take their defaults. Suggestions use the algorithm's names.
    """
    problems = []
    for name, value in list(flatten(values)):
        # pydantic would read booleans as the numbers 1 and 0, and as texts.
        key = find_key(name) if isinstance(value, bool) else None
        if key is not None and "true or false" not in read_keys()[key].type:
            problems.append(Problem(f"{name}={value}", f"must be {read_keys()[key].type}"))
            _remove(values, tuple(name.split(".")))
    # The second try, without the wrong values, gives later checks a Config with defaults in their place.
    for _ in range(2):
        try:
            return _ADAPTER.validate_python(values), problems
        except ValidationError as error:
            details = error.errors(include_url=False)
        for detail in details:
            if len(problems) < MOST_PROBLEMS:  # each looks for a similar key
                problems += _describe_error(detail, algorithm)
            _remove(values, detail["loc"])
        if len(problems) >= MOST_PROBLEMS < len(details):
            problems = [*problems[:MOST_PROBLEMS], Problem(f"{len(details) - MOST_PROBLEMS} others", "are wrong, too")]
    return None, problems


def refuse_other_loops(values: dict[str, Any], algorithm: str) -> list[Problem]:
    """Remove the keys of other loops, and report changed ones.

    Shared keys under other loops' names have no effect: their values stand under the own name, too.
    """
    method, problems = find_algorithm(algorithm), []
    run_loop = method.section
    for loop, section_type in LOOPS.items():
        if not isinstance(section := values.get(loop), dict):
            continue  # refused when types are checked
        defaults = dict(flatten(asdict(SampledLoopConfig()) | asdict(section_type()), f"{loop}."))
        for name in list(section):
            if loop == run_loop and method.has_read(f"{loop}.{name}"):
                continue
            for key, value in flatten({name: section.pop(name)}, f"{loop}."):
                if loop != run_loop and is_shared(key):
                    continue
                if find_key(key) is None:
                    problems.append(describe_unknown_key(key, algorithm))
                elif value != defaults[key]:
                    problems.append(Problem(f"{key}={to_text(value)}", explain_foreign_key(key, method)))
        if loop != run_loop:
            del values[loop]
    return problems


def convert_argument(name: str, text: str, kind: Any) -> Any:
    """Convert an argument NAME=TEXT, or raise ValueError; a list is written [a,b]."""
    value = text.removeprefix("[").removesuffix("]").split(",") if typing.get_origin(kind) is list else text
    try:
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_python(value)
    except ValidationError:
        raise ValueError(f"{name}={to_text(text)} must be {describe_type(kind)}") from None


def find_missing_keys(values: dict[str, Any], problem_keys: set[str]) -> list[Problem]:
    """Report required keys without a value, except `problem_keys`."""
    leaves = dict(flatten(values))
    is_replaced = leaves.get("data.from_rollouts") or any(name.startswith("data.train_sets") for name in leaves)
    replaced = {"data.train_path"} if is_replaced else set()
    return [
        Problem(name, f"is required: {' '.join(key.doc.split())}")
        for name, key in read_keys().items()
        if name not in problem_keys | replaced and "<" not in name and leaves.get(name) == MISSING
    ]


def _describe_error(detail: ErrorDetails, algorithm: str) -> list[Problem]:
    name = ".".join(str(part) for part in detail["loc"])
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        unknown_keys = islice(list_unknown_keys(name, detail["input"]), MOST_PROBLEMS)
        return [describe_unknown_key(unknown, algorithm) for unknown in unknown_keys]
    subject = f"{name}={to_text(detail['input'])}"
    key = find_key(name)
    if detail["type"] == "value_error":
        return [Problem(subject, str(detail["ctx"]["error"]))]
    if key is not None:
        text = f"must be {read_keys()[key].type}"
        if isinstance(detail["input"], list) and name in ("data.train_path", "data.val_path"):
            text += f"; several sets are {name.removesuffix('path')}sets.NAME.path=..."
        return [Problem(subject, text)]
    # pydantic names the element of a list by its index, and the type is that of the list.
    list_key = find_key(".".join(str(part) for part in detail["loc"][:-1]))
    if list_key is not None:
        return [Problem(subject, f"is an element of what must be {read_keys()[list_key].type}")]
    members = list_members(name)
    return [Problem(subject, f"must be a section with keys of its own{': ' if members else ''}{', '.join(members)}")]


def _remove(values: dict[str, Any], loc: tuple[int | str, ...]) -> None:
    node: Any = values
    for part in loc[:-1]:
        if not isinstance(node.get(part), dict):
            node.pop(part, None)
            return
        node = node[part]
    node.pop(loc[-1], None)
