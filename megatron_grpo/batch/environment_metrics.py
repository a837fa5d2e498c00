"""Metrics that environments and reward functions report, kept apart from the run's own by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from megatron_grpo.batch.trajectory import REWARD_REMOVED, SCORING_RETRIES, SUSPECT_PREFIX
from megatron_grpo.config.data_schema import ENVIRONMENT_PREFIX, UNUSUALLY_SHORT
from megatron_grpo.config.outside_text import CONTROLS, NAME_CHARACTERS, mark_name

MAX_METRICS = 200  # of environments in one response, step or run; further ones are left out, with a message

logger = logging.getLogger(__name__)
# The same message about every response would fill the log.
_warn_once = cache(logger.warning)


def name_reported_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Name the metrics that an environment reports as the run does.

    They may be numbers of Python, NumPy or torch; ValueError if one is not a number.
    """
    renamed: dict[str, float] = {}
    for name, value in metrics.items():
        if len(renamed) == MAX_METRICS:
            _warn_once(f"a response has more than {MAX_METRICS} figures; the others are left out")
            break
        try:
            renamed[make_metric_name(str(name))] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(f"figure {name!r} is {type(value).__name__}, and not a number") from None
    return renamed


def make_metric_name(name: str) -> str:
    """Prefix a reported name with env/, unless it is suspect/NAME."""
    # No part between slashes is empty, "." or "..", because trackers store names as paths.
    parts = CONTROLS.sub("_", name[:NAME_CHARACTERS]).split("/")
    clean = mark_name("/".join("_" if part.strip() in ("", ".", "..") else part for part in parts), name)
    # suspect/unusually_short is the run's own, in every environment.
    return clean if clean.startswith(SUSPECT_PREFIX) and is_environment_metric(clean) else ENVIRONMENT_PREFIX + clean


def make_step_metric_name(name: str) -> str:
    """Name a response's metric; earlier versions recorded bare names."""
    is_named = name in (REWARD_REMOVED, SCORING_RETRIES) or name.startswith((SUSPECT_PREFIX, ENVIRONMENT_PREFIX))
    return name if is_named else make_metric_name(name)


def is_environment_metric(name: str) -> bool:
    """True for metrics from environments or reward functions."""
    return name.startswith((ENVIRONMENT_PREFIX, SUSPECT_PREFIX)) and name != SUSPECT_PREFIX + UNUSUALLY_SHORT
