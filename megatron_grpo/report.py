"""Writes the page of runs: python -m megatron_grpo.report RUN_DIR [OTHER_RUN_DIR]"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_grpo.config.command_line import as_command, parse_arguments
from megatron_grpo.config.section import PathText
from megatron_grpo.observability.page.write import REPORT_FILE, render_report
from megatron_grpo.observability.run_files import write_text

USAGE = f"""\
python -m megatron_grpo.report RUN_DIR [OTHER_RUN_DIR] [output=FILE]

Writes RUN_DIR/{REPORT_FILE}, one self-contained page: curves, configuration, trajectories. With two folders
both runs stand side by side, in the page of the first.

  output  file to write, or a folder for {REPORT_FILE}; without it, and where RUN_DIR cannot be written, the page comes
          into the current folder, under the name of the run
"""


@as_command("report", USAGE)
def main(arguments: Sequence[str]) -> int:
    """Write the page; return the exit code."""
    parsed = parse_arguments(arguments, {"output": PathText}, most_words=2)
    if not parsed.words:
        raise ValueError("give the folder of one run, or of two; --help shows the arguments")
    folders = [Path(os.path.expanduser(word)) for word in parsed.words]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give the run_dir of a run, such as outputs/quickstart/latest")
    page, folder = render_report(folders), folders[0]
    if "output" in parsed.options:
        file = Path(parsed.options["output"])
        file = file / REPORT_FILE if file.is_dir() else file
        _write_page(file, page, f"output={file}")
    else:
        file = folder / REPORT_FILE
        try:
            write_text(file, page)
        except OSError as error:
            # The folder of a run may be someone else's, or on a disk that is read-only.
            file = Path(f"{folder.resolve().name}_{REPORT_FILE}").absolute()
            print(f"{folder} cannot be written ({error.strerror}); output=FILE chooses another file than this one:")
            _write_page(file, page, f"give output=FILE: neither {folder} nor {file.parent}")
    print(f"wrote {file}")
    return 0


def _write_page(file: Path, page: str, subject: str) -> None:
    try:
        write_text(file, page)
    except OSError as error:
        raise ValueError(f"{subject} cannot be written: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
