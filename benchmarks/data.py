"""A million rows: how long a run takes to know them, in how much memory, and that an order survives a stop.

python benchmarks/data.py [rows=1000000] prints a JSON: seconds and resident memory of the checks before a run and of
its prompts (with the tokenizer of the quickstart); and visits of each row in two epochs with a stop in the first.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from megatron_grpo.composition.compose import compose_typed
from megatron_grpo.config.schema import Config
from megatron_grpo.data.epoch_order import Visits
from megatron_grpo.data.examine import examined
from megatron_grpo.data.load_prompts import load_prompt_data
from megatron_grpo.data.loader import PromptLoader
from megatron_grpo.prepare.addition import prepare

PROMPTS = 1000
"""Prompts of a step."""
LENGTH = 300
"""Characters of a row beside its prompt."""


def main(rows: int) -> None:
    """Measure, and print what was found."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_rows(Path(folder) / "rows.jsonl", rows)
        prepared = Path(folder) / "prepared"
        prepare("addition", prepared)
        config = configured(path, prepared)
        result = {"rows": rows, "bytes": path.stat().st_size, **startup(config, prepared / "model")}
        result |= visits(rows)
        print(json.dumps({**result, "machine": platform.processor() or platform.machine()}, indent=1))


def write_rows(path: Path, rows: int) -> Path:
    """A file of rows of about LENGTH characters each."""
    filling = "x" * LENGTH
    with path.open("w") as file:
        for number in range(rows):
            prompt, answer = f"{number % 90 + 10}+{number // 90 % 90 + 10}=", f"{number:07d}"
            row = {"prompt": prompt, "answer": answer, "filling": filling, "number": number}
            file.write(json.dumps(row) + "\n")
    return path


def configured(path: Path, folder: Path) -> Config:
    """The quickstart with these rows."""
    overrides = [f"data.train_path={path}", "data.val_path=null", f"grpo.num_prompts_per_step={PROMPTS}"]
    config = compose_typed(["+exp=quickstart", f"prepare.folder={folder}", *overrides]).config
    assert config is not None
    return config


def startup(config: Config, model: Path) -> dict[str, Any]:
    """Seconds until rows are checked, and until prompts can be drawn, with the growth of this process in MB."""
    process = psutil.Process()
    before, begin = process.memory_info().rss, time.monotonic()
    environments = {name: env.type for name, env in config.env.items()}
    (one,) = config.data.training.values()
    report = examined(one, config.data, environments).report
    checked = time.monotonic() - begin
    load_prompt_data(config, model)
    return {
        "usable": report.rows,
        "duplicates": report.duplicates,
        "check_s": round(checked, 2),
        "startup_s": round(time.monotonic() - begin, 2),
        "memory_mb": round((process.memory_info().rss - before) / 2**20),
        "process_mb": round(process.memory_info().rss / 2**20),
    }


class Numbers:
    """As many prompts as there are rows, which nothing has to render."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, idx: int, /) -> Any:
        return {"idx": idx, "loss_multiplier": 1.0}


def visits(rows: int) -> dict[str, Any]:
    """Visits of each row in two epochs, the first with a stop and a new loader in its middle."""
    counts = np.zeros((2, rows), dtype=np.int64)
    begin = time.monotonic()
    for number, batch in enumerate(loader := loader_of(rows)):
        counts[0, [prompt["idx"] for prompt in batch]] += 1
        if number == rows // PROMPTS // 3:
            break
    state = json.loads(json.dumps(loader.state_dict()))
    resumed, asked, resume_s = loader_of(rows), time.monotonic(), None
    resumed.load_state_dict(state)
    for epoch in range(2):
        for batch in resumed:
            resume_s = resume_s or time.monotonic() - asked
            counts[epoch, [prompt["idx"] for prompt in batch]] += 1
    return {
        "visits_by_epoch": [[int(one.min()), int(one.max())] for one in counts],
        "resume_s": round(resume_s or 0.0, 2),
        "two_epochs_s": round(time.monotonic() - begin, 1),
    }


def loader_of(rows: int) -> PromptLoader:
    """The loader of a run, shuffled."""
    return PromptLoader(Numbers(rows), prompts_per_batch=PROMPTS, order=Visits([rows], [1.0], shuffle=True, seed=42))


if __name__ == "__main__":
    given = dict(argument.split("=") for argument in sys.argv[1:])
    main(int(given.get("rows", 1_000_000)))
