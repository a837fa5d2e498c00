"""Trajectories for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from megatron_grpo.data.trajectory import Span, Trajectory


def make_trajectory(tokens: int = 2, *, prompt_tokens: int = 1, **changes: Any) -> Trajectory:
    """A response of `tokens` tokens, each sampled at log-probability -1/3; `changes` are fields."""
    length = prompt_tokens + tokens
    fields: dict[str, Any] = {
        "prompt_idx": 0,
        "group": 0,
        "sample": 0,
        "token_ids": list(range(length)),
        "spans": [Span(prompt_tokens, length, 0)],
        "logprobs": [-1 / 3] * tokens,
        "response": "",
        "stop_reason": "stop",
    }
    return Trajectory(**(fields | changes))
