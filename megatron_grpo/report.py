"""Writes the page of a run, or of two side by side: python -m megatron_grpo.report RUN_DIR [OTHER_RUN_DIR]"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.config.help import run_command
from megatron_grpo.observability.page.write import REPORT_FILE, render_report
from megatron_grpo.observability.run_files import write_text

USAGE = f"""\
python -m megatron_grpo.report RUN_DIR [OTHER_RUN_DIR] [output=FILE]

Writes RUN_DIR/{REPORT_FILE}, one page that needs nothing else: curves, configuration, trajectories. With two folders
both runs stand side by side, in the page of the first.

  output  file to write, or a folder for {REPORT_FILE}; without it, and where RUN_DIR cannot be written, the page comes
          into the current folder, under the name of the run
"""
_OUTPUT = "output="


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    return run_command("report: ", arguments, USAGE, _write)


def _write(arguments: Sequence[str]) -> int:
    """Write the page of the runs on a command line; ValueError unless they are one or two folders."""
    outputs = [argument.removeprefix(_OUTPUT) for argument in arguments if argument.startswith(_OUTPUT)]
    names = [argument for argument in arguments if not argument.startswith(_OUTPUT)]
    for argument in names:
        if argument.startswith("-"):
            raise ValueError(f"{argument} is not an option\n{USAGE}".rstrip())
    if len(names) not in (1, 2) or len(outputs) > 1:
        raise ValueError(f"give the folder of one run, or of two\n{USAGE}".rstrip())
    folders = [Path(os.path.expanduser(name)) for name in names]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the run_dir of a run, such as outputs/quickstart/latest")
    text = render_report(folders)
    if outputs:
        file = Path(os.path.expanduser(outputs[0]))
        file = file / REPORT_FILE if file.is_dir() else file
        _write_to(file, text, f"{_OUTPUT}{file}")
    else:
        file = _write_beside(folders[0], text)
    print(f"wrote {file}")
    return 0


def _write_beside(folder: Path, text: str) -> Path:
    """Write the page into the run's folder or, if that is read-only, into the current one; returns its path."""
    file = folder / REPORT_FILE
    try:
        write_text(file, text)
    except OSError as error:
        elsewhere = Path(f"{folder.resolve().name}_{REPORT_FILE}").absolute()
        print(f"{folder} cannot be written ({error.strerror}); {_OUTPUT}FILE chooses another file than this one:")
        _write_to(elsewhere, text, f"give {_OUTPUT}FILE: neither {folder} nor {elsewhere.parent}")
        return elsewhere
    return file


def _write_to(file: Path, text: str, name: str) -> None:
    """Write the page; ValueError if that fails, with `name` for the file."""
    try:
        write_text(file, text)
    except OSError as error:
        raise ValueError(f"{name} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
