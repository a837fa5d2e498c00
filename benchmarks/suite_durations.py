"""Times `make test` by files; prints JSON, and orders the tests of later runs where it is kept.

    python benchmarks/suite_durations.py [TARGET ...] > benchmarks/results/DATE_suite_durations.json

For each call of pytest in the targets (test): its seconds, those until the first report (imports and collection), and
for every file seconds, CPU seconds and tests, the longest first. CPU seconds hold those of all processes that a file
started and that ended below it; a daemon that outlives its parent (Ray's) is missing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from header import header

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Run the targets and print what their sessions wrote."""
    targets = sys.argv[1:] or ["test"]
    with tempfile.TemporaryDirectory() as folder:
        lines = Path(folder) / "lines"
        variables = {"TEST_DURATIONS": str(lines), "PYTEST_ADDOPTS": "-p tests.support.durations"}
        began, load = time.monotonic(), os.getloadavg()[0]
        command = ["make", "--ignore-errors", *targets]
        subprocess.run(command, cwd=ROOT, env=os.environ | variables, stdout=sys.stderr, check=True)
        result = header("suite_durations") | {
            "targets": targets,
            "load_before": round(load, 1),
            "seconds": round(time.monotonic() - began, 1),
            "sessions": [json.loads(line) for line in lines.read_text().splitlines()],
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
