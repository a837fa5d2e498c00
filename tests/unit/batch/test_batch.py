"""The typed batch against loops over tokens, and tokens that end a response."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.batch.generation_requests import make_sampling_settings
from megatron_grpo.batch.special_tokens import (
    StopConditions,
    decode_response,
    find_stop_conditions,
    find_unstopped_turn_end,
)
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import STORED_DTYPES, TokenBatch, TokenFields, find_token_indices, require_field
from megatron_grpo.config.generation_schema import GenerationConfig
from megatron_grpo.data.chat_template import render_chat
from megatron_grpo.data.tokenizer import load_tokenizer
from tests.support.foreign_tokenizers import CHATML, byte_level, deepseek_r1_distill, save_folder, sentencepiece_like
from tests.support.token_fields import as_lists, pieces

ENTRIES = [field.name for field in fields(TokenFields)]
LENGTHS = st.lists(st.integers(0, 7), max_size=8)
"""Tokens of some sequences; a sequence may have none, and there may be no sequences."""
ODD = [3, 1, 7, 0, 5]


@st.composite
def lengths_and_indices(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Lengths, and indices into them in any order, some more than once."""
    lengths = draw(LENGTHS)
    indices = st.lists(st.sampled_from(range(len(lengths))), max_size=10) if lengths else st.just([])
    return lengths, draw(indices)


def flat_entries(lengths: Sequence[int]) -> dict[str, Tensor]:
    """An entry of every name; numbers differ from token to token, and floating ones from entry to entry."""
    total = sum(lengths)
    numbers = torch.arange(1, total + 1)
    entries = {name: numbers / (3.0 + i) for i, name in enumerate(ENTRIES)}
    routed = torch.stack([numbers % 7, -(numbers % 5), numbers % 3], dim=1).to(torch.int8)
    return entries | {"token_ids": numbers.int(), "sampled": numbers % 3 == 0, "routed_experts": routed}


def make_batch(lengths: Sequence[int]) -> TokenBatch:
    """Sequences of these lengths with every entry."""
    return TokenBatch(list(lengths), TokenFields(**flat_entries(lengths)))


def test_entries_are_named_once() -> None:
    """What is stored is an entry; what is not there is None; no other name can be set."""
    assert set(ENTRIES) >= STORED_DTYPES.keys()
    tokens = TokenFields(advantages=torch.ones(2), token_ids=torch.ones(2, dtype=torch.int32))
    assert list(tokens.as_dict()) == ["token_ids", "advantages"]
    assert all(getattr(tokens, name) is None for name in set(ENTRIES) - tokens.as_dict().keys())
    with pytest.raises(TypeError, match="advantage'"):
        TokenFields(advantage=torch.ones(2))
    with pytest.raises(AttributeError, match="advantage"):
        tokens.advantage = torch.ones(2)


def test_an_entry_that_is_not_there_is_noticed() -> None:
    values = torch.ones(2)
    assert require_field(values) is values
    with pytest.raises(AssertionError, match="not computed or not fetched"):
        require_field(None)


@pytest.mark.parametrize("shape", [(3,), (5,), (4, 1), ()])
def test_entries_of_another_shape_are_a_defect(shape: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError, match="advantages has shape"):
        TokenBatch([3, 1], TokenFields(token_ids=torch.ones(4, dtype=torch.int32), advantages=torch.ones(shape)))


@pytest.mark.parametrize("tokens", [3, 5])
def test_only_routed_experts_are_many_numbers_a_token(tokens: int) -> None:
    routed = torch.zeros(4, 6, dtype=torch.int8)
    assert TokenBatch([3, 1], TokenFields(routed_experts=routed)).fields.routed_experts is routed
    with pytest.raises(AssertionError, match="routed_experts has shape"):
        TokenBatch([3, 1], TokenFields(routed_experts=torch.zeros(tokens, 6, dtype=torch.int8)))


