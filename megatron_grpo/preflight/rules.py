"""Rules that a configuration has to follow, and the problems of those that it breaks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec

from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.keys import fill_placeholders
from megatron_grpo.config.schema import Config

Rule = tuple[object, str, str]
"""A rule: whether it is broken (any value that is true), the subject and the text of its problem.

A subject that ends in = (KEY=) gets the value of that key. In subject and text, LOOP stands for the section of the
algorithm that runs, and PASSES for the key of its passes over the samples of a step.
"""


def find_broken_rules(config: Config, rules: Iterable[Rule]) -> Iterator[Problem]:
    """The problems of a configuration, in the order of the rules that it breaks."""
    for is_broken, subject, text in rules:
        if is_broken:
            key = fill_placeholders(config, subject)
            yield Problem(
                key + _written(_value(config, key[:-1])) if key.endswith("=") else key, fill_placeholders(config, text)
            )


_Arguments = ParamSpec("_Arguments")


def evaluate_rules(
    rules: Callable[Concatenate[Config, _Arguments], Iterator[Rule]],
) -> Callable[Concatenate[Config, _Arguments], Iterator[Problem]]:
    """Decorator of a function that yields rules: it yields the problems of those that the configuration breaks."""

    @functools.wraps(rules)
    def problems(config: Config, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Iterator[Problem]:
        return find_broken_rules(config, rules(config, *args, **kwargs))

    return problems


def _value(config: Config, key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    return node


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else to_text(value)
