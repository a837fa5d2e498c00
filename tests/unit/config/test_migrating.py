"""Every line of the tables in docs/python.md composes."""

from __future__ import annotations

import ast
import dataclasses
import re
from operator import attrgetter
from pathlib import Path

import pytest
from trl import GRPOConfig

from megatron_grpo.config.keys import read_keys
from megatron_grpo.config.suggestions import load_foreign_names
from megatron_grpo.preflight.load import compose_config

PAGE = Path(__file__).parents[3] / "docs" / "python.md"
SECTION = PAGE.read_text().partition("\n## Names of other frameworks\n")[2].partition("\n## Flat jobs\n")[0]
TEXT = re.sub(r"### Environments.*?(?=\n## )", "", SECTION, flags=re.DOTALL)  # a table without settings
LINES = [line for line in TEXT.splitlines() if line.startswith("| `")]
NEEDS = {
    "generation.max_new_tokens=256": ["policy.max_total_sequence_length=2048"],
    "+variant=dr_grpo": ["policy.train_global_batch_samples=64"],
}
"""What a line composes beside only."""


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split("|")[1].strip())
def test_a_line_composes(base_overrides: list[str], line: str) -> None:
    _, foreign, our_key, _ = line.split("|")
    overrides = re.findall(r"`([^`]+)`", our_key)
    assert re.findall(r"`[^`]+`", foreign)
    assert overrides
    keys = {override.partition("=")[0] for override in overrides}
    replaced = {"data.train_path"} if any(key.startswith("data.train_sets.") for key in keys) else set()
    base = [override for override in base_overrides if override.partition("=")[0] not in keys | replaced]
    if "data" in keys:
        base = [override for override in base if not override.startswith("data.train_path")]
    compose_config([*base, *overrides, *NEEDS.get(overrides[0], [])])


def test_defaults_that_differ_are_told_as_they_are() -> None:
    text = SECTION.partition("### Defaults that differ")[2].partition("### Defaults of TRL's")[0]
    rows = re.findall(r"^\| `(\w+)=(.+?)` \((.+?)\) \| `([\w.]+)=(\S+?)`", text, flags=re.MULTILINE)
    assert len(rows) == 8
    theirs = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}
    for name, value, ours, key, their_default in rows:
        assert theirs[name] == ast.literal_eval(value), name
        assert read_keys()[key].default_text.partition(",")[0] == ours.partition(",")[0] != their_default


ON_THE_PAGE = {
    "learning_rate": 1e-6,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "num_train_epochs": 3,
    "max_steps": -1,
    "num_generations": 8,
    "num_iterations": 1,
    "max_prompt_length": 512,
    "max_completion_length": 256,
    "temperature": 0.9,
    "top_p": 1.0,
    "top_k": 50,
    "repetition_penalty": 1.0,
    "beta": 0.04,
    "epsilon": 0.2,
    "scale_rewards": True,
    "sync_ref_model": False,
    "eval_strategy": "no",
    "save_steps": 500,
    "seed": 42,
}
"""Defaults in the signature of GRPOConfig on TRL's GRPO page, of settings that there are here."""


def test_the_defaults_of_trls_page_compose_together(base_overrides: list[str]) -> None:
    section = SECTION.partition("### Defaults of TRL's GRPO page")[2].partition("\n\n`policy.max_total")[0]
    overrides = [key for line in section.splitlines() if line.startswith("    ") for key in line.split()]
    config = compose_config([*base_overrides, *overrides])
    for name, value in ON_THE_PAGE.items():
        if name not in ("max_steps", "eval_strategy", "epsilon"):
            key = {"seed": "grpo.seed"}.get(name) or load_foreign_names()["TRL"][name].partition(";")[0].split()[0]
            assert attrgetter(key)(config) == value, name
    assert (config.loss_fn.ratio_clip_min, config.loss_fn.ratio_clip_max) == (0.2, None), "both sides are clipped at it"
    assert config.grpo.max_num_steps > 10**9
    assert (config.grpo.val_period, config.grpo.val_at_start, config.grpo.val_at_end) == (0, False, False)
    assert (config.data.long_prompts, config.grpo.use_leave_one_out_baseline) == ("cut_left", False)


def test_the_tables_are_of_three_frameworks() -> None:
    assert len(LINES) > 80
    assert re.findall(r"^## (\w+)", SECTION, flags=re.MULTILINE) == ["TRL", "NeMo", "verl"]
