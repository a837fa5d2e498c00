"""Times the saves of a checkpoint of 2 GB beside those of another revision; prints JSON.

    python benchmarks/saves.py --before REVISION_OR_CHECKOUT [--runs 2] [override ...]

A run of SFT on two ranks trains a Qwen3 of 167 million weights in float32 with Adam for two steps and saves after each.
`save_s` is what the run itself says of each of its saves. `driver_read_mb` is all that the driver's process has read
by its end (`rchar` of /proc), the code that it imports included; `checkpoint_mb` is the size of a saved folder. A run
of each side that is not counted fills the machine's file cache; then the sides take turns.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from header import header
from sides import ROOT, Checkout, environment_of, opened
from small_model import make_model, write_data

DEADLINE_S = 900.0
LAYERS, HIDDEN = 10, 1024
SETTINGS = (
    "+exp=quickstart_sft", "sft.max_num_steps=2", "sft.num_prompts_per_step=8", "sft.val_rewards=false",
    "sft.val_period=0", "checkpointing.save_period=1", "checkpointing.keep_top_k=null", "policy.precision=float32",
    "policy.parallel.data=2", "policy.train_global_batch_samples=8", "policy.max_total_sequence_length=64",
    "data.max_input_seq_length=32", "data.val_path=null", "logger.progress=false",
)  # fmt: skip


def measure(side: Checkout, model: Path, rows: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train on one side, and read what its saves cost."""
    with tempfile.TemporaryDirectory(dir=side.work, ignore_cleanup_errors=True) as folder:
        run_dir, log = Path(folder) / "run", Path(folder) / "log"
        paths = [f"policy.model.path={model}", f"data.train_path={rows}", f"run_dir={run_dir}"]
        command = [sys.executable, "-m", "megatron_grpo.train", *SETTINGS, *paths, *overrides]
        environment = environment_of(side.packages) | {"MEGATRON_GRPO_CACHE": str(side.work / "cache")}
        with (
            log.open("w") as output,
            subprocess.Popen(command, cwd=side.packages, env=environment, stdout=output, stderr=output) as process,
        ):
            read_bytes = _watch_reads(process)
        if process.returncode:
            raise SystemExit(f"the run failed:\n{log.read_text()}")
        saves = [float(seconds) for seconds in re.findall(r"saved \S+ in ([\d.]+) s", log.read_text())]
        sizes = [file.stat().st_size for file in (run_dir / "checkpoints" / "step_2").rglob("*") if file.is_file()]
    return {"save_s": saves, "driver_read_mb": read_bytes / 1e6, "checkpoint_mb": sum(sizes) / 1e6}


def _watch_reads(process: subprocess.Popen[Any]) -> int:
    """Bytes that a process has read until it ended, or was ended as overdue."""
    end, read_bytes = time.monotonic() + DEADLINE_S, 0
    while process.poll() is None:
        if time.monotonic() > end:
            process.terminate()
            raise SystemExit(f"the run has not ended after {DEADLINE_S:g} s")
        match = re.search(r"rchar: (\d+)", Path(f"/proc/{process.pid}/io").read_text())
        read_bytes = int(match[1]) if match else read_bytes
        time.sleep(0.05)
    return read_bytes


def compare(before: str, runs: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Saves of this checkout, and of another one in turn with them."""
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(path / "model", hidden=HIDDEN, layers=LAYERS)
        rows = write_data(path / "rows.jsonl", 64)
        sides, commits = {}, {}
        for name, source in {"before": before, "after": str(ROOT)}.items():
            side, commits[name] = stack.enter_context(opened(source, path / name, DEADLINE_S))
            assert isinstance(side, Checkout), f"{source} holds records, not code"
            sides[name] = side
        measured: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for number in range(runs + 1):
            for name, side in sides.items():
                run = measure(side, model, rows, overrides)
                if number:
                    measured[name].append(run)
    medians = {
        name: {
            "save_s": statistics.median(seconds for run in parts for seconds in run["save_s"]),
            "driver_read_mb": statistics.median(run["driver_read_mb"] for run in parts),
        }
        for name, parts in measured.items()
    }
    ratios = {f"{figure}_ratio": medians["after"][figure] / medians["before"][figure] for figure in medians["after"]}
    return {**header("saves"), "commits": commits, "overrides": list(overrides), **ratios, **medians, "runs": measured}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    print(json.dumps(compare(arguments.before, arguments.runs, arguments.overrides), indent=2))
