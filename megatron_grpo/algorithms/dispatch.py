"""Runs the algorithm of a checked configuration, for the command line and for scripts."""

from __future__ import annotations

import pkgutil
import warnings
from concurrent.futures import ThreadPoolExecutor

from megatron_grpo.cluster.machines import prepare_ray_environment
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.wait_notices import announce_waits
from megatron_grpo.config.schema import Config
from megatron_grpo.run.user_objects import UserObjects

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
    from megatron_grpo.preflight.environment_checks import check_user_code
    from megatron_grpo.run.lifetime import open_run

    algorithm = config.method.train if config.debug.train else SAMPLING_ONLY  # imported late, as torch takes seconds
    with ThreadPoolExecutor(1, "import") as importer:  # while Ray starts
        names = (algorithm, "megatron_grpo.algorithms.restarts:train_with_restarts")
        functions = importer.submit(lambda: [pkgutil.resolve_name(name) for name in names])
        with announce_waits(), phase("trying functions of the user"):
            rewards = user_objects.rewards if user_objects is not None else None
            remarks = list(check_user_code(config, rewards))
        for remark in remarks:
            print(f"{remark.subject} {remark.text}", flush=True)
        with open_run(config, user_objects, began) as startup:
            with startup.part("imports"):
                train, train_with_restarts = functions.result()
            train_with_restarts(config, startup, train)
