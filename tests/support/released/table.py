"""The table of released layouts, and conversations that are rendered with each."""

import json
from functools import partial
from typing import Any

from tests.support.released.layout import Layout
from tests.support.released.templates import RELEASED, read_template
from tests.support.released.vocabulary import build_tokenizer


def read_layout(name: str) -> Layout:
    """Read the layout of tests/data/released/NAME.json."""
    values: dict[str, Any] = json.loads((RELEASED / f"{name}.json").read_text(encoding="utf-8"))
    values.pop("note", None)
    core = partial(build_tokenizer, **values.pop("core"))
    return Layout(name=name, core=core, template=read_template(name, values.pop("template", None)), **values)


LAYOUTS = tuple(read_layout(file.stem) for file in sorted(RELEASED.glob("*.json")))
BY_NAME: dict[str, Layout] = {layout.name: layout for layout in LAYOUTS}

TRICKY = "How many of the 2023 cats\n  are in the hat?\t12 345\n\n它们有几只？ 🐈‍⬛ naïve <b>x</b> &amp; C:\\new"
"""A question with spaces, digits, newlines, CJK, emoji and markup, which show a difference of tokenizers."""
USER = {"role": "user", "content": TRICKY}
SYSTEM = {"role": "system", "content": "Answer with one number."}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "first"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def calls(count: int) -> list[dict[str, Any]]:
    """The first calls of the tool `add`, as a message's tool_calls."""
    sums = ((1, 1), (2, 3))[:count]
    return [
        {"id": f"call0000{number}", "type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
        for number, (a, b) in enumerate(sums, start=1)
    ]


def results(count: int) -> list[dict[str, Any]]:
    """Messages with the results of `calls(count)`."""
    return [
        {"role": "tool", "name": "add", "tool_call_id": f"call0000{number}", "content": text}
        for number, text in enumerate(("2", "5")[:count], start=1)
    ]
