"""A training run of a script with TRL's reward functions, a reward model and a callback; arguments: folder, model."""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import megatron_grpo

SHORT, LONG = range(10, 42), range(42, 74)


def reward_len(completions, **kwargs):  # as it stands in TRL's documentation: no annotations, whole numbers
    return [-abs(20 - len(completion)) for completion in completions]


def math_reward_func(prompts: list[str], completions: list[str], task: list[str], **kwargs: Any) -> list[float | None]:
    """1 or -1 for the rows of one task; nothing to say of others."""
    return [
        (1.0 if completion == f"{2 * int(prompt[:2]):03d}" else -1.0) if task_name == "math" else None
        for prompt, completion, task_name in zip(prompts, completions, task, strict=True)
    ]


async def unique_letters(completions: list[str], completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Different characters, after a while; and whether the tokens are those of the text."""
    await asyncio.sleep(0.01)
    assert all(len(ids) >= len(text) for ids, text in zip(completion_ids, completions, strict=True))
    return [float(len(set(completion))) for completion in completions]


def by_step(completions: list[str], trainer_state: Any, log_metric: Any, **kwargs: Any) -> list[float | None]:
    """Steps that are done, and a failure for some."""
    log_metric("steps_done", trainer_state.global_step)
    if any(text.startswith("1") for text in completions):
        raise KeyError("begins with 1")
    return [float(trainer_state.global_step)] * len(completions)


class Journal(megatron_grpo.Callback):
    """Writes down what it is told, and ends training after the second step."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def write(self, *entry: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def on_step(self, step: int, metrics: Mapping[str, float]) -> bool:
        self.write("step", step, metrics["reward"])
        return step == 2

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.write("validation", step, sorted(metrics))

    def on_checkpoint(self, step: int, folder: Path) -> None:
        self.write("checkpoint", step, folder.name)

    def on_end(self, step: int) -> None:
        self.write("end", step)


def main(folder: Path, model: str) -> None:
    rows = [
        {"prompt": f"{n}+{n}=", "task": task} for numbers, task in ((SHORT, "math"), (LONG, "other")) for n in numbers
    ]
    held_out = {"math": rows[:8], "other": rows[-8:]}
    run = megatron_grpo.train(
        {
            "+exp": "quickstart",
            "run_dir": str(folder / "run"),
            "logger.progress": False,
            "grpo.max_num_steps": 4,
            "grpo.num_prompts_per_step": 16,
            "grpo.num_generations_per_prompt": 4,
            "grpo.val_at_start": False,
            "grpo.val_period": 2,
            "checkpointing.save_period": 100,
            "checkpointing.metric_name": "reward",
            "env.addition.reward_weights": [0.1, 1.0, 0.5, 1.0, 2.0],
            "env.addition.on_reward_error": "none",
        },
        train_dataset=rows,
        val_dataset=held_out,
        rewards=[reward_len, math_reward_func, unique_letters, by_step, model],
        callbacks=[Journal(folder / "journal.jsonl")],
    )
    (folder / "reported.json").write_text(json.dumps(run.metrics))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
