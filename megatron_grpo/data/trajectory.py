"""What one rollout produced: the tokens, which of them were sampled by which weights, and how it was scored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a trajectory that were sampled by one weight version."""

    start: int
    end: int
    version: int


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """One sampled response to one prompt. Token ids are the truth; the text is only for people and environments."""

    prompt_idx: int
    """Row of the dataset."""
    group: int
    """Which prompt of the step's batch: the samples of one prompt share it."""
    sample: int
    """Which sample of its group."""
    token_ids: list[int]
    """Prompt and response."""
    spans: list[Span]
    """Sampled tokens: what the loss is taken over. In order, disjoint."""
    logprobs: list[float]
    """Log-probability under which each sampled token was drawn, in the order of the spans."""
    response: str
    stop_reason: StopReason
    reward: float | None = 0.0
    """None: no reward function had an opinion. The response is then left out of baselines and loss."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Reward per reward function, when there are several."""
    correct: bool | None = False
    """None: the environment cannot say."""
    loss_multiplier: float = 1.0

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off by a length limit."""
        return self.stop_reason == "length"

    @property
    def response_tokens(self) -> int:
        """Sampled tokens."""
        return sum(span.end - span.start for span in self.spans)

    def to_row(self) -> dict[str, Any]:
        """Every field, in types that JSON has."""
        row = {one.name: getattr(self, one.name) for one in fields(self)}
        row["spans"] = [[span.start, span.end, span.version] for span in self.spans]
        return row

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> Trajectory:
        """The inverse of `to_row`."""
        return Trajectory(**{**row, "spans": [Span(*span) for span in row["spans"]]})
