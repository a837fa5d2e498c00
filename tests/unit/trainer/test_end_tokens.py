"""Exports end their responses with the token that ends the turns of their chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from megatron_grpo.models.hf_folder import write_hf_folder
from megatron_grpo.trainer.hf_export import find_end_tokens
from tests.support.foreign_tokenizers import CHATML, byte_level

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
HEADERS = "{% for m in messages %}{{ m.role + ':' + m.content + '<|eot_id|>' }}{% endfor %}"
NO_END = "{% for m in messages %}{{ m.role + ':' + m.content + '\\n' }}{% endfor %}"


def make_source(folder: Path, template: str | None, ends: list[str] | None) -> Path:
    """A folder of a base model, whose texts end with <|endoftext|>."""
    folder.mkdir()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(SPECIAL), eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    number = tokenizer.convert_tokens_to_ids
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": number("<|endoftext|>")}))
    if ends is not None:
        settings = {"eos_token_id": [number(end) for end in ends], "top_k": 20}
        (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("template", "run_template", "ends", "expected"),
    [
        (CHATML, None, ["<|endoftext|>"], ["<|endoftext|>", "<|im_end|>"]),  # supervised training of a base model
        (None, HEADERS, None, ["<|endoftext|>", "<|eot_id|>"]),  # a template of the run, and no generation_config.json
        (CHATML, HEADERS, ["<|im_end|>"], ["<|endoftext|>", "<|im_end|>", "<|eot_id|>"]),
        (CHATML, None, ["<|im_end|>"], None),
        (CHATML, NO_END, ["<|endoftext|>"], None),
        (None, None, ["<|endoftext|>"], None),
    ],
)
def test_an_export_ends_where_its_turns_end(
    tmp_path: Path, template: str | None, run_template: str | None, ends: list[str] | None, expected: list[str] | None
) -> None:
    """As transformers' generation reads the folder."""
    source, output = make_source(tmp_path / "source", template, ends), tmp_path / "export"
    found = find_end_tokens(source, run_template)
    write_hf_folder([("a", torch.zeros(2))], source, output, chat_template=run_template, end_tokens=found)
    if expected is None:
        assert found is None
        original, exported = (folder / "generation_config.json" for folder in (source, output))
        assert original.read_text() == exported.read_text()
        return
    settings, tokenizer = GenerationConfig.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert tokenizer.convert_ids_to_tokens(settings.eos_token_id) == expected
    assert settings.top_k == (20 if ends else GenerationConfig().top_k)


def test_a_folder_without_a_tokenizer_keeps_its_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert find_end_tokens(tmp_path, CHATML) is None
