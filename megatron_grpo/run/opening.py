"""The beginning of a run, up to Ray: it needs neither torch nor Megatron-Core, so that they are imported meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron_grpo.cluster.guardian import guarded
from megatron_grpo.cluster.process_log import driver_log
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.cluster.signals import terminated_like_interrupted
from megatron_grpo.config.schema import Config
from megatron_grpo.environments.registry import check_environments
from megatron_grpo.environments.reward_check import check_reward_functions
from megatron_grpo.observability.killed_run import killed_run_command
from megatron_grpo.run.background import in_background
from megatron_grpo.run.checkpointer import Checkpointer, checkpoint_to_start_from
from megatron_grpo.run.directory import changes_since_last_start, claimed_run_directory
from megatron_grpo.run.ending import SummaryOnFailure, report_at_end, summary_on_failure
from megatron_grpo.run.given import Given
from megatron_grpo.run.reward_columns import columns_known
from megatron_grpo.run.startup_parts import StartupParts, since_command


@dataclass(frozen=True, slots=True)
class Opening:
    """A run that has its folder and its Ray."""

    run_dir: Path
    checkpointer: Checkpointer
    start_from: Future[Path | None]
    """The checkpoint to start from, once it is found; None: there is none."""
    changes: list[str]
    """How the configuration differs from the one that the folder's run had before, a line each."""
    cluster: RayCluster
    known: SummaryOnFailure
    parts: StartupParts
    given: Given = field(default_factory=Given)


@contextmanager
def opened(config: Config, given: Given | None = None) -> Iterator[Opening]:
    """Hold the run's folder and keep Ray running; on leaving, however that is, all of Ray's processes end.

    Args:
        config: the run's configuration, checked.
        given: what a script hands over beside it; None: nothing.

    Raises:
        ConfigError: the run cannot start from where it is told to.
        RunError: Ray did not come up, or the folder is in use; the message says what.
    """
    given, parts = given or Given(), StartupParts()
    parts.seconds["command_line"] = since_command()
    with ExitStack() as stack:
        stack.enter_context(terminated_like_interrupted())
        if config.generates:
            check_environments(config)  # before processes are started
            check_reward_functions(config.env, columns_known(config), given.rewards)
        run_dir = stack.enter_context(claimed_run_directory(config.run_dir))
        checkpointer = Checkpointer(run_dir, config.checkpointing)
        changes = changes_since_last_start(run_dir, config)
        stack.enter_context(driver_log(run_dir, config.logger.level))
        search = stack.enter_context(in_background(lambda stop: checkpoint_to_start_from(checkpointer, config, stop)))
        stack.enter_context(report_at_end(run_dir, config.logger.report))
        known = stack.enter_context(summary_on_failure(run_dir, config.samples_per_step))
        if config.cluster.ray_address is None:
            report = config.logger.report
            if_killed = killed_run_command(run_dir, config.samples_per_step, report=report)
            stack.enter_context(guarded(if_killed=if_killed))
        cluster = RayCluster(config.cluster)
        stack.callback(cluster.shutdown)
        with parts.part("ray"):
            cluster.start()
        yield Opening(run_dir, checkpointer, search, changes, cluster, known, parts, given)
