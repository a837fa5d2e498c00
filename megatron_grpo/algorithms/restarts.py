"""Restarts of a run that has lost ranks: it goes back to its newest checkpoint, and all other processes stay."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

from megatron_grpo.algorithms.setup import begin_run, start_processes
from megatron_grpo.config.errors import ModelLostError
from megatron_grpo.config.schema import Config
from megatron_grpo.run.checkpoints import Checkpointer
from megatron_grpo.run.lifetime import Startup

logger = logging.getLogger(__name__)


def train_with_restarts(config: Config, startup: Startup, train: Callable[[Any], None]) -> None:
    """Run `train` to its end, with new ranks whenever some are lost.

    A restart is what a resumed run does, with the engines, rollout workers and environments that are there.

    Raises the errors of `train`, and ModelLostError once cluster.max_restarts is used up.
    """
    limit, restarts, has_begun = config.cluster.max_restarts, 0, False
    with start_processes(config, startup) as processes:
        while True:
            try:
                with begin_run(config, startup, processes, is_restart=restarts > 0) as run:
                    has_begun, run.can_restart = True, restarts < limit
                    train(run)
                    run.logger.finish()
                    return
            except ModelLostError as error:
                if not has_begun or limit == 0:  # at the first start the fault is most likely the configuration's
                    raise
                if restarts == limit:
                    text = f"{error}; ranks were restarted as often as cluster.max_restarts={limit} allows"
                    raise ModelLostError(text) from error
                restarts += 1
                _announce(f"restart {restarts} of {limit} (cluster.max_restarts): {error}", startup.checkpointer)


def _announce(reason: str, checkpointer: Checkpointer) -> None:
    steps = checkpointer.list_steps()
    start = f"goes back to step {steps[-1]}" if steps else "goes back to its start, for want of a checkpoint"
    text = f"{reason}; all ranks start again, and the run {start}; engines, rollout workers and environments stay"
    logger.warning("%s", text)
    print(text, file=sys.stderr, flush=True)
