"""Starts the run of a checked configuration: the same for the command line and for scripts."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor

from megatron_grpo.algorithms.registry import run_of
from megatron_grpo.cluster.ray_settings import prepare_ray_environment
from megatron_grpo.config.schema import Config
from megatron_grpo.run.given import Given


def start(config: Config, given: Given | None = None) -> None:
    """Run the algorithm that the configuration names. It is imported, torch with it, while Ray starts.

    Args:
        config: checked.
        given: what a script hands over beside it; None: nothing.

    Raises:
        ConfigError: the run cannot start from where it is told to.
        RunError: it failed.
    """
    if config.cluster.ray_address is None:
        prepare_ray_environment()
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # of torchdata, about itself
    from megatron_grpo.run.opening import opened  # after the checks: Ray takes long to import

    with ThreadPoolExecutor(1, "import") as importer:
        algorithm = importer.submit(run_of, config.algorithm, train=config.debug.train)
        with opened(config, given) as opening:
            with opening.parts.part("imports"):
                run = algorithm.result()
            run(config, opening)
