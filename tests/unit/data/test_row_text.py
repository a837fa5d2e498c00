"""A row as text: what of it is kept beside a rollout, and what is cut."""

import json
from typing import Any

import pytest

from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.row_text import COLUMN_CHARACTERS, MAX_COLUMNS, PROMPT_CHARACTERS, describe_row


def describe(prompt: Any = "2+3=", **columns: Any) -> dict[str, Any]:
    datum: Any = {"prompt": prompt, "extra_env_info": columns}
    return describe_row(datum)


def test_a_row_of_mathematics() -> None:
    columns = {"answer": 5, REFERENCE: "5", "level": 3, "tags": ["sum", "é"], "source": "book", "empty": None}
    assert describe(**columns, task_name="math") == {
        "prompt": "2+3=",
        "answer": "5",
        "columns": {"level": "3", "tags": '["sum", "é"]', "source": "book"},
    }


def test_an_answer_of_another_column_leaves_the_column_of_that_name() -> None:
    assert describe(**{"answer": "by steps", REFERENCE: "5"})["columns"] == {"answer": "by steps"}
    assert describe(answer="5")["answer"] is None, "a row without a reference answer"


def test_a_conversation_is_written_turn_by_turn() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "2+3="}, {"type": "text", "text": "?"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x.png"}}]},
        {"role": "assistant", "content": None},
    ]
    lines = describe(turns)["prompt"].split("\n")
    assert lines[:3] == ["system: Be brief.", "user: 2+3=", "?"]
    assert json.loads(lines[3].removeprefix("user: ")) == turns[2]["content"]
    assert lines[4] == "assistant: "


def test_long_texts_lose_their_middle() -> None:
    row = describe("a" + "x" * 10**6 + "z", **{REFERENCE: "b" * 5000, "tests": ["assert f() == 1"] * 10**5})
    assert len(row["prompt"]) <= PROMPT_CHARACTERS
    assert (row["prompt"][0], row["prompt"][-1]) == ("a", "z")
    assert max(len(row["answer"]), len(row["columns"]["tests"])) <= COLUMN_CHARACTERS
    assert row["columns"]["tests"].startswith('["assert f() == 1", "assert')
    assert len(describe(**{f"column {n}": n for n in range(100)})["columns"]) == MAX_COLUMNS


@pytest.mark.parametrize("text", ["\ud83d", "a\udc00b"])
def test_halves_of_surrogate_pairs_can_be_written(text: str) -> None:
    row = describe(text, **{REFERENCE: text, text: text, "list": [text]})
    json.dumps(row, ensure_ascii=False).encode()


def test_values_that_json_cannot_hold() -> None:
    ring: list[Any] = []
    ring.append(ring)
    row = describe(keys={(1, 2): "x"}, ring=ring, deep=json.loads("[" * 900 + "]" * 900), bytes=b"x")
    assert row["columns"]["keys"] == "{(1, 2): 'x'}"
    assert row["columns"]["ring"] == "[[...]]"
    assert row["columns"]["bytes"] == "\"b'x'\""
