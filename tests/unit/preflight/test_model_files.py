"""Weights and tokenizer files of a model folder, told before a start where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models

from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.preflight.load import load_config
from megatron_grpo.preflight.model_file_checks import find_weight_problems
from tests.support.config_problems import SMALL, problems_of, write_weights

VOCAB = SMALL["vocab_size"]


@pytest.fixture
def plain(base_overrides: list[str]) -> list[str]:
    return [*base_overrides, "data.apply_chat_template=false"]


def write_tokenizer(model: Path, words: int, added: tuple[str, ...], **settings: Any) -> None:
    """A tokenizer of this many words, followed by added tokens, as a file of the tokenizers library."""
    core = Tokenizer(models.WordLevel({f"w{n}": n for n in range(words)}, unk_token="w0"))
    core.add_special_tokens([AddedToken(token, special=True) for token in added])
    core.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("form", ["text", "object", "map"])
def test_an_end_token_beyond_the_vocabulary_is_named(plain: list[str], model: Path, form: str) -> None:
    token: Any = "<|im_end|>" if form == "text" else {"content": "<|im_end|>", "lstrip": False}
    write_tokenizer(model, VOCAB, ("<|im_end|>",), **({} if form == "map" else {"eos_token": token}))
    if form == "map":
        (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": token}))
    text = problems_of(plain)[f"policy.model.path={model}"]
    assert f"the tokenizer's eos_token <|im_end|> is token {VOCAB}, and the model's tokens are numbered" in text
    write_tokenizer(model, VOCAB - 1, ("<|im_end|>",), eos_token=token)
    load_config(plain)


def test_an_end_token_that_the_file_lacks_would_come_after_its_last(plain: list[str], model: Path) -> None:
    write_tokenizer(model, VOCAB, (), eos_token="<|im_end|>")
    assert f"eos_token <|im_end|> is token {VOCAB}" in problems_of(plain)[f"policy.model.path={model}"]
    write_tokenizer(model, VOCAB - 1, (), eos_token="<|im_end|>")
    load_config(plain)


@pytest.mark.parametrize("end", [VOCAB, [3, VOCAB + 7], -1])
def test_end_tokens_of_the_generation_config_beyond_the_vocabulary(plain: list[str], model: Path, end: Any) -> None:
    write_tokenizer(model, VOCAB, (), eos_token="w1")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    text = problems_of(plain)[f"policy.model.path={model}"]
    assert text.startswith("eos_token_id of generation_config.json has ")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, VOCAB - 1]}))
    load_config(plain)


def test_tokens_of_the_chat_template_beyond_the_vocabulary(base_overrides: list[str], model: Path) -> None:
    template = "{{ '<|im_start|>' + messages[0].content }}"
    write_tokenizer(model, VOCAB, ("<|im_start|>", "[PAD]"), eos_token="w1", pad_token="[PAD]", chat_template=template)
    text = problems_of(base_overrides)[f"policy.model.path={model}"]
    assert f"the chat template writes <|im_start|>, which is token {VOCAB}, and" in text
    # A padding token beyond the vocabulary, as fine-tuned Llama models have, is in no prompt.
    write_tokenizer(model, VOCAB, ("[PAD]",), eos_token="w1", pad_token="[PAD]", chat_template=template)
    load_config(base_overrides)
    (model / "chat_template.jinja").write_text("{{ '[PAD]' }}")
    assert "the chat template writes [PAD]" in problems_of(base_overrides)[f"policy.model.path={model}"]


def test_a_chat_template_of_the_configuration_stands_in_for_the_tokenizers(
    base_overrides: list[str], model: Path, tmp_path: Path
) -> None:
    write_tokenizer(model, 8, (), eos_token="w1")
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].content }}")
    text = problems_of(base_overrides)["data.apply_chat_template=True"]
    assert "has no chat template" in text
    assert "data.chat_template" in text
    load_config([*base_overrides, f"data.chat_template={file}"])
    load_config([*base_overrides, f"data.tasks.math.chat_template={file}"])
    load_config([*base_overrides, "data.tasks.math.apply_chat_template=false"])
    plain = [*base_overrides, "data.apply_chat_template=false"]
    load_config(plain)
    subject = "data.tasks.math.apply_chat_template=True"
    assert "has no chat template" in problems_of([*plain, "data.tasks.math.apply_chat_template=true"])[subject]


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 11422654\n"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(plain: list[str], model: Path, name: str) -> None:
    """A clone without Git LFS has pointers in place of the large files."""
    write_tokenizer(model, VOCAB, (), eos_token="w1")
    load_config(plain)
    (model / name).write_text(POINTER)
    text = problems_of(plain)[f"policy.model.path={model}"]
    assert f"{model / name}" in text
    assert "is a pointer of Git LFS" in text


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet", "train.csv"])
def test_a_pointer_in_place_of_rows_is_named(plain: list[str], rows: Path, name: str) -> None:
    file = rows.with_name(name)
    file.write_text(POINTER)
    text = problems_of([*plain, f"data.train_path={file}"])[str(file)]
    assert text.startswith("is a pointer of Git LFS")


SHAPE = parse_model_shape(SMALL)
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_weights(tmp_path / "model.safetensors", SMALL)
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    return tmp_path


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # safe_open is not a dict


def test_a_whole_model_is_right_in_one_file_and_in_several(folder: Path) -> None:
    assert list(find_weight_problems(folder, SHAPE)) == []
    tensors = tensors_of(folder)
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(find_weight_problems(folder, SHAPE)) == []
    (folder / "b.safetensors").unlink()
    (text,) = find_weight_problems(folder, SHAPE)
    assert text == f"{folder}/b.safetensors does not exist, but model.safetensors.index.json names it"


def test_a_file_that_is_cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:
        opened.truncate(size - 1)
    (text,) = find_weight_problems(folder, SHAPE)
    assert text.startswith(f"{file} is not a complete safetensors file")
    assert "not fully covered" in text
    for length in (0, 5, 100):
        with file.open("r+b") as opened:
            opened.truncate(length)
        (text,) = find_weight_problems(folder, SHAPE)
        assert text.startswith(f"{file} is not a complete safetensors file")


def test_missing_tensors_and_other_shapes(folder: Path) -> None:
    tensors = tensors_of(folder)
    save_file({name: tensor for name, tensor in tensors.items() if name != NORM}, folder / "model.safetensors")
    assert list(find_weight_problems(folder, SHAPE)) == [f"the folder has no tensor {NORM}"]
    save_file({NORM: tensors[NORM]}, folder / "model.safetensors")
    (text,) = find_weight_problems(folder, SHAPE)
    assert text.endswith(f"and {len(tensors) - 2} others that config.json implies")
    save_file(tensors | {NORM: torch.zeros(3)}, folder / "model.safetensors")
    assert list(find_weight_problems(folder, SHAPE)) == [f"{NORM} has shape [3], but config.json implies [64]"]


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": 3}', '{"weight_map": {"a": ["b"]}}', "[" * 100_000])
def test_a_broken_index(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    (text,) = find_weight_problems(folder, SHAPE)
    assert "is not a safetensors index" in text


@pytest.mark.parametrize("header", [b"[]", b'{"a": 3}', b'{"a": {"shape": [1]}}', b"{" * 50, b"\xff" * 20])
def test_a_broken_header(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (text,) = find_weight_problems(folder, SHAPE)
    assert "is not a complete safetensors file" in text
