"""Opens a run and closes it: its folder, its logs and Ray, and the summary and report at its end, however it ends.

This file imports neither torch nor Megatron-Core: a thread imports them while the calls here start Ray.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import psutil

from megatron_grpo.cluster.cleanup import FolderRemover, cleanup_after_kill, interrupt_on_sigterm
from megatron_grpo.cluster.machines import fill_in_address
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.process_log import driver_log
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.cluster.wait_notices import WaitNotices
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.output import tolerant_output
from megatron_grpo.config.schema import Config
from megatron_grpo.observability.run_files import SUMMARY_FILE
from megatron_grpo.observability.summary import RunEnd, make_killed_run_command, write_summary
from megatron_grpo.run.checkpoint_files import leave_models_unread
from megatron_grpo.run.checkpoints import Checkpointer, choose_ranking, find_start_checkpoint
from megatron_grpo.run.directory import CONFIG_FILE, compare_with_last_start, lock_run_directory
from megatron_grpo.run.user_objects import UserObjects

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Seconds that the start-up waits for the checkpoint search before it starts Ray: enough to read about 10 GB.
SEARCH_WAIT_S = 10.0
# Lines that announce the parts of a start-up, by name of the part.
_ANNOUNCEMENTS = {
    "imports": "importing torch",
    "ray": "starting Ray",
    "prepare": "making the model and the data",
    "prompts": "reading the prompts",
    "waiting": "waiting for models and engines",
    "refit": "sending the weights to the engines",
}


@contextmanager
def in_background(work: Callable[[Event], T], wait_s: float = SEARCH_WAIT_S) -> Iterator[Future[T]]:
    """Run `work` in a thread during the body, and yield its future.

    The body begins after `wait_s` seconds, or as soon as `work` ends; an error until then is raised instead. `work`
    gets an event that is set when the body ends, and should check it now and then.
    """
    stop = Event()
    with ThreadPoolExecutor(1, "background") as pool:
        try:
            future = pool.submit(work, stop)
            if wait([future], wait_s).done:
                future.result()
            yield future
        finally:
            stop.set()


@dataclass(slots=True)
class Startup:
    """A run whose processes start: it has its folder and Ray."""

    run_dir: Path
    checkpointer: Checkpointer
    start_from: Future[Path | None]  # the checkpoint to start from, not yet read by ranks; None: the run begins anew
    changes: list[str]  # differences from the configuration of the previous start in this folder, a line each
    cluster: RayCluster
    user_objects: UserObjects
    write_summary: Callable[..., Any]
    """Writes summary.json if the run fails; replaced by the logger's, which also knows the timings."""
    began: float  # seconds since the epoch at the beginning of the start-up
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of each part of the start-up, by name. Parts overlap, so their sum exceeds the whole."""
    engine_settings: list[dict[str, Any]] = field(default_factory=list)
    """Settings with which each engine computes, in JSON types."""
    notices: WaitNotices | None = None
    """Says what the start-up waits for, until the run's logger does."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Announce a part of the start-up, and time the body."""
        if name not in self.parts:
            print(_ANNOUNCEMENTS[name], flush=True)
        if self.notices is not None:
            self.notices.restart()
        began = time.monotonic()
        try:
            with phase(_ANNOUNCEMENTS[name]):
                yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.monotonic() - began


@contextmanager
def open_run(config: Config, user_objects: UserObjects | None = None, began: float | None = None) -> Iterator[Startup]:
    """Lock the run's folder and start Ray; leaving ends it.

    `began`: time since the epoch at which a script called for the run; None: the run is the command of this process,
    whose imports count too.

    Raises ConfigError if the run's folder, the checkpoint to start from or a reward function cannot be used, and
    RunError if Ray did not start, or the folder is in use.
    """
    user_objects = user_objects or UserObjects()
    fill_in_address(config.cluster)
    began = psutil.Process().create_time() if began is None else began
    parts = {"command_line": time.time() - began}
    with ExitStack() as stack:
        stack.enter_context(tolerant_output(of_run=True))
        stack.enter_context(interrupt_on_sigterm())
        # Ray comes last, since it takes seconds to start: most mistakes in folder and checkpoint are reported before.
        run_dir = stack.enter_context(lock_run_directory(config.run_dir))
        checkpointer = Checkpointer(run_dir, choose_ranking(config))
        checkpointer.keep_forever = config.logger.is_replay_start
        changes = compare_with_last_start(run_dir, config)
        is_one_machine = config.cluster.ray_address is None
        stack.enter_context(driver_log(run_dir, config.logger.level, one_machine=is_one_machine))
        find_start = partial(find_start_checkpoint, checkpointer, config, read_contents=leave_models_unread)
        search = stack.enter_context(in_background(find_start))
        cluster = RayCluster(config.cluster)
        samples, report = config.samples_per_step, config.logger.report
        summary = partial(write_summary, run_dir, samples_per_step=samples)
        startup = Startup(run_dir, checkpointer, search, changes, cluster, user_objects, summary, began, parts)
        startup.notices = WaitNotices(lambda text: print(f"waiting: {text}", flush=True))
        stack.callback(startup.notices.close)
        stack.enter_context(record_end(startup, report=report))
        remove_if_killed: FolderRemover | None = None
        if is_one_machine:
            command = make_killed_run_command(run_dir, samples, report=report)
            remove_if_killed = stack.enter_context(cleanup_after_kill(if_killed=command))
        stack.callback(cluster.shutdown)
        with startup.part("ray"):
            cluster.start(remove_if_killed)
        yield startup


@contextmanager
def record_end(startup: Startup, *, report: bool) -> Iterator[None]:
    """Write summary.json if the body fails, and report.html however it ends.

    The summary of an earlier start in the folder is removed first. Errors of this writing are logged and raise nothing,
    so that they do not hide why the run ended.
    """
    (startup.run_dir / SUMMARY_FILE).unlink(missing_ok=True)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:  # Ray raises SystemExit when SIGTERM comes while it starts
        reason = str(error) or "Ctrl-C"
        _write_failure(startup, RunEnd("interrupted", reason if isinstance(error, KeyboardInterrupt) else "SIGTERM"))
        if isinstance(error, SystemExit):
            raise KeyboardInterrupt("SIGTERM") from error
        raise
    except Exception as error:
        is_explained = isinstance(error, RunError | ConfigError)
        _write_failure(startup, RunEnd("failed", str(error) if is_explained else f"{type(error).__name__}: {error}"))
        logger.error("the run failed", exc_info=error)
        raise
    finally:
        if report and (startup.run_dir / CONFIG_FILE).exists():  # without it the run did not begin
            from megatron_grpo.observability.page.write import try_to_write_report  # here: only the end needs it

            with tolerant_output(of_run=True):  # a long run takes minutes on a busy machine
                print("writing report.html", flush=True)
            page = try_to_write_report(startup.run_dir)
            text = f"report in {page}" if page else "report.html could not be written; the log says why"
            logger.info("%s", text)
            with tolerant_output(of_run=True):  # an error here would hide why the run ended
                print(text, flush=True)


def _write_failure(startup: Startup, end: RunEnd) -> None:
    logger.info("%s: %s", end.outcome, end.reason)
    try:
        startup.write_summary(end=end)
    except (OSError, ValueError) as error:  # a full disk, or a damaged line in metrics.jsonl
        logger.error("summary.json could not be written: %s", error)
