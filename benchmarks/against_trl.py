"""Compares a whole GRPO step with TRL's on the same model, prompts and machine; prints JSON.

    python benchmarks/against_trl.py [--steps 4] [--rounds 1] [--precision float32] [--trl-microbatch 32] [override ...]

A model of 21 million parameters with random weights: 16 prompts, 8 samples each, 128 tokens each, reward by a function,
one optimizer step (AdamW, no reference model). Ours is policy and vLLM in one stage each; TRL samples with transformers
and has gradient checkpointing off. In bfloat16 ours has weights of that type beside those of the optimizer, and TRL's
trainer autocasts, as each does by default. Sides take turns, a process of its own each, all cores each. `ratio` is the
median seconds of TRL's steps over ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from header import header
from small_model import SAMPLES, WORDS, even_words, make_model, prompts, run, settings_of_a_run, steps_of_a_run

PROMPTS, TOKENS, WARM_UP_STEPS = 16, 128, 1


def measure_ours(folder: Path, steps: int, precision: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Seconds of each step, and of its phases."""
    settings = settings_of_a_run(
        folder, words=WORDS, tokens=TOKENS, prompts_per_step=PROMPTS, steps=steps + WARM_UP_STEPS
    )
    run([sys.executable, "-m", "megatron_grpo.train", *settings, f"policy.precision={precision}", *overrides])
    rows = steps_of_a_run(folder, WARM_UP_STEPS)
    phases = sorted({name for row in rows for name in row["timing"]})
    return {
        "step_s": [row["timing"]["total"] for row in rows],
        "response_length": statistics.fmean(row["response_length"] for row in rows),
        "timing": {name: statistics.median(row["timing"].get(name, 0.0) for row in rows) for name in phases},
    }


def measure_trl(folder: Path, steps: int, precision: str, microbatch: int) -> dict[str, Any]:
    """Seconds of each step."""
    answer = folder / "trl.json"
    arguments = ["--trl-in", str(folder), "--answer", str(answer), "--precision", precision]
    run([sys.executable, __file__, *arguments, "--steps", str(steps), "--trl-microbatch", str(microbatch)])
    figures: dict[str, Any] = json.loads(answer.read_text())
    return figures


def train_with_trl(folder: Path, steps: int, precision: str, microbatch: int) -> dict[str, Any]:
    """In this process."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        """Seconds between the ends of steps."""

        def __init__(self) -> None:
            self.ends = [time.perf_counter()]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    clock = Clock()
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=PROMPTS * SAMPLES // microbatch,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        max_steps=steps + WARM_UP_STEPS,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        temperature=1.0,
        beta=0.0,
        use_cpu=True,
        bf16=precision == "bfloat16",
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        reward_funcs=even_words,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts(PROMPTS * (steps + WARM_UP_STEPS))}),
        callbacks=[clock],
    )
    trainer.train()
    lengths = [row["completions/mean_length"] for row in trainer.state.log_history if "completions/mean_length" in row]
    seconds = [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]
    return {"step_s": seconds[WARM_UP_STEPS:], "response_length": statistics.fmean(lengths[WARM_UP_STEPS:])}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Both sides, in turn."""
    ours, trl = [], []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        make_model(Path(name) / "model")
        for number in range(options.rounds):
            folder = Path(name) / str(number)
            folder.mkdir()
            (folder / "model").symlink_to(Path(name) / "model")
            ours.append(measure_ours(folder, options.steps, options.precision, options.overrides))
            trl.append(measure_trl(folder, options.steps, options.precision, options.trl_microbatch))
    seconds = {
        side: statistics.median(second for duration in runs for second in duration["step_s"])
        for side, runs in (("ours", ours), ("trl", trl))
    }
    return {
        **header("against_trl"),
        "samples": PROMPTS * SAMPLES,
        "tokens": TOKENS,
        "precision": options.precision,
        "overrides": list(options.overrides),
        "trl_microbatch": options.trl_microbatch,
        "step_s": seconds,
        "ratio": seconds["trl"] / seconds["ours"],
        "runs": {"ours": ours, "trl": trl},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--trl-microbatch", type=int, default=32, help="samples of one of TRL's forward passes")
    parser.add_argument("--trl-in", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    if arguments.trl_in is None:
        print(json.dumps(compare(arguments), indent=2))
    else:
        answer = train_with_trl(arguments.trl_in, arguments.steps, arguments.precision, arguments.trl_microbatch)
        arguments.answer.write_text(json.dumps(answer))
