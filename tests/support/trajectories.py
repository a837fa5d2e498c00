"""Trajectories for tests of what is made of them."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from megatron_grpo.batch.rollout_files import TrainedValues
from megatron_grpo.batch.trajectory import Outcome, Span, Trajectory


def make_trajectory(tokens: int = 2, *, prompt_tokens: int = 1, **changes: Any) -> Trajectory:
    """A response of `tokens` tokens, all sampled at log-probability -1/3; `changes` are fields, arrays may be lists."""
    length = prompt_tokens + tokens
    values: dict[str, Any] = {
        "prompt_idx": 0,
        "group": 0,
        "sample": 0,
        "token_ids": list(range(length)),
        "spans": [Span(prompt_tokens, length, 0)],
        "logprobs": [-1 / 3] * tokens,
        "response": "",
        "stop_reason": "stop",
    }
    values |= changes
    values["token_ids"] = np.asarray(values["token_ids"], dtype=np.int32)
    values["logprobs"] = np.asarray(values["logprobs"], dtype=np.float32)
    return Trajectory(**values)


def failed_trajectory(*, prompt_tokens: int = 1, failure: str = "it raised twice", **changes: Any) -> Trajectory:
    """What is left of a rollout that failed: its prompt, no sampled token, nobody's opinion."""
    unknown = {"spans": [], "reward": None, "correct": None, "failure": failure}
    return make_trajectory(0, prompt_tokens=prompt_tokens, **(unknown | changes))


def make_outcome(tokens: int = 2, **changes: Any) -> Outcome:
    """What the driver keeps of `make_trajectory`."""
    return make_trajectory(tokens, **changes).outcome


def with_learnt(*trajectories: Trajectory, prev: bool = False) -> list[tuple[Trajectory, TrainedValues]]:
    """Trajectories as they are written: token t of one with n has advantage n + t / 8, and `prev` says it is known."""
    rows = []
    for one in trajectories:
        advantages = (len(one.logprobs) + np.arange(len(one.logprobs)) / 8).astype(np.float32)
        known = {"prev_logprobs": one.logprobs - np.float32(0.25)} if prev else {}
        rows.append((one, {"advantages": advantages} | known))
    return rows


def plain(trajectory: Trajectory) -> dict[str, Any]:
    """Every field as numbers and lists, and the types of the arrays: trajectories of equal ones are the same."""
    values = {one.name: getattr(trajectory, one.name) for one in fields(trajectory)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    return values | {name: (str(array.dtype), array.tolist()) for name, array in arrays.items()}


def plain_groups(groups: Sequence[Sequence[Trajectory]]) -> list[list[dict[str, Any]]]:
    """`plain` of every trajectory of some groups."""
    return [[plain(one) for one in group] for group in groups]
