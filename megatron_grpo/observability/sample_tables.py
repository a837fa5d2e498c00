"""Tables of samples for people who watch a run: the text of the prompt beside the response and its score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from megatron_grpo.data.interfaces import DatumSpec

SHOWN_CHARACTERS = 2000
"""Of a prompt's end and of a response's beginning: trackers keep every table for ever."""


def sample_row(prompt: str, trajectory: Mapping[str, Any]) -> dict[str, Any]:
    """One sample as a line of a table.

    Args:
        prompt: its text.
        trajectory: fields of the response by name (`read_rollouts`); advantages if there are some.

    Returns:
        prompt, response, reward, correct, advantage (mean over the sampled tokens; None: not known), tokens,
        stop_reason.
    """
    advantages = trajectory.get("advantages")
    return {
        "prompt": prompt[-SHOWN_CHARACTERS:],
        "response": trajectory["response"][:SHOWN_CHARACTERS],
        "reward": trajectory["reward"],
        "correct": trajectory["correct"],
        "advantage": float(np.mean(advantages)) if advantages is not None and len(advantages) else None,
        "tokens": len(trajectory["logprobs"]),
        "stop_reason": trajectory["stop_reason"],
    }


def prompt_text(datum: DatumSpec) -> str:
    """The prompt as its row gives it; of a conversation every turn, with its role."""
    prompt = datum["prompt"]
    return prompt if isinstance(prompt, str) else "\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)


def one_a_group(rows: Iterator[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first sample of each of the first `count` prompts of a step, of its rollouts in their order."""
    found: list[dict[str, Any]] = []
    seen: set[int] = set()
    for row in rows:
        if len(found) == count:
            break
        if row["group"] not in seen:
            seen.add(row["group"])
            found.append(row)
    return found
