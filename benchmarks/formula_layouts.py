"""Verifies all named formulas of the loss in all layouts; prints JSON.

    python benchmarks/formula_layouts.py [argument of the command verify ...]

For each formula and layout, packed and padded, `shares` has the distance from transformers in float64 that is nearest
to its tolerance, as a share of the tolerance: above 1 it is further away than rounding explains.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from header import header


def measure(arguments: Sequence[str]) -> dict[str, Any]:
    """Verify, and arrange the results by formula and layout."""
    began = time.monotonic()
    command = [sys.executable, "-m", "megatron_grpo.verify", "loss=all", *arguments, "--json"]
    process = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)
    if not process.stdout:
        raise SystemExit(f"verify ended with exit code {process.returncode}")
    shares: dict[str, dict[str, float]] = {}
    faults: dict[str, list[str]] = {}
    for row in json.loads(process.stdout)["rows"]:
        layout = f"{row['layout']} {'packed' if row['packed'] else 'padded'}"
        share = max(row[name] / limit for name, limit in row["tolerances"].items())
        shares.setdefault(row["formula"], {})[layout] = round(share, 3)
        if not row["passed"]:
            faults[f"{row['formula']}, {layout}"] = row["faults"]
    largest = {name: max(by_layout.values()) for name, by_layout in shares.items()}
    return {"seconds": round(time.monotonic() - began), "faults": faults, "largest": largest, "shares": shares}


if __name__ == "__main__":
    result = {**header("formula_layouts"), "arguments": sys.argv[1:], **measure(sys.argv[1:])}
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["faults"]))
