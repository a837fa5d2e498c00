"""Holds a drill (python -m megatron_grpo.drill), and writes its results with a header.

python benchmarks/drill.py RESULT [argument of the drill ...]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from header import header

from megatron_grpo.drill import main


def hold(output: Path, arguments: list[str]) -> int:
    """Write the results of a drill to a file; return its exit code."""
    beginning = header("drill")  # of the code that the run begins with
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        code = main([*arguments, f"run_dir={run_dir}"])
        results = json.loads(run_dir.with_name("run.json").read_text())
    output.write_text(json.dumps(beginning | results | {"arguments": arguments}, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(hold(Path(sys.argv[1]), sys.argv[2:]))
