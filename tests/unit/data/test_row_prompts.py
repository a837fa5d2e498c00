"""Prompts of rows: columns beside whole conversations, open turns, tools and marks of turns."""

import re
from typing import Any

import pytest
from trl.data_utils import maybe_extract_prompt

from megatron_grpo.config.data_schema import PREFERENCE, SUPERVISED, DataConfig, DatasetConfig
from megatron_grpo.data.processors import TaskDataSpec, math_data_processor
from megatron_grpo.data.rows import RowCheck
from megatron_grpo.data.supervised_rows import (
    preference_data_processor,
    score_data_processor,
    supervised_data_processor,
)
from tests.support.released.table import ADD, BY_NAME

NAMES = ["qwen2_5", "llama_3_1", "gemma_3"]
SPEC = TaskDataSpec(task_name="math", answer_key=None)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


BEGIN = [user("What is 1+1?"), assistant("2"), user("And 1+2?")]
PAIRS: dict[str, dict[str, Any]] = {
    "a text beside whole conversations": {
        "prompt": "What is 1+1?",
        "chosen": [user("What is 1+1?"), assistant("2")],
        "rejected": [user("What is 1+1?"), assistant("3")],
    },
    "conversations of several turns": {
        "prompt": "What is 1+1?",
        "chosen": [*BEGIN, assistant("3")],
        "rejected": [*BEGIN, assistant("4")],
    },
    "conversations with a system message": {
        "prompt": "What is 1+1?",
        "chosen": [{"role": "system", "content": "Add."}, user("What is 1+1?"), assistant("2")],
        "rejected": [{"role": "system", "content": "Add."}, user("What is 1+1?"), assistant("3")],
    },
    "no prompt": {"chosen": [*BEGIN, assistant("3")], "rejected": [*BEGIN, assistant("4")]},
    "messages and replies": {"prompt": BEGIN, "chosen": [assistant("3")], "rejected": [assistant("4")]},
}


def log_text(log: Any, tokenizer: Any) -> str:
    return str(tokenizer.decode([token for part in log for token in part["token_ids"]]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", PAIRS)
def test_the_prompt_of_a_pair_is_that_of_trl(kind: str, name: str) -> None:
    tokenizer, row = BY_NAME[name].oracle, PAIRS[kind]
    assert check(row, PREFERENCE) is row
    expected = maybe_extract_prompt(dict(row))
    datum = preference_data_processor(row, SPEC, tokenizer, 400, 0)
    scored = score_data_processor(row, SPEC, tokenizer, 400, 0)
    for side, column in (("message_log", "chosen"), ("rejected", "rejected")):
        messages = expected["prompt"] + expected[column]
        full_text = tokenizer.apply_chat_template(messages, tokenize=False)
        prompt = tokenizer.apply_chat_template(expected["prompt"], tokenize=False, add_generation_prompt=True)
        parts: Any = datum[side]  # type: ignore[literal-required]
        assert log_text(parts, tokenizer) == full_text.rstrip()
        assert log_text([part for part in parts if part["role"] != "assistant"], tokenizer) == prompt
        assert log_text(scored[side], tokenizer) == full_text  # type: ignore[literal-required]


def check(row: dict[str, Any], kind: str, **settings: Any) -> Any:
    return RowCheck(DatasetConfig(path="rows.jsonl"), DataConfig(**settings), {"math": kind}).convert(row)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (PAIRS["no prompt"] | {"prompt": "Who?"}, "common beginning lacks the text of the prompt"),
        (PAIRS["no prompt"] | {"prompt": [user("Who?")]}, "do not begin with the messages of the prompt"),
        ({"prompt": "a", "chosen": [user("a"), assistant("b", weight=0.5)], "rejected": [user("a")]}, "weight=0.5"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": ["add"]}, "column 'tools' is not valid JSON"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": [3]}, "column 'tools' is not a list of tool defin"),
    ],
)
def test_pairs_whose_parts_do_not_belong_together_are_refused(row: dict[str, Any], problem: str) -> None:
    refusal = check(row, PREFERENCE)
    assert isinstance(refusal, str)
    assert problem in refusal


