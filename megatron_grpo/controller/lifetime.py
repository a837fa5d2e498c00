"""The beginning of a run, up to Ray: it needs neither torch nor Megatron-Core, so that they are imported meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import psutil

from megatron_grpo.cluster.guardian import guarded, terminated_like_interrupted
from megatron_grpo.cluster.process_log import driver_log
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.controller.checkpoints import Checkpointer, checkpoint_to_start_from
from megatron_grpo.controller.directory import CONFIG_FILE, changes_since_last_start, claimed_run_directory
from megatron_grpo.controller.user_objects import Given
from megatron_grpo.environments.registry import check_environments, check_reward_functions, columns_known
from megatron_grpo.observability.summary import SUMMARY_FILE, Ending, killed_run_command, write_summary


class StartupParts:
    """Seconds of each part of a start-up, by name. Parts go on side by side, so that their sum is not the whole."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body; one that comes again under its name is added."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began

    def add_slowest(self, kind: str, reports: Iterable[Mapping[str, float]]) -> None:
        """Take over what processes of one kind report, of each part the slowest process.

        Args:
            kind: what the processes are, "policy" for one; a part "model" is then called "policy_model".
            reports: for each process, seconds by part.
        """
        for report in reports:
            for name, seconds in report.items():
                self.seconds[f"{kind}_{name}"] = max(seconds, self.seconds.get(f"{kind}_{name}", 0.0))


def since_command() -> float:
    """Seconds since this process was created: a run's start-up begins with its command, imports included."""
    return time.time() - psutil.Process().create_time()


T = TypeVar("T")
AT_ONCE_S = 10.0
"""Seconds that are waited before anything else starts: time to read some 10 GB, and to find most that can be wrong."""


@contextmanager
def in_background(work: Callable[[Event], T], at_once_s: float = AT_ONCE_S) -> Iterator[Future[T]]:
    """Begin `work` and yield its result to come. What it raises soon is raised here, before the body begins.

    Args:
        work: called with an event that is set when the body ends, which it should look at now and then.
        at_once_s: seconds to wait for it before the body begins.
    """
    stop = Event()
    with ThreadPoolExecutor(1, "background") as pool:
        try:
            future = pool.submit(work, stop)
            if wait([future], at_once_s).done:
                future.result()
            yield future
        finally:
            stop.set()


logger = logging.getLogger(__name__)

WriteSummary = Callable[[Ending], Any]
"""Writes summary.json of a run that ended like this."""


class SummaryOnFailure:
    """What is known of a run that has begun to start; see `summary_on_failure`."""

    def __init__(self, run_dir: Path, samples_per_step: int) -> None:
        """
        Args:
            run_dir: the run's folder.
            samples_per_step: prompts times generations of one step.
        """
        self.write: WriteSummary = lambda ending: write_summary(
            run_dir, samples_per_step=samples_per_step, ending=ending
        )
        """Until the run is up and its logger knows more."""


@contextmanager
def summary_on_failure(run_dir: Path, samples_per_step: int) -> Iterator[SummaryOnFailure]:
    """Write summary.json if the body raises: as "interrupted" after Ctrl-C or SIGTERM, else as "failed".

    Args:
        run_dir: the run's folder; the summary of an earlier start in it is removed first.
        samples_per_step: prompts times generations of one step.
    """
    (run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    known = SummaryOnFailure(run_dir, samples_per_step)
    try:
        yield known
    except (KeyboardInterrupt, SystemExit) as error:  # Ray raises the latter when SIGTERM comes while it starts
        reason = str(error) or "Ctrl-C"
        _write(known, Ending("interrupted", reason if isinstance(error, KeyboardInterrupt) else "SIGTERM"))
        raise
    except Exception as error:  # however a run fails, its summary says so
        in_words = isinstance(error, RunError | ConfigError)
        _write(known, Ending("failed", str(error) if in_words else f"{type(error).__name__}: {error}"))
        logger.error("the run failed", exc_info=error)
        raise


@contextmanager
def report_at_end(run_dir: Path, wanted: bool) -> Iterator[None]:
    """Write report.html after the body, however it ends; that it cannot be written is told, and changes nothing else.

    Args:
        run_dir: the run's folder.
        wanted: false: do nothing.
    """
    try:
        yield
    finally:
        if wanted and (run_dir / CONFIG_FILE).exists():  # else there was no run
            from megatron_grpo.observability.page.write import try_to_write_report  # here: at the end there is time

            page = try_to_write_report(run_dir)
            text = f"report in {page}" if page else "report.html could not be written; the log says why"
            logger.info("%s", text)
            print(text, flush=True)


def _write(known: SummaryOnFailure, ending: Ending) -> None:
    """The summary; a disk that is full, for one, must not hide why the run ended."""
    logger.info("%s: %s", ending.outcome, ending.reason)
    try:
        known.write(ending)
    except OSError as error:
        logger.error("summary.json could not be written: %s", error)


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
