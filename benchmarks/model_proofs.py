"""Runs the tests that speak of model families one by one, and writes what they showed for docs/layouts.md.

    python benchmarks/model_proofs.py RESULT.json verify trace engine [cuda=REPORT.xml] [--slow]

Columns are those of COLUMNS; columns that are not named stay as they are in the file. `--slow`: slow tests too.
The tests of column "cuda" need the CUDA environment, so REPORT.xml is what pytest wrote there (`--junitxml`), in mode
null of `make cuda-check`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from header import header

from megatron_grpo.models.families import FAMILIES

ROOT = Path(__file__).parents[1]
COLUMNS = {
    "verify": ["tests/parity/test_families.py"],
    "trace": ["tests/unit/weight_sync/test_weight_trace.py"],
    "engine": ["tests/integration/test_refit_families.py", "tests/integration/test_refit_delta_nets.py"],
}
"""Tests by column; the name of a family begins their parameters, or names a property with figures."""


def main(arguments: list[str]) -> int:
    file, *words = arguments
    result = json.loads(Path(file).read_text()) if Path(file).exists() else {}
    columns: dict[str, Any] = result.get("columns", {})
    for column in [word for word in words if word != "--slow"]:
        name, is_report, report = column.partition("=")
        columns[name] = read_report(Path(report)) if is_report else run_column(COLUMNS[name], slow="--slow" in words)
    Path(file).write_text(json.dumps({**header("model_proofs"), "columns": columns}, indent=1) + "\n")
    return 0


def run_column(tests: list[str], *, slow: bool) -> dict[str, Any]:
    """Run the tests of a column: by family how many passed and failed, and their figures."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *([] if slow else ["-m", "not slow"])]
        subprocess.run([*command, *tests], cwd=ROOT, check=False, stdout=sys.stderr)
        return read_report(report)


def read_report(report: Path) -> dict[str, Any]:
    """Read pytest's report: by family how many passed and failed, and their figures."""
    families: dict[str, Any] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failed = any(case.find(tag) is not None for tag in ("failure", "error"))
        if case.find("skipped") is not None:
            continue
        parameters = str(case.get("name")).partition("[")[2].removesuffix("]")
        figures = {str(item.get("name")): str(item.get("value")) for item in case.iter("property")}
        if figures:
            for family, text in figures.items():
                record(families, find_family(family) or family, parameters, failed=False, figures=text)
        elif (named := find_family(parameters)) is not None:
            record(families, named, parameters, failed=failed)
    return families


def find_family(parameters: str) -> str | None:
    """Find the family whose name begins a test's parameters; None: there is none."""
    names = [name for name in FAMILIES if re.match(rf"{name}(?![a-z0-9])", parameters.replace("_vision", ""))]
    return max(names, key=len, default=None)


def record(families: dict[str, Any], family: str, parameters: str, *, failed: bool, figures: str = "") -> None:
    """Add a test's verdict, and perhaps its errors of log-probabilities and gradients."""
    entry = families.setdefault(family, {"passed": 0, "failed": 0})
    entry["failed" if failed else "passed"] += 1
    if figures:
        logprob, gradient, _exact = figures.split()
        entry.setdefault("layouts", []).append(parameters)
        entry["logprob"] = max(entry.get("logprob", 0.0), float(logprob))
        entry["gradient"] = max(entry.get("gradient", 0.0), float(gradient))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
