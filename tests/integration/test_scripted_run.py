"""A run of a script: what its functions, its reward model and its callbacks were told, in one run of two steps."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

from megatron_grpo.batch.rollout_files import read_rollouts
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.prepare.models import prepare
from tests.integration.runs import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.ci]  # tests/unit/test_api.py has scripts without a run

ROOT = Path(__file__).parents[2]
NAMES = ("reward_len", "math_reward_func", "unique_letters", "by_step", "judge")
WEIGHTS = dict(zip(NAMES, (0.1, 1.0, 0.5, 1.0, 2.0), strict=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the script, after its run."""
    folder = tmp_path_factory.mktemp("scripted")
    prepared = compose_config(["+exp=quickstart"]).prepare.folder
    prepare("addition", prepared)
    tokenizer = AutoTokenizer.from_pretrained(Path(prepared) / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        head_dim=8,
        num_labels=1,
        pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        **sizes,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder / "judge")
    tokenizer.save_pretrained(folder / "judge")
    command = [sys.executable, str(ROOT / "tests/integration/scripted_run.py"), str(folder), str(folder / "judge")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return folder


def test_each_function_is_called_as_trl_calls_it(finished: Path) -> None:
    rollouts = [row for step in (1, 2) for row in read_rollouts(finished / "run", step)]
    assert len(rollouts) == 2 * 64
    rows = read_jsonl(finished / "run" / "data" / "train.jsonl")
    for row in rollouts:
        prompt, text, parts = rows[row["prompt_idx"]], row["response"], row["reward_parts"]
        assert parts["reward_len"] == -abs(20 - len(text))
        assert parts["unique_letters"] == len(set(text))
        assert ("math_reward_func" in parts) == (prompt["task"] == "math"), "None is left out"
        if "math_reward_func" in parts:
            right = text == f"{2 * int(prompt['prompt'][:2]):03d}"
            assert parts["math_reward_func"] == (1.0 if right else -1.0)
        group = [row_ for row_ in rollouts if (row_["step"], row_["group"]) == (row["step"], row["group"])]
        fails = any(row_["response"].startswith("1") for row_ in group)
        assert ("by_step" in parts) == (not fails), "it fails over the groups of these, and over no others"
        assert row["reward_errors"] == (1 if fails else 0)
        assert parts.get("by_step", row["step"] - 1) == row["step"] - 1
        assert row["reward"] == pytest.approx(sum(WEIGHTS[name] * value for name, value in parts.items()))


def test_the_reward_model_says_what_transformers_says(finished: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(finished / "judge").eval()
    tokenizer = AutoTokenizer.from_pretrained(finished / "judge")
    rows = read_jsonl(finished / "run" / "data" / "train.jsonl")
    rollouts = list(read_rollouts(finished / "run", 1))[:16]
    for row in rollouts:
        ids = tokenizer(rows[row["prompt_idx"]]["prompt"] + row["response"], add_special_tokens=False)["input_ids"]
        with torch.inference_mode():
            expected = float(model(torch.tensor([ids])).logits[0, 0])
        assert row["reward_parts"]["judge"] == pytest.approx(expected, abs=1e-4)


def test_metrics_and_callbacks_tell_the_same(finished: Path) -> None:
    reported: list[dict[str, Any]] = json.loads((finished / "reported.json").read_text())
    assert [row["step"] for row in reported] == [1, 2], "a callback ended training"
    for row in reported:
        assert row["env/steps_done"] == row["step"] - 1
        assert {f"reward/{name}" for name in NAMES} <= row.keys()
        assert row.get("reward_errors", 0) == sum(
            rollout["reward_errors"] for rollout in read_rollouts(finished / "run", row["step"])
        )
    journal = read_jsonl(finished / "journal.jsonl")
    assert [event[:2] for event in journal] == [
        ["step", 1],
        ["validation", 2],
        ["step", 2],
        ["checkpoint", 2],
        ["end", 2],
    ]
    assert {"val_reward", "val_set_reward/math", "val_set_reward/other"} <= set(journal[1][2])
    assert journal[2][2] == reported[1]["reward"]
