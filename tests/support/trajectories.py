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
    """Trajectories as they are written: token t of n has advantage n + t / 8; `prev`: it is known."""
    rows = []
    for trajectory in trajectories:
        advantages = (len(trajectory.logprobs) + np.arange(len(trajectory.logprobs)) / 8).astype(np.float32)
        learnt = {"prev_logprobs": trajectory.logprobs - np.float32(0.25)} if prev else {}
        rows.append((trajectory, {"advantages": advantages} | learnt))
    return rows


def plain(trajectory: Trajectory) -> dict[str, Any]:
    """Every field as numbers and lists, and the types of the arrays: trajectories of equal ones are the same."""
    values = {field.name: getattr(trajectory, field.name) for field in fields(trajectory)}
    arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    return values | {name: (str(array.dtype), array.tolist()) for name, array in arrays.items()}


def plain_groups(groups: Sequence[Sequence[Trajectory]]) -> list[list[dict[str, Any]]]:
    """`plain` of every trajectory of some groups."""
    return [[plain(trajectory) for trajectory in group] for group in groups]
