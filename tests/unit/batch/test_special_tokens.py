"""What ends a response, and the text of a response, for tokenizers in the layouts of released models."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.batch.generation_requests import make_sampling_settings
from megatron_grpo.batch.special_tokens import (
    StopConditions,
    decode_response,
    find_stop_conditions,
    find_unstopped_turn_end,
)
from megatron_grpo.config.generation_schema import GenerationConfig
from megatron_grpo.data.chat_template import render_chat
from megatron_grpo.data.tokenizer import load_tokenizer
from tests.support.foreign_tokenizers import CHATML, byte_level, deepseek_r1_distill, save_folder, sentencepiece_like

HARMONY = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + "
    "m.content }}{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% else %}"
    "{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
)
GLM = "{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ ' [INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)


def qwen_base(folder: Path, special: tuple[str, ...] = (), added: tuple[str, ...] = (), **generation: Any) -> Path:
    """A base model of Qwen: its chat template ends turns with a token that is not its end of text."""
    core = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special], added)
    save_folder(folder, core, "qwen2", "Qwen2Tokenizer", eos_token="<|endoftext|>", chat_template=CHATML)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def stops_of(folder: Path, **options: Any) -> tuple[Any, StopConditions]:
    tokenizer = load_tokenizer(folder)
    return tokenizer, find_stop_conditions(GenerationConfig(**options), tokenizer, folder)


SAID = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("special", "said"),
    [
        (("<tool_call>", "</tool_call>"), SAID),
        (("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]calculator[ARGS]{"expression": "12+34"}'),
        (("<|python_tag|>",), '<|python_tag|>{"name": "calculator"}'),
        (("<think>", "</think>"), "<think>\n12+34 is 46\n</think>\n\n46"),
        (("<|channel|>", "<|message|>"), "<|channel|>analysis<|message|>46"),
    ],
)
def test_special_tokens_with_a_meaning_are_in_the_text(special: Any, said: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(qwen_base(tmp_path, special))
    ids = tokenizer(f"{said}<|im_end|>")["input_ids"]
    assert decode_response(tokenizer, ids, "stop") == said
    assert decode_response(tokenizer, ids[:-1], "length") == said
    assert tokenizer.decode(ids, skip_special_tokens=True) != said  # the marks would be gone


def test_only_the_token_that_ended_the_response_is_cut(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(qwen_base(tmp_path, added=("</answer>",)))
    end, close = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "</answer>"))
    (letter,) = tokenizer("a")["input_ids"]
    assert decode_response(tokenizer, [letter, end, end], "stop") == "a<|im_end|>"
    assert decode_response(tokenizer, [letter, end], "length") == "a<|im_end|>"
    assert decode_response(tokenizer, [letter, close], "stop") == "a</answer>"  # an ordinary token that ended it
    assert decode_response(tokenizer, [letter], "stop") == "a"
    assert decode_response(tokenizer, [end], "stop") == ""
    assert decode_response(tokenizer, [], "stop") == ""


def test_a_blank_that_ends_a_response_is_no_special_token(tmp_path: Path) -> None:
    core = sentencepiece_like()
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = load_tokenizer(save_folder(tmp_path, core, "mistral", "LlamaTokenizerFast", **named))
    ids = tokenizer("ab ", add_special_tokens=False)["input_ids"]
    assert decode_response(tokenizer, ids, "stop") == core.decode(ids) == "ab "
    assert decode_response(tokenizer, [*ids, tokenizer.eos_token_id], "stop") == "ab "


@pytest.mark.parametrize("text", ["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
def test_a_stop_string_that_is_a_special_token_becomes_that_token(text: str, tmp_path: Path) -> None:
    tokenizer, stops = stops_of(qwen_base(tmp_path), stop_strings=[text, "\n\nQ:"])
    expected = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(text)}
    assert stops == StopConditions(tuple(sorted(expected)), ("\n\nQ:",))
    settings = make_sampling_settings(GenerationConfig(stop_strings=[text]), stops)
    assert (set(settings.stop_token_ids), settings.stop_strings) == (expected, ("\n\nQ:",))


def test_a_stop_string_that_is_an_ordinary_added_token_stays_a_text_too(tmp_path: Path) -> None:
    tokenizer, stops = stops_of(qwen_base(tmp_path, added=("</answer>",)), stop_strings=["</answer>", "a<|im_end|>"])
    assert set(stops.token_ids) == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("</answer>")}
    assert stops.strings == ("</answer>", "a<|im_end|>")


def test_end_tokens_of_the_generation_config_end_responses_everywhere(tmp_path: Path) -> None:
    folder = qwen_base(tmp_path, eos_token_id=[7, 9])
    tokenizer, stops = stops_of(folder, stop_token_ids=[3])
    assert stops.token_ids == (3, 7, 9, tokenizer.eos_token_id)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert stops_of(folder)[1].token_ids == (5, tokenizer.eos_token_id)
    # Without the file, transformers and vLLM take config.json's.
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 11}))
    assert stops_of(folder)[1].token_ids == (11, tokenizer.eos_token_id)


def end_of(folder: Path, template: str | None = None, **options: Any) -> tuple[str, int] | None:
    tokenizer, stops = stops_of(folder, **options)
    return find_unstopped_turn_end(tokenizer, stops, partial(render_chat, tokenizer, chat_template=template))


def test_a_base_model_whose_turns_end_by_no_stop_token(tmp_path: Path) -> None:
    end = load_tokenizer(qwen_base(tmp_path)).convert_tokens_to_ids("<|im_end|>")
    assert end_of(tmp_path) == ("<|im_end|>", end)
    assert end_of(tmp_path, stop_token_ids=[end]) is None
    assert end_of(tmp_path, stop_strings=["<|im_end|>"]) is None
    assert end_of(tmp_path, stop_strings=["<|im_end|>\n"]) is None
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 1]}))
    assert end_of(tmp_path) is None


def test_ends_of_turns_of_released_templates(tmp_path: Path) -> None:
    assert end_of(deepseek_r1_distill(tmp_path / "deepseek")) is None
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": MISTRAL}
    assert end_of(save_folder(tmp_path / "m", sentencepiece_like(), "mistral", "LlamaTokenizerFast", **named)) is None
    core = byte_level(["<|return|>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>"])
    named = {"eos_token": "<|return|>", "chat_template": HARMONY}
    harmony = save_folder(tmp_path / "gpt-oss", core, "gpt_oss", "PreTrainedTokenizerFast", **named)
    assert end_of(harmony) is None
    core = byte_level(["<|endoftext|>", "<|user|>", "<|assistant|>"])
    named = {"eos_token": "<|endoftext|>", "chat_template": GLM}
    glm = save_folder(tmp_path / "glm", core, "glm4_moe", "PreTrainedTokenizerFast", **named)
    user = core.token_to_id("<|user|>")
    assert end_of(glm) == ("<|user|>", user)
    (glm / "generation_config.json").write_text(json.dumps({"eos_token_id": [user]}))
    assert end_of(glm) is None


def test_templates_without_an_added_token_at_the_end_of_a_turn_give_no_remark(tmp_path: Path) -> None:
    folder = qwen_base(tmp_path)
    assert end_of(folder, "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}") is None
    assert end_of(folder, "{{ raise_exception('only two') }}") is None
    assert end_of(folder, "{{ messages[0].content }}") is None
