"""Starts the run of a checked configuration: the same for the command line and for scripts."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from megatron_grpo.cluster.machines import prepare_ray_environment
from megatron_grpo.config.schema import Config
from megatron_grpo.controller.user_objects import UserObjects

ALGORITHMS = {"grpo": "megatron_grpo.algorithms.grpo", "ppo": "megatron_grpo.algorithms.ppo"}
"""The module of each; imported only when it is to run, since torch and Ray take seconds to import."""
_SAMPLING_ONLY = "megatron_grpo.algorithms.sampling_only"


def run_of(name: str, *, train: bool = True) -> Callable[..., None]:
    """What runs an algorithm from start (or resume) to end, given the checked configuration and the run's `Startup`.

    Args:
        name: the algorithm's name in the configuration.
        train: whether the run trains; else it samples and scores alone, which all algorithms do alike.
    """
    run: Callable[..., None] = importlib.import_module(ALGORITHMS[name] if train else _SAMPLING_ONLY).run
    return run


def start(config: Config, user_objects: UserObjects | None = None) -> None:
    """Run the algorithm that the configuration names. It is imported, torch with it, while Ray starts.

    Args:
        config: checked.
        user_objects: objects of a script that a configuration cannot name; None: none.

    Raises:
        ConfigError: the run cannot start from where it is told to.
        RunError: it failed.
    """
    if config.cluster.ray_address is None:
        prepare_ray_environment()
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # of torchdata, about itself
    from megatron_grpo.controller.lifetime import started  # after the checks: Ray takes long to import

    with ThreadPoolExecutor(1, "import") as importer:
        algorithm = importer.submit(run_of, config.algorithm, train=config.debug.train)
        with started(config, user_objects) as startup:
            with startup.parts.part("imports"):
                run = algorithm.result()
            run(config, startup)
