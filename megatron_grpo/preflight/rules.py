"""Rules that a configuration has to follow.

A check is a function that yields rules. A rule is a tuple (is it broken?, subject, text), for instance

    yield loop.val_period == 0 and stop.enabled, "LOOP.early_stop.enabled=", "decides after a validation; ..."

Nothing is raised: the broken rules of all checks become one message, with a line "SUBJECT  TEXT" for each. A subject
that ends in = is a key, and gets its value (`grpo.early_stop.enabled=True`). In subjects and texts LOOP stands for the
section of the loop that runs (grpo, ppo, sft, ...), and PASSES for its key of the passes over a step's samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec

from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.schema import Config, PolicyConfig, ValueConfig

# (whether it is broken: any value that is true, subject, text)
Rule = tuple[object, str, str]
P = ParamSpec("P")


def list_trained_models(config: Config) -> dict[str, PolicyConfig | ValueConfig]:
    """Map sections to the models that the run trains."""
    models: dict[str, PolicyConfig | ValueConfig] = {"policy": config.policy}
    return models | {"value": config.value} if config.method.has_value_model else models


def find_broken_rules(config: Config, rules: Iterable[Rule]) -> Iterator[Problem]:
    """Yield a problem for each broken rule, in their order."""
    for is_broken, subject, text in rules:
        if is_broken:
            key = fill_placeholders(config, subject)
            value = format_value(_find_value(config, key[:-1])) if key.endswith("=") else ""
            yield Problem(key + value, fill_placeholders(config, text))


def evaluate_rules(
    check: Callable[Concatenate[Config, P], Iterator[Rule]],
) -> Callable[Concatenate[Config, P], Iterator[Problem]]:
    """Make a check yield the problems of its broken rules (decorator)."""

    @functools.wraps(check)
    def find_problems(config: Config, *args: P.args, **kwargs: P.kwargs) -> Iterator[Problem]:
        return find_broken_rules(config, check(config, *args, **kwargs))

    return find_problems


def fill_placeholders(config: Config, text: str) -> str:
    """Replace LOOP and PASSES in a text by the algorithm's keys."""
    loop = config.loop_name
    return text.replace("LOOP.", f"{loop}.").replace("PASSES", f"{loop}.{config.loop.passes_name}")


def format_value(value: object) -> str:
    """Write the value of a key as messages have it."""
    # Floats are written short (0.001) where that loses no digit.
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else to_text(value)


def _find_value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value
