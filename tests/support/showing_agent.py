"""An agent that asks about the picture of its prompt, then about a second one, and compares once more."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from megatron_grpo.data.scores import ModelAccess
from megatron_grpo.prepare.pictures import QUESTION, draw_squares


def look_twice(prompt: list[Any], access: ModelAccess, answer: str, **columns: Any) -> str:
    """Ask about both pictures; returns the answer to the first."""
    from openai import OpenAI

    client = OpenAI(base_url=access.base_url, api_key=access.token, max_retries=0, timeout=60)
    first = client.chat.completions.create(model=access.model, messages=prompt)
    url = draw_squares(3, random.Random(answer))
    content: list[Any] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    messages = [*prompt, first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": content}]
    client.chat.completions.create(model=access.model, messages=messages)
    client.chat.completions.create(model=access.model, messages=messages[-1:])
    return first.choices[0].message.content or ""


def counts_right(agent_result: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 for the right number of the first picture."""
    return [float(result == expected) for result, expected in zip(agent_result, answer, strict=True)]
