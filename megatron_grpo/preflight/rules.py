"""Rules that a configuration has to follow.

A check is a function that yields rules. A rule is a tuple (is it broken?, subject, text), for instance

    yield loop.val_period == 0 and stop.enabled, "LOOP.early_stop.enabled=", "decides after a validation; ..."

Rules that compare settings with values or with each other are rows of config/conflicts.yaml instead.

Nothing is raised: the broken rules of all checks become one message, with a line "SUBJECT  TEXT" for each. A subject
that ends in = is a key, and gets its value (`grpo.early_stop.enabled=True`). In subjects and texts LOOP stands for the
section of the loop that runs (grpo, ppo, sft, ...), and PASSES for its key of the passes over a step's samples.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec

from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.keys import fill_placeholders, is_met, load_tables
from megatron_grpo.config.schema import Config

# (whether it is broken: any value that is true, subject, text)
Rule = tuple[object, str, str]
P = ParamSpec("P")
# Conflicting settings: by table, the conditions under which a row is a mistake, and the text of its message.
CONFLICTS = load_tables("conflicts.yaml")


def list_conflicts(config: Config, table: str) -> Iterator[Rule]:
    """Yield the broken rules of a table of config/conflicts.yaml."""
    for row, text in CONFLICTS[table].items():
        if is_met(config, row):
            key = re.split("[!= ]", row, maxsplit=1)[0]
            filled_text = fill_placeholders(config, text)
            yield True, f"{key}=", re.sub(r"{([\w.]+)}", lambda match: _format_value(config, match[1]), filled_text)


def find_broken_rules(config: Config, rules: Iterable[Rule]) -> Iterator[Problem]:
    """Yield a problem for each broken rule, in their order."""
    for is_broken, subject, text in rules:
        if is_broken:
            key = fill_placeholders(config, subject)
            value = _format_value(config, key[:-1]) if key.endswith("=") else ""
            yield Problem(key + value, fill_placeholders(config, text))


def evaluate_rules(
    check: Callable[Concatenate[Config, P], Iterator[Rule]],
) -> Callable[Concatenate[Config, P], Iterator[Problem]]:
    """Make a check yield the problems of its broken rules (decorator)."""

    @functools.wraps(check)
    def find_problems(config: Config, *args: P.args, **kwargs: P.kwargs) -> Iterator[Problem]:
        return find_broken_rules(config, check(config, *args, **kwargs))

    return find_problems


def _format_value(config: Config, key: str) -> str:
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    # Floats are written short (0.001) where that loses no digit.
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else to_text(value)
