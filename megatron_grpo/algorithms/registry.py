"""The algorithms by their names in the configuration: a new one is a module with `run`, a line here and a section."""

from __future__ import annotations

import importlib
from collections.abc import Callable

ALGORITHMS = {"grpo": "megatron_grpo.algorithms.grpo", "ppo": "megatron_grpo.algorithms.ppo"}
"""The module of each; imported only when it is to run, since torch and Ray take seconds to import."""
_SAMPLING_ONLY = "megatron_grpo.algorithms.sampling_only"


def run_of(name: str, *, train: bool = True) -> Callable[..., None]:
    """What runs an algorithm from start (or resume) to end, given the checked configuration and the run's `Opening`.

    Args:
        name: the algorithm's name in the configuration.
        train: whether the run trains; else it samples and scores alone, which all algorithms do alike.
    """
    run: Callable[..., None] = importlib.import_module(ALGORITHMS[name] if train else _SAMPLING_ONLY).run
    return run
