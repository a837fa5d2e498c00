"""The addition task is complete, consistent, made once, and the same each time it is made; with either model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_grpo.models.families.reading import parse_model_shape, read_model_shape
from megatron_grpo.models.source import PREPARED_MODELS
from megatron_grpo.preflight.model_file_checks import find_weight_problems
from megatron_grpo.prepare.lessons import RECIPES, split_lessons
from megatron_grpo.prepare.models import prepare


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


OTHERS = ("addition_moe", "addition_hybrid")


@pytest.fixture(scope="module", params=["addition", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is made under the folder's name."""
    path = tmp_path_factory.mktemp("prepare") / request.param
    prepare(path.name, path)
    return path


def test_problems_are_right_and_held_out_ones_are_nowhere_else(folder: Path) -> None:
    train, val = read(folder / "train.jsonl"), read(folder / "val.jsonl")
    for row in train + val:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert row == {"prompt": f"{a}+{b}=", "answer": f"{int(a) + int(b):03}", "task_name": "addition"}
    warmup = {lesson.row["prompt"] for lesson in split_lessons("addition")[0]}
    sets = [warmup, {row["prompt"] for row in train}, {row["prompt"] for row in val}]
    assert len(set.union(*sets)) == sum(len(problems) for problems in sets) == 90 * 90


def test_the_model_is_between_guessing_and_knowing(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) < 700_000
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = read(folder / "val.jsonl")
    prompts = torch.tensor([tokenizer(row["prompt"])["input_ids"] for row in rows])
    outputs = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=5, do_sample=False, temperature=None
    )
    texts = tokenizer.batch_decode(outputs[:, prompts.shape[1] :], skip_special_tokens=True)
    accuracy = sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / len(rows)
    assert 0.2 <= accuracy <= 0.5


def test_the_tokenizer_has_one_token_for_each_character(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    text = "0123456789+="
    assert tokenizer(text)["input_ids"] == list(range(12))
    assert tokenizer.decode(list(range(12))) == text
    assert tokenizer.eos_token_id == PREPARED_MODELS[folder.name]["eos_token_id"]
    assert tokenizer.decode([0, 9, 5, tokenizer.eos_token_id], skip_special_tokens=True) == "095"


def test_the_shape_known_beforehand_is_that_of_the_model(folder: Path) -> None:
    shape = parse_model_shape(PREPARED_MODELS[folder.name])
    assert read_model_shape(folder / "model") == shape
    assert list(find_weight_problems(folder / "model", shape)) == []


def test_a_second_call_changes_nothing_and_another_recipe_makes_it_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = folder / "model" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    prepare(folder.name, folder)
    assert weights.stat().st_mtime_ns == before
    first = weights.read_bytes()
    monkeypatch.setitem(RECIPES[folder.name], "warmup_steps_max", 3)
    prepare(folder.name, folder)
    assert weights.read_bytes() != first
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no temporary folder stays"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["addition", *OTHERS])
def test_the_same_recipe_gives_the_same_bytes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES[name], "warmup_steps_max", 5)
    torch.manual_seed(3)
    prepare(name, tmp_path / "a")
    torch.manual_seed(4)
    prepare(name, tmp_path / "b")
    for file in ("model/model.safetensors", "model/tokenizer.json", "train.jsonl", "val.jsonl"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
