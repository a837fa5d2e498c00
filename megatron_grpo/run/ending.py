"""How a run ends: summary.json says why when it was before its last step, and report.html shows what there is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.observability.summary import SUMMARY_FILE, Ending, write_summary
from megatron_grpo.run.directory import CONFIG_FILE

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
