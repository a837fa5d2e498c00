"""max_num_steps=-1: as many steps as the epochs have, once the rows are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_grpo.config.schema import OptimizerConfig
from megatron_grpo.preflight.load import load_config
from tests.support.config_problems import problems_of


@pytest.fixture
def sized(base_overrides: list[str], tmp_path: Path) -> list[str]:
    """100 rows, 8 prompts a step."""
    rows = tmp_path / "hundred.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": str(n)}) + "\n" for n in range(100)))
    overrides = [override for override in base_overrides if not override.startswith("data.train_path")]
    return [*overrides, f"data.train_path={rows}", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=2"]


def test_the_steps_are_those_of_the_epochs(sized: list[str]) -> None:
    config = load_config([*sized, "grpo.max_num_steps=-1", "grpo.max_num_epochs=3"])
    assert config.grpo.max_num_steps == 36, "12 whole batches of 8 in each epoch"
    assert config.decay_steps == 36


def test_mixed_sets_count_by_their_weights(sized: list[str]) -> None:
    path = next(override for override in sized if override.startswith("data.train_path")).partition("=")[2]
    overrides = [override for override in sized if not override.startswith("data.train_path")]
    sets = [f"data.train_sets.a.path={path}", f"data.train_sets.b.path={path}", "data.train_sets.b.weight=0.5"]
    assert load_config([*overrides, *sets, "grpo.max_num_steps=-1"]).grpo.max_num_steps == 150 // 8


@pytest.mark.parametrize(
    ("weight", "subject", "text"),
    [
        ("0.04", "data.train_sets.a.path", "has 4 rows, by weight, for an epoch, fewer than the 8 prompts"),
        ("0.004", "data.train_sets.a.weight=0.004", "visits none of its 100 rows in an epoch; give 0.01 or more"),
    ],
)
def test_a_weight_that_leaves_too_few_rows_is_refused(sized: list[str], weight: str, subject: str, text: str) -> None:
    path = next(override for override in sized if override.startswith("data.train_path")).partition("=")[2]
    overrides = [override for override in sized if not override.startswith("data.train_path")]
    sets = [f"data.train_sets.a.path={path}", f"data.train_sets.a.weight={weight}"]
    ((about, problem),) = problems_of([*overrides, *sets]).items()
    assert about.startswith(subject)
    assert text in problem


def test_a_stream_needs_a_number(base_overrides: list[str]) -> None:
    overrides = [override for override in base_overrides if not override.startswith("data.train_path")]
    stream = ["data.train_path=some/name", "data.streaming=true"]
    assert problems_of([*overrides, *stream, "grpo.max_num_steps=-1"]) == {
        "grpo.max_num_steps=-1": "needs rows that can be counted, and they are streamed; give a number of steps"
    }


@pytest.mark.parametrize(("ratio", "steps", "warmup"), [(0.1, 100, 10), (0.1, 101, 11), (0.0, 9, 0), (1.0, 7, 7)])
def test_a_warm_up_is_a_share_of_the_schedule(ratio: float, steps: int, warmup: int) -> None:
    assert OptimizerConfig(warmup_ratio=ratio).count_warmup_steps(steps) == warmup
    assert OptimizerConfig(warmup_steps=5).count_warmup_steps(steps) == 5
