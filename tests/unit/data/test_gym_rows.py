"""Rows of reasoning_gym: mixtures, levels and held-out rows, against the library itself."""

import json
from collections import Counter
from typing import Any

import pytest
from pydantic import TypeAdapter

from megatron_grpo.config.data_schema import DataConfig, DatasetConfig
from megatron_grpo.config.gym_schema import GymConfig
from megatron_grpo.data.gym_rows import ENTRY, GymError, GymRows
from megatron_grpo.data.rows import examine_set
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.prepare.lessons import RECIPES, split_lessons

pytest.importorskip("reasoning_gym", reason="the extra reasoning_gym is not installed")

SUMS = {"options": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}}


def make(split: str = "train", **values: Any) -> GymRows:
    return GymRows(TypeAdapter(GymConfig).validate_python({"rows": 200, "held_out_rows": 20, **values}), split)


def test_rows_are_the_librarys() -> None:
    import reasoning_gym

    (row,) = make("test", held_out_rows=1, seed=3, tasks={"chain_sum": SUMS}).read_all()
    seeds = (2 * 3 + 1) * 2**20
    item = reasoning_gym.create_dataset("chain_sum", seed=seeds, size=1, **SUMS["options"])[0]
    assert (row["prompt"], row["answer"], row[ENTRY].item) == (item["question"], item["answer"], item)


def test_no_training_row_has_a_held_out_question() -> None:
    tasks = {"chain_sum": SUMS}  # few questions, so that other seeds alone would repeat some
    held_out = {row["prompt"] for row in make("test", tasks=tasks)}
    training = [row["prompt"] for row in make(tasks=tasks)]
    assert len(training) == 200
    assert len(held_out) > 10
    assert not held_out & {*training}
    assert training == [row["prompt"] for row in make(tasks=tasks)], "a seed makes the same rows again"
    assert training != [row["prompt"] for row in make(tasks=tasks, seed=1)]


def test_a_mixture_has_the_shares_of_its_weights() -> None:
    rows = make(rows=1000, tasks={"chain_sum": {"weight": 3}, "coin_flip": {}})
    counts = Counter(row["gym_task"] for row in rows)
    assert 700 < counts["chain_sum"] < 800


def test_levels_are_those_of_the_librarys_curriculum() -> None:
    rows = [*make(rows=50, levels=3, tasks={"basic_arithmetic": {"options": {"operators": ["+"]}}})]
    assert Counter(row["level"] for row in rows) == {0: 50, 1: 50, 2: 50}
    longest = [
        max(row[ENTRY].item["metadata"]["num_terms"] for row in rows if row["level"] == level) for level in range(3)
    ]
    assert longest == [2, 3, 4]
    assert not any("*" in row["prompt"] for row in rows)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({}, "has no tasks"),
        ({"tasks": {"chainsum": {}}}, "has no task chainsum; did you mean chain_sum?"),
        ({"tasks": {"chain_sum": {"options": {"min_term": 2}}}}, "unexpected keyword argument 'min_term'"),
        ({"tasks": {"chain_sum": {"options": {"min_terms": 9, "max_terms": 2}}}}, "refuses .* of the task chain_sum"),
        ({"tasks": {"chain_sum": {"options": {"seed": 2}}}}, "sets seed of chain_sum by data.reasoning_gym.seed"),
        ({"tasks": {"chain_sum": {}}, "levels": 99}, "has 11 levels of chain_sum, not 99"),
        ({"tasks": {"coin_flip": SUMS}, "levels": 1}, "refuses .* of the task coin_flip"),
        ({"tasks": {"chain_sum": SUMS}, "held_out_rows": 5000}, "that is not held out; give fewer"),
    ],
)
def test_mistakes(values: dict[str, Any], text: str) -> None:
    with pytest.raises(GymError, match=text):
        make(**values)


def test_the_path_names_the_rows_and_their_splits() -> None:
    gym = TypeAdapter(GymConfig).validate_python({"rows": 30, "held_out_rows": 20, "tasks": {"chain_sum": {}}})
    data = DataConfig(train_path="reasoning_gym", reasoning_gym=gym, task_name="gym")
    reports = [
        examine_set(DatasetConfig(path="reasoning_gym", split=split), data, {"gym": "reasoning_gym"})
        for split in ("train", "test", "validation")
    ]
    assert [report.rows for report in reports] == [30, 20, 0]
    assert [problem.text for problem in reports[2].problems] == [
        "has no split 'validation'; there are train, and test with held-out rows"
    ]
    assert reports[0].digest != reports[1].digest != ""


def test_the_prepared_model_never_saw_the_recipes_held_out_rows() -> None:
    config = compose_config(("+exp=quickstart_reasoning_gym",))
    gym = TypeAdapter(GymConfig).validate_python(RECIPES["addition_text"]["gym"])
    assert json.dumps(gym, default=vars) == json.dumps(config.data.reasoning_gym, default=vars)
    warmup, _, val = split_lessons("addition_text")
    held_out = {row["prompt"] for row in GymRows(config.data.reasoning_gym, "test")}
    assert {lesson.row["prompt"] for lesson in val} == held_out
    assert not held_out & {lesson.row["prompt"] for lesson in warmup}