@given(lengths_and_indices())
def test_selecting_takes_the_sequences_in_the_order_asked_for(case: tuple[list[int], list[int]]) -> None:
    lengths, indices = case
    batch = make_batch(lengths)
    for selection in (indices, tuple(indices), np.array(indices, dtype=np.int64)):
        selected = batch.select(selection)
        assert selected.lengths == [lengths[i] for i in indices]
        assert len(selected) == len(indices)
        assert list(selected.fields.as_dict()) == ENTRIES
        for name, values in batch.fields.as_dict().items():
            chosen = getattr(selected.fields, name)
            by_sequence = pieces(values, lengths)
            assert chosen.dtype == values.dtype
            assert pieces(chosen, selected.lengths) == [by_sequence[i] for i in indices], name


def test_selecting_copies() -> None:
    """What is done to a part in place does not reach the batch."""
    batch = make_batch(ODD)
    selected = batch.select(range(len(ODD)))
    before = as_lists(batch.fields)
    for values in selected.fields.as_dict().values():
        values.zero_()
    assert as_lists(batch.fields) == before


@given(lengths_and_indices(), st.sampled_from([np.int32, np.int64, np.uint16]))
def test_token_indices_are_those_of_the_sequences_laid_end_to_end(
    case: tuple[list[int], list[int]], dtype: type[np.integer]
) -> None:
    lengths, indices = case
    starts = [0, *itertools.accumulate(lengths)]
    expected = [starts[i] + t for i in indices for t in range(lengths[i])]
    token_indices = find_token_indices(np.array(lengths, dtype=dtype), np.array(indices, dtype=np.int64))
    assert token_indices.dtype == np.int64
    assert token_indices.tolist() == expected


def test_places_of_many_tokens_do_not_overflow() -> None:
    """More tokens than a 16-bit length, or its sum over a step, can hold."""
    lengths = np.full(70_000, 60_000, dtype=np.uint16)
    assert find_token_indices(lengths, np.array([69_999]))[[0, -1]].tolist() == [69_999 * 60_000, 70_000 * 60_000 - 1]


def make_step(sequences: int) -> StepBatch:
    """Responses of 0 to 4 tokens, every third outside the loss, in two partitions."""
    numbers = np.arange(sequences, dtype=np.int64)
    return StepBatch(
        lengths=numbers + 10,
        response_tokens=numbers % 5,
        in_loss=numbers % 3 != 0,
        partitions=[numbers[0::2], numbers[1::2]],
    )


@given(sequences=st.integers(0, 20), samples=st.integers(1, 25))
def test_minibatches_are_neighbours_and_together_the_step(sequences: int, samples: int) -> None:
    minibatches = list(make_step(sequences).split_minibatches(samples))
    assert [number for numbers in minibatches for number in numbers.tolist()] == list(range(sequences))
    assert all(len(numbers) == samples for numbers in minibatches[:-1])
    assert all(0 < len(numbers) <= samples for numbers in minibatches[-1:])
    assert all(numbers.dtype == np.int64 for numbers in minibatches)


@pytest.mark.parametrize("sequences", [0, 1, 2, 17])
def test_tokens_in_the_loss_are_counted_by_sequence(sequences: int) -> None:
    batch = make_step(sequences)
    assert len(batch) == sequences
    assert batch.loss_tokens == sum(number % 5 for number in range(sequences) if number % 3)
    assert type(batch.loss_tokens) is int


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
    ("special", "text"),
    [
        (("<tool_call>", "</tool_call>"), SAID),
        (("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]calculator[ARGS]{"expression": "12+34"}'),
        (("<|python_tag|>",), '<|python_tag|>{"name": "calculator"}'),
        (("<think>", "</think>"), "<think>\n12+34 is 46\n</think>\n\n46"),
        (("<|channel|>", "<|message|>"), "<|channel|>analysis<|message|>46"),
    ],
)
def test_special_tokens_with_a_meaning_are_in_the_text(special: Any, text: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(qwen_base(tmp_path, special))
    ids = tokenizer(f"{text}<|im_end|>")["input_ids"]
    assert decode_response(tokenizer, ids, "stop") == text
    assert decode_response(tokenizer, ids[:-1], "length") == text
    assert tokenizer.decode(ids, skip_special_tokens=True) != text  # the marks would be gone


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
