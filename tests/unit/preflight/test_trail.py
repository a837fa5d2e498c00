"""How often a command line goes from folder to folder of the package before it is checked."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import FrameType

import megatron_grpo
from megatron_grpo.preflight.load import check_overrides

PACKAGE = Path(megatron_grpo.__file__).parent
OPTIMIZED = 1  # flag of the code of functions, which bodies of modules and classes lack


def test_a_command_line_is_checked_in_few_folders(tmp_path: Path) -> None:
    files: list[str] = []

    def keep(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and frame.f_code.co_flags & OPTIMIZED and PACKAGE in file.parents:
            name = str(file.relative_to(PACKAGE))
            if name not in files:
                files.append(name)

    sys.setprofile(keep)
    try:
        assert not check_overrides(["+exp=quickstart", f"run_dir={tmp_path}/run"]).problems
    finally:
        sys.setprofile(None)
    # Names and values of settings are in config/, which every folder reads.
    folders = [name.partition("/")[0] for name in files if not name.startswith("config/")]
    moves = sum(first != second for first, second in itertools.pairwise(folders))
    assert {"preflight", "models", "data", "run", "cluster"} <= set(folders)
    assert moves <= 17, folders
