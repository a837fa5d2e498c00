"""Every line of the tables in docs/migrating.md composes."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest
from trl import GRPOConfig

from megatron_grpo.config.keys import keys
from megatron_grpo.preflight.load import compose_config

PAGE = Path(__file__).parents[3] / "docs" / "migrating.md"
LINES = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
NEEDS = {
    "generation.max_new_tokens=256": ["policy.max_total_sequence_length=2048"],
    "+variant=dr_grpo": ["policy.train_global_batch_samples=64"],
}
"""What a line composes beside only."""


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip())
def test_a_line_composes(given: list[str], line: str) -> None:
    _, foreign, here, _ = line.split("|")
    overrides = re.findall(r"`([^`]+)`", here)
    assert re.findall(r"`[^`]+`", foreign)
    assert overrides
    keys = {one.partition("=")[0] for one in overrides}
    replaced = {"data.train_path"} if any(key.startswith("data.train_sets.") for key in keys) else set()
    base = [one for one in given if one.partition("=")[0] not in keys | replaced]
    if "data" in keys:
        base = [one for one in base if not one.startswith("data.train_path")]
    compose_config([*base, *overrides, *NEEDS.get(overrides[0], [])])


def test_defaults_that_differ_are_told_as_they_are() -> None:
    text = PAGE.read_text().partition("### Defaults that differ")[2].partition("\n\n`GRPOTrainer")[0]
    rows = re.findall(r"^\| `(\w+)=(.+?)` \((.+?)\) \| `([\w.]+)=(\S+?)`", text, flags=re.MULTILINE)
    assert len(rows) == 8
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    for name, value, ours, key, wanted in rows:
        assert theirs[name] == ast.literal_eval(value), name
        assert keys()[key].default_text.partition(",")[0] == ours.partition(",")[0] != wanted


def test_the_tables_are_of_three_frameworks() -> None:
    assert len(LINES) > 90
    assert re.findall(r"^## (\w+)", PAGE.read_text(), flags=re.MULTILINE) == ["TRL", "NeMo", "verl"]
