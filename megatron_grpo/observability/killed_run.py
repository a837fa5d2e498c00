"""What is written for a run whose driver was killed and could not: `python -m` this module, with its folder."""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_grpo.observability.summary import SUMMARY_FILE, Ending, write_summary

_REASON = "the driver was killed; if memory ran out, the kernel's log (dmesg) says so"


def killed_run_command(run_dir: Path, samples_per_step: int, *, report: bool) -> list[str]:
    """The command line that writes the summary, and the report, of a run whose driver was killed.

    Args:
        run_dir: the run's folder, where summary.json is to be.
        samples_per_step: samples of one training step: prompts times generations of each.
        report: whether report.html is written, too.
    """
    return [sys.executable, "-m", __name__, str(run_dir), str(samples_per_step), *(["report"] if report else [])]


def main(run_dir: Path, samples_per_step: int, *, report: bool) -> None:
    """Write what is missing; nothing if the driver was killed after the end of its run."""
    if (run_dir / SUMMARY_FILE).exists():
        return
    write_summary(run_dir, samples_per_step=samples_per_step, ending=Ending("failed", _REASON))
    if report:
        from megatron_grpo.observability.page.write import try_to_write_report  # not in every driver that starts

        try_to_write_report(run_dir)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), report="report" in sys.argv[3:])
