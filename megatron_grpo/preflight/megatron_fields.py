"""Checks of the fields that users pass on to Megatron-Core: names and types, and that the run leaves them free."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from megatron_grpo.config.errors import Problem, shown
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.megatron_classes import megatron_fields
from megatron_grpo.preflight.megatron_owned import CLASSES, OWNED


def megatron_field_problems(config: Config) -> Iterator[Problem]:
    """Fields in policy.megatron, policy.ddp and policy.megatron_optimizer that the installed Megatron-Core does not
    have, whose values are of another type, or which the run sets itself."""
    for section in CLASSES:
        for name, value in getattr(config.policy, section).items():
            text = _refusal(section, str(name), value)
            if text is not None:
                yield Problem(f"policy.{section}.{name}={shown(value)}", text)


def _refusal(section: str, name: str, value: Any) -> str | None:
    """Why a field is not passed on; None: it is."""
    owned = OWNED[section].get(name)
    if owned is not None:
        return f"is set by the run itself: {owned}"
    try:
        fields = megatron_fields(*CLASSES[section])
    except ModuleNotFoundError:
        return "cannot be checked: Megatron-Core is not installed here"
    field = None if name.startswith("_") else fields.get(name)
    if field is not None:
        return field.refuses(value)
    free = [one for one in fields if one not in OWNED[section] and not one.startswith("_")]
    close = difflib.get_close_matches(name, free, n=1)
    hint = f"; did you mean policy.{section}.{close[0]}?" if close else ""
    return f"is no field of Megatron-Core's {CLASSES[section][1]}{hint}"
