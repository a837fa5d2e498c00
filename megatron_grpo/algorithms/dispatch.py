"""Runs the algorithm of a checked configuration, for the command line and for scripts."""

from __future__ import annotations

import pkgutil
import warnings
from concurrent.futures import ThreadPoolExecutor

from megatron_grpo.cluster.machines import prepare_ray_environment
from megatron_grpo.config.loop_schema import LOOPS
from megatron_grpo.config.schema import Config
from megatron_grpo.run.user_objects import UserObjects

# Training function of each algorithm; imported late, because torch and Ray take seconds to import.
ALGORITHMS = {name: f"megatron_grpo.algorithms.{name}:{name}_train" for name in (*LOOPS, "distillation")}
ALGORITHMS["reward_model"] = "megatron_grpo.algorithms.reward_training:reward_model_train"
SAMPLING_ONLY = "megatron_grpo.algorithms.grpo:sample_steps"


def run_algorithm(config: Config, user_objects: UserObjects | None = None, began: float | None = None) -> None:
    """Run the configured algorithm, or only sampling, from start (or resume) to end.

    `began`: time since the epoch at which a script called for the run; None: the run is the command of this process.

    Raises ConfigError if the run's folder, checkpoint or a reward function cannot be used, RunError if the run failed.
    """
    if config.cluster.ray_address is None:
        prepare_ray_environment()
    warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata warns about its own code
    # Imported late, because NumPy and Ray take long to import.
    from megatron_grpo.preflight.environment_checks import check_scoring
    from megatron_grpo.run.lifetime import open_run

    algorithm = ALGORITHMS[config.algorithm] if config.debug.train else SAMPLING_ONLY
    with ThreadPoolExecutor(1, "import") as importer:  # while Ray starts
        names = (algorithm, "megatron_grpo.algorithms.setup:setup")
        functions = importer.submit(lambda: [pkgutil.resolve_name(name) for name in names])
        if config.needs_generation:
            check_scoring(config, rewards=user_objects.rewards if user_objects is not None else None)
        with open_run(config, user_objects, began) as startup:
            with startup.part("imports"):
                train, setup = functions.result()
            with setup(config, startup) as run:
                train(run)
                run.logger.finish()
