"""Writes the page of runs: python -m megatron_grpo.report RUN_DIR [OTHER_RUN_DIR]"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.config.command_line import as_command, parse_arguments
from megatron_grpo.config.section import PathText
from megatron_grpo.observability.page.write import REPORT_FILE, render_report
from megatron_grpo.observability.run_files import write_text
from megatron_grpo.run.directory import is_in_use

USAGE = f"""\
python -m megatron_grpo.report RUN_DIR [OTHER_RUN_DIR] [output=FILE] [follow=true]

Writes RUN_DIR/{REPORT_FILE}, one self-contained page: curves, configuration, trajectories. With two folders
both runs stand side by side, in the page of the first.

  output  file to write, or a folder for {REPORT_FILE}; without it, and where RUN_DIR cannot be written, the page comes
          into the current folder, under the name of the run
  follow  true: write the page again until the run has ended; the page that is open in a browser shows each new one
"""
REFRESH_S = 30.0  # least seconds between two pages of a run that is going on
_WRITING_SHARE = 0.1  # most of the time that is spent on writing them


@as_command("report", USAGE)
def main(arguments: Sequence[str]) -> int:
    """Write the page; return the exit code."""
    parsed = parse_arguments(arguments, {"output": PathText, "follow": bool}, most_words=2)
    if not parsed.words:
        raise ValueError("give the folder of one run, or of two; --help shows the arguments")
    folders = [Path(os.path.expanduser(word)) for word in parsed.words]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the run_dir of a run, such as outputs/quickstart/latest")
    follows, output, wait_s = parsed.options.get("follow", False), parsed.options.get("output"), REFRESH_S
    is_going_on = _is_going_on(folders)
    file = _write(folders, output, wait_s if is_going_on else None)
    print(f"wrote {file}", flush=True)
    if is_going_on and not follows:
        print("the run is going on: follow=true writes the page again until it ends, and an open page follows it")
    while follows and is_going_on:
        time.sleep(wait_s)
        began, is_going_on = time.monotonic(), _is_going_on(folders)
        _write(folders, str(file), wait_s if is_going_on else None)
        wait_s = max(REFRESH_S, (time.monotonic() - began) / _WRITING_SHARE)
    return 0


def _is_going_on(folders: Sequence[Path]) -> bool:
    return any(is_in_use(str(folder)) for folder in folders)


def _write(folders: Sequence[Path], output: str | None, refresh_s: float | None) -> Path:
    """Write the page of runs where it can be written; returns its file."""
    page, folder = render_report(folders, refresh_s), folders[0]
    if output is not None:
        file = Path(output)
        file = file / REPORT_FILE if file.is_dir() else file
        _write_page(file, page, f"output={file}")
        return file
    file = folder / REPORT_FILE
    try:
        write_text(file, page)
    except OSError as error:
        # The folder of a run may be someone else's, or on a disk that is read-only.
        file = Path(f"{folder.resolve().name}_{REPORT_FILE}").absolute()
        print(f"{folder} cannot be written ({error.strerror}); output=FILE chooses another file than this one:")
        _write_page(file, page, f"give output=FILE: neither {folder} nor {file.parent}")
    return file


def _write_page(file: Path, page: str, subject: str) -> None:
    try:
        write_text(file, page)
    except OSError as error:
        raise ValueError(f"{subject} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
