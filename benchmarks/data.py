"""A million rows: how long a run takes to know them, in how much memory, and that an order survives a stop; JSON.

    python benchmarks/data.py [--rows 1000000] [--rendered 50000]

For each kind of file a process of its own does what the driver of a run does with its data, from the command line to
the prompts of the first step: all checks before a run (`checks_s`), then rendering, tokenising and filtering by length
(`prompts_s`), with a byte-level tokenizer and a chat template. `startup_s` is from the start of the process on, imports
included; `peak_mb` the largest resident memory of the process and its children, of which mapped files are a part.
`visits_by_epoch` are the fewest and the most visits of a row in two epochs with a stop at a random place of the first
one, which a new loader goes on from.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from header import header
from made_up_rows import save_tokenizer, write_rows

KINDS = ("jsonl", "parquet")
PROMPTS = 1000
"""Prompts of a step."""
LONGEST = 512
"""Tokens of the longest prompt that is not left out."""
GOAL_S, GOAL_MB = 60.0, 2000.0


def main() -> None:
    options = _options()
    if options.measure is not None:
        print(json.dumps(measure(options.measure, options.rendered)))
        return
    with tempfile.TemporaryDirectory(prefix="benchmark_data_") as folder:
        result = {
            **header("data"),
            "rows": options.rows,
            "rendered_at_start": options.rendered,
            "load": os.getloadavg()[0],
            **{kind: in_own_process(kind, Path(folder), options) for kind in KINDS},
            **visits(options.rows),
        }
    result["startup_over_goal"] = round(max(result[kind]["startup_s"] for kind in KINDS) / GOAL_S, 3)
    result["peak_over_goal"] = round(max(result[kind]["peak_mb"] for kind in KINDS) / GOAL_MB, 3)
    print(json.dumps(result, indent=2))


def in_own_process(kind: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make the file and a model, and measure in a new process, which has nothing of it in its caches."""
    from small_model import make_model

    path = write_rows(folder / f"rows.{kind}", options.rows)
    model = folder / "model"
    if not model.exists():
        make_model(model, words=32_000, hidden=128, layers=1)
        save_tokenizer(model)
    command = [sys.executable, __file__, "--measure", str(path), "--rendered", str(options.rendered)]
    environment = os.environ | {"HF_HOME": str(folder / "huggingface")}
    process = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {"file_mb": _mb(path.stat().st_size), **json.loads(process.stdout)}


def measure(path: Path, rendered: int) -> dict[str, Any]:
    """What a run's driver does with a file of rows, until it has the first step's prompts."""
    import psutil

    from megatron_grpo.data.load_prompts import load_prompt_data
    from megatron_grpo.preflight.load import check_overrides

    process = psutil.Process()
    checks_begin = time.time()
    checked = check_overrides(_overrides(path, rendered))
    config = checked.require()
    prompts_begin = time.time()
    data = load_prompt_data(config, path.parent / "model")
    batch_begin = time.time()
    first = next(iter(data.loader))
    ended = time.time()
    assert len(first) == PROMPTS
    return {
        "startup_s": round(ended - process.create_time(), 1),
        "checks_s": round(prompts_begin - checks_begin, 1),
        "prompts_s": round(batch_begin - prompts_begin, 1),
        "first_batch_s": round(ended - batch_begin, 2),
        "peak_mb": _peak_mb(),
        "notes": [note.replace(str(path), path.name) for note in data.notes],
    }


def _overrides(path: Path, rendered: int) -> list[str]:
    """The command line of a run on these rows."""
    return [
        f"policy.model.path={path.parent / 'model'}",
        f"policy.max_total_sequence_length={LONGEST + 64}",
        "generation.max_new_tokens=64",
        f"data.train_path={path}",
        f"data.max_input_seq_length={LONGEST}",
        f"data.rows_rendered_at_start={rendered}",
        "cluster.gpus_per_node=0",
        f"grpo.num_prompts_per_step={PROMPTS}",
        f"run_dir={path.parent / 'run'}",
    ]


def _peak_mb() -> int:
    """Largest resident memory of this process, and of the largest child that it had."""
    with open("/proc/self/status", encoding="ascii") as file:
        (peak,) = (int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    return _mb((peak + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024)


def _mb(size: float) -> int:
    return round(size / 1e6)


class Numbers:
    """As many prompts as there are rows, which nothing has to render."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, idx: int, /) -> Any:
        return {"idx": idx, "loss_multiplier": 1.0}


def visits(rows: int) -> dict[str, Any]:
    """Visits of each row in two epochs, the first with a new loader after a random step."""
    import numpy as np

    per_batch = min(PROMPTS, rows)
    counts = np.zeros((2, rows), dtype=np.int64)
    steps = random.Random(0).randrange(1, max(rows // per_batch, 2))
    begin = time.monotonic()
    for number, batch in enumerate(loader := _loader(rows, per_batch), start=1):
        counts[0, [prompt["idx"] for prompt in batch]] += 1
        if number == steps:
            break
    state = json.loads(json.dumps(loader.state_dict()))
    started_at, resume_s = time.monotonic(), None
    resumed = _loader(rows, per_batch)
    resumed.load_state_dict(state)
    while resumed.epoch < 2:
        epoch = resumed.epoch
        for batch in resumed:
            resume_s = resume_s or time.monotonic() - started_at
            counts[epoch, [prompt["idx"] for prompt in batch]] += 1
    return {
        "stopped_after_steps": steps,
        "visits_by_epoch": [[int(count.min()), int(count.max())] for count in counts],
        "resume_s": round(resume_s or 0.0, 2),
        "two_epochs_s": round(time.monotonic() - begin, 1),
    }


def _loader(rows: int, per_batch: int) -> Any:
    """The loader of a run, shuffled."""
    from megatron_grpo.data.loader import PromptLoader, PromptSampler

    order = PromptSampler([rows], [1.0], shuffle=True, seed=42)
    prompts: Any = Numbers(rows)
    return PromptLoader(prompts, prompts_per_batch=per_batch, order=order)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rendered", type=int, default=50_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
