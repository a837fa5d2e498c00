"""Folders of runs for tests of their page, with a tokenizer whose tokens are single bytes."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_grpo.batch.rollout_files import locate_rollouts_file, write_rollouts
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.keys import build_values
from megatron_grpo.config.schema import Config
from tests.support.trajectories import make_trajectory, with_learnt

PROMPT = "What is 2 + 2? "


def byte_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer whose tokens are bytes, written to the folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def make_answer(tokenizer: Tokenizer, response: str, **changes: Any) -> Trajectory:
    """A trajectory that answers PROMPT with a text."""
    prompt, answer = (tokenizer.encode(text, add_special_tokens=False).ids for text in (PROMPT, response))
    values: dict[str, Any] = {
        "prompt_tokens": len(prompt),
        "token_ids": [*prompt, *answer],
        "logprobs": np.linspace(-2.0, 0.0, len(answer)),
        "spans": [Span(len(prompt), len(prompt) + len(answer), 0)],
        "response": response,
        "reward": 1.0,
        "correct": True,
    }
    return make_trajectory(len(answer), **(values | changes))


def make_run(
    folder: Path,
    *,
    steps: int,
    model: Path,
    trajectories: Sequence[Trajectory],
    learnt: bool = True,
    algorithm: str = "grpo",
) -> Path:
    """The folder of a run that had the same trajectories in every step."""
    folder.mkdir(parents=True)
    config = Config(algorithm=algorithm)
    config.policy.model.path = str(model)
    (folder / "config.yaml").write_text(yaml.safe_dump(build_values(config), sort_keys=False))
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(metrics_of(step)) + "\n")
    with (folder / "validation.jsonl").open("w") as file:
        for step in range(0, steps + 1, max(steps // 10, 1)):
            file.write(json.dumps({"step": step, "val_accuracy": step / steps}) + "\n")
    summary = {"outcome": "completed", "reason": None, "accuracy_before": 0.0, "accuracy_after": 1.0, "train_s": 61.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    if not trajectories:
        return folder
    first = locate_rollouts_file(folder, 1)
    samples = {
        trajectory.group: [two for two in trajectories if two.group == trajectory.group] for trajectory in trajectories
    }
    write_rollouts(
        first, [(group, with_learnt(*group_samples, prev=learnt)) for group, group_samples in samples.items()]
    )
    for step in range(2, steps + 1):
        shutil.copy(first, locate_rollouts_file(folder, step))
    return folder


def metrics_of(step: int) -> dict[str, Any]:
    """A line of metrics.jsonl with as many figures as a real one."""
    figures = {
        name: step / 100 + number for number, name in enumerate(("reward", "accuracy", "approx_entropy", "loss"))
    }
    figures |= {f"figure_{number}": step * 1.234567 / (number + 1) for number in range(40)}
    timing = {"generation": 0.5, "train": 0.3 + 0.001 * step, "refit": 0.1, "total": 1.0 + 0.001 * step}
    return {"step": step, **figures, "timing": timing, "throughput": {"samples_per_s": 8.0}}