@pytest.mark.parametrize("prompt", ["What is 1+1?", BEGIN[:1]], ids=["text", "messages"])
def test_a_column_beside_whole_conversations_is_not_repeated(prompt: Any) -> None:
    """Rows of ultrachat: all turns of the assistant are learnt, once."""
    tokenizer, row = BY_NAME["qwen2_5"].oracle, {"prompt": prompt, "messages": [*BEGIN, assistant("3")]}
    spec = TaskDataSpec(task_name="math", answer_key=None, response_key="messages")
    assert check(row, SUPERVISED, response_key="messages") is row
    log = supervised_data_processor(row, spec, tokenizer, 400, 0)["message_log"]
    conversation_spec = TaskDataSpec(task_name="math", answer_key=None, prompt_key="messages")
    assert log == supervised_data_processor(row, conversation_spec, tokenizer, 400, 0)["message_log"]
    assert [part["content"] for part in log if part["role"] == "assistant"] == ["2<|im_end|>", "3<|im_end|>"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("reply", [" 2.", [assistant(" 2.")]], ids=["text", "message"])
@pytest.mark.parametrize("opened", ["The sum is", "<b>", "First:\n\n1."])
def test_an_open_turn_goes_on_in_every_kind_of_row(name: str, reply: Any, opened: str) -> None:
    """What follows a prompt that ends in the assistant's turn is learnt behind the text that it is sampled after."""
    tokenizer, prompt = BY_NAME[name].oracle, [user("What is 1+1?"), assistant(opened, weight=0)]
    row = {"prompt": prompt, "completion": reply, "chosen": reply, "rejected": [assistant(" 3.")]}
    sampled = math_data_processor(row, SPEC, tokenizer, 400, 0)["message_log"]
    spec = TaskDataSpec(task_name="math", answer_key=None, response_key="completion")
    logs = [
        supervised_data_processor(row, spec, tokenizer, 400, 0)["message_log"],
        preference_data_processor(row, SPEC, tokenizer, 400, 0)["message_log"],
    ]
    full_text = tokenizer.apply_chat_template([prompt[0], assistant(f"{opened} 2.")], tokenize=False)
    for before, learnt in logs:
        assert log_text([before], tokenizer) == log_text(sampled, tokenizer)
        assert learnt["content"].startswith(" 2.")
        assert log_text([before, learnt], tokenizer) == full_text.rstrip()
    assert log_text(score_data_processor(row, SPEC, tokenizer, 400, 0)["message_log"], tokenizer) == full_text


def test_calls_are_not_continued() -> None:
    called = assistant("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {}}}])
    row = {"prompt": [user("a"), called], "completion": "b"}
    spec = TaskDataSpec(task_name="math", answer_key=None, response_key="completion")
    tokenizer = BY_NAME["qwen2_5"].oracle
    with pytest.raises(ValueError, match=r"row 7: message 2, .* has calls of tools, so no text can follow it"):
        supervised_data_processor(row, spec, tokenizer, 400, 7)
    with pytest.raises(ValueError, match=r"row 7: .* has calls of tools, so no text can follow it"):
        math_data_processor(row, SPEC, tokenizer, 400, 7)


@pytest.mark.parametrize("names", [("weight",), ("loss_mask",), ("loss",), ("train",), ("trainable",), ("training",)])
@pytest.mark.parametrize("values", [(0, 1), (False, True), (0.0, 1.0)])
def test_a_marked_turn_is_context(names: tuple[str], values: tuple[Any, Any]) -> None:
    (name,), (off, on) = names, values
    turns = [user("a"), assistant("BAD", **{name: off}), user("b"), assistant("GOOD", **{name: on})]
    tokenizer, spec = BY_NAME["qwen2_5"].oracle, TaskDataSpec(task_name="math", answer_key=None)
    log = supervised_data_processor({"prompt": turns}, spec, tokenizer, 400, 0)["message_log"]
    assert [part["content"] for part in log if part["role"] == "assistant"] == ["GOOD<|im_end|>"]
    assert "BAD<|im_end|>" in log[0]["content"]


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        (assistant("b", weight=2), "message 2 has weight=2; give 0 or 1"),
        (assistant("b", train="no"), "message 2 has train='no'; give 0 or 1"),
        (assistant("b", weight=0, train=True), "learnt by one of weight and train and left out by another"),
        (assistant("b", train_detail=[{"begin_offset": 0}]), "a turn can only be learnt as a whole"),
        ({**user("b"), "train": True}, "message 2, of the role user, has train=True, and only the assistant's"),
    ],
)
def test_marks_that_cannot_be_followed_are_refused(turn: dict[str, Any], problem: str) -> None:
    refusal = check({"prompt": [user("a"), turn, assistant("c")]}, SUPERVISED)
    assert isinstance(refusal, str)
    assert re.search(re.escape(problem), refusal), refusal


def test_a_row_without_a_turn_to_learn_is_refused() -> None:
    row = {"prompt": [user("a"), assistant("b", weight=0)]}
    with pytest.raises(ValueError, match="row 3: the conversation marks all messages of the assistant as not to learn"):
        supervised_data_processor(row, SPEC, BY_NAME["qwen2_5"].oracle, 400, 3)


def test_thoughts_that_contradict_each_other_are_refused() -> None:
    row = {"prompt": [user("a"), assistant("b", reasoning="x", reasoning_content="y")]}
    with pytest.raises(ValueError, match="row 3: message 2 has different thoughts in reasoning_content and reasoning"):
        supervised_data_processor(row, SPEC, BY_NAME["qwen3"].oracle, 400, 3)


def test_a_rows_own_tools_replace_those_of_the_task() -> None:
    tokenizer, subtract = BY_NAME["qwen3"].oracle, {"type": "function", "function": {"name": "subtract"}}
    spec = TaskDataSpec(task_name="math", answer_key=None, tools=[subtract])
    for value, expected in (([ADD], [ADD]), (None, [subtract]), ("", [subtract]), ([], None)):
        log = math_data_processor({"prompt": "a", "tools": value}, spec, tokenizer, 900, 0)["message_log"]
        text = tokenizer.apply_chat_template([user("a")], tools=expected, tokenize=False, add_generation_prompt=True)
        assert log_text(log, tokenizer) == text
