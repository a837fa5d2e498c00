"""Starts the run of a checked configuration: the same for the command line and for scripts."""

from __future__ import annotations

import importlib
import warnings
from concurrent.futures import ThreadPoolExecutor

from megatron_grpo.cluster.machines import prepare_ray_environment
from megatron_grpo.config.schema import Config
from megatron_grpo.controller.user_objects import UserObjects

ALGORITHMS = {"grpo": "megatron_grpo.algorithms.grpo", "ppo": "megatron_grpo.algorithms.ppo"}
"""The module of each, with a function `run`; imported only when it runs, since torch and Ray take seconds to import."""


def start(config: Config, user_objects: UserObjects | None = None) -> None:
    """Run the algorithm that the configuration names, from start (or resume) to end. It is imported while Ray starts.

    A run that does not train samples and scores alone, which all algorithms do alike.

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

    module = ALGORITHMS[config.algorithm] if config.debug.train else "megatron_grpo.algorithms.sampling_only"
    with ThreadPoolExecutor(1, "import") as importer:
        algorithm = importer.submit(importlib.import_module, module)
        with started(config, user_objects) as startup:
            with startup.parts.part("imports"):
                run = algorithm.result().run
            run(config, startup)
