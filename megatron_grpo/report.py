"""Writes the page of a run, or of two side by side: python -m megatron_grpo.report RUN_DIR [OTHER_RUN_DIR]"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.config.help import run_command
from megatron_grpo.observability.page.write import REPORT_FILE, write_report

USAGE = f"""\
python -m megatron_grpo.report RUN_DIR [OTHER_RUN_DIR]

Writes RUN_DIR/{REPORT_FILE}, one page that needs nothing else: curves, configuration, trajectories. With two folders
both runs stand side by side, in the page of the first.
"""


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    return run_command("report: ", arguments, USAGE, _write)


def _write(arguments: Sequence[str]) -> int:
    """Write the page of the runs on a command line; ValueError unless they are one or two folders."""
    for argument in arguments:
        if argument.startswith("-"):
            raise ValueError(f"{argument} is not an option\n{USAGE}".rstrip())
    if len(arguments) not in (1, 2):
        raise ValueError(f"give the folder of one run, or of two\n{USAGE}".rstrip())
    folders = [Path(os.path.expanduser(argument)) for argument in arguments]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the run_dir of a run, such as outputs/quickstart/latest")
    print(f"wrote {write_report(folders)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
