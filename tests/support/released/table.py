"""The table of released layouts, and conversations that are rendered with each."""

from __future__ import annotations

from typing import Any

from tests.support.released import chatml, llama, llama4_gemma4, nemotron, newer, others, seed_ministral
from tests.support.released.layout import Layout

LAYOUTS = (
    *(chatml.QWEN2_5, chatml.QWEN2_5_BASE, chatml.QWEN3, chatml.QWEN3_5, chatml.PHI4),
    *(llama.LLAMA3_1, llama.LLAMA3_2, llama.R1_LLAMA, llama.R1_QWEN, llama.LLAMA2_CHAT),
    *(others.GEMMA3, others.MISTRAL_NEMO_12B, others.MISTRAL_SMALL_24B, others.GLM4_5, others.GPT_OSS),
    *newer.NEWER,
    *(llama4_gemma4.LLAMA4, llama4_gemma4.GEMMA4),
    nemotron.NEMOTRON3_NANO,
    *(chatml.QWEN3_NEXT, chatml.QWEN3_NEXT_THINKING),
    *(seed_ministral.SEED_OSS, seed_ministral.MINISTRAL3, seed_ministral.MINISTRAL3_REASONING),
)
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
