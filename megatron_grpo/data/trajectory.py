"""One rollout: its tokens and text in a rollout worker, and its outcome on the driver."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

StopReason = Literal["stop", "length"]


class Span(NamedTuple):
    """Tokens [start, end) of a trajectory that were sampled by one weight version."""

    start: int
    end: int
    version: int


@dataclass(slots=True, kw_only=True)
class Sample:
    """The identity and the score of one rollout, which its outcome and its trajectory both hold."""

    prompt_idx: int
    """Row of the dataset that the prompt comes from."""
    group: int
    """Which prompt of its generation batch, or of the step: the samples of one prompt share it."""
    sample: int
    """Which sample of the prompt's group."""
    reward: float | None = 0.0
    """Reward of the rollout; None: no reward function gave one, or it failed, and baselines and loss leave it out."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Reward per reward function, when there are several."""
    reward_errors: int = 0
    """Reward functions that failed over the response and were taken to have no opinion."""
    reward_metrics: dict[str, float] = field(default_factory=dict)
    """Figures that its environment reported beside the reward."""
    correct: bool | None = False
    """Whether the response is correct; None: the environment cannot say."""
    loss_multiplier: float = 1.0
    """0 leaves the rollout out of the loss."""
    failure: str | None = None
    """Why the rollout failed twice; None: it did not."""
    task_name: str = ""
    """Which environment answered and scored the rollout."""


@dataclass(slots=True, kw_only=True)
class Outcome(Sample):
    """One rollout without its tokens and text, as the driver holds it for scoring, dynamic sampling and metrics."""

    tokens: int
    """Length of the whole sequence, prompt and responses."""
    response_tokens: int
    """Sampled tokens of the sequence."""
    truncated: bool
    """Whether the response was cut off by a length limit."""
    version: int
    """Newest weight version that sampled a token of the rollout; -1 when none was sampled."""
    finite_logprobs: bool = True
    """Whether every sampling log-probability is finite."""
    oldest_version: int = -1
    """Oldest weight version that sampled a token of the rollout; -1 when none was sampled."""
    versions: int = 0
    """Weight versions that sampled tokens of the rollout."""


@dataclass(slots=True, kw_only=True)
class Trajectory(Sample):
    """One sampled response to one prompt. Token ids are the truth; the text is only for people and environments.

    Lives in a rollout worker and in the object store; workers lay it out in shards and write it to files.
    """

    token_ids: NDArray[np.int32]
    """[tokens], prompt and response."""
    spans: list[Span]
    """Sampled tokens: what the loss is taken over. In order, disjoint."""
    logprobs: NDArray[np.float32]
    """[sampled tokens], log-probability under which each sampled token was drawn, in the order of the spans."""
    response: str
    stop_reason: StopReason
    notes: dict[str, str] = field(default_factory=dict)
    """What its environment wants people to read of it."""
    routed: NDArray[Any] | None = None
    """[first tokens, numbers of a token], in the form of `RoutedForm`: the experts that the engine chose while it
    sampled; None: not recorded. The last token, which the engine never runs, has none."""

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off by a length limit."""
        return self.stop_reason == "length"

    @property
    def response_tokens(self) -> int:
        """Sampled tokens."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """[sampled tokens], int32: the tokens of the spans, one after the other."""
        return np.concatenate([self.token_ids[span.start : span.end] for span in self.spans] or [self.token_ids[:0]])

    @property
    def outcome(self) -> Outcome:
        """What the driver keeps of this trajectory."""
        versions = [span.version for span in self.spans]
        return Outcome(
            **{one.name: getattr(self, one.name) for one in fields(Sample)},
            tokens=len(self.token_ids),
            response_tokens=self.response_tokens,
            truncated=self.truncated,
            version=max(versions, default=-1),
            oldest_version=min(versions, default=-1),
            versions=len(set(versions)),
            finite_logprobs=bool(np.isfinite(self.logprobs).all()),
        )

    def to_row(self) -> dict[str, Any]:
        """Every field but the routed experts, which people do not read, in types that JSON has."""
        row = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "routed"}
        row["token_ids"], row["logprobs"] = self.token_ids.tolist(), self.logprobs.tolist()
        row["spans"] = [[span.start, span.end, span.version] for span in self.spans]
        return row

    def to_saved_row(self) -> dict[str, Any]:
        """Every field, in types that JSON has: those of `to_row`, and the routed experts as their bytes in base 85."""
        if self.routed is None:
            return self.to_row()
        data = base64.b85encode(self.routed.tobytes()).decode()
        return self.to_row() | {"routed": [self.routed.dtype.str, self.routed.shape[1], data]}

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> Trajectory:
        """The inverse of `to_saved_row`, and of `to_row`; rows of earlier versions lack what was added since."""
        routed = None
        if row.get("routed") is not None:
            dtype, columns, data = row["routed"]
            routed = np.frombuffer(base64.b85decode(data), dtype=dtype).reshape(-1, columns)
        arrays = {
            "routed": routed,
            "token_ids": np.asarray(row["token_ids"], dtype=np.int32),
            "logprobs": np.asarray(row["logprobs"], dtype=np.float32),
        }
        return Trajectory(**{**row, **arrays, "spans": [Span(*span) for span in row["spans"]]})


@dataclass(slots=True)
class SampledGroup:
    """The samples of one prompt as the driver holds them: their outcomes, and a reference to everything else."""

    outcomes: list[Outcome]
    bundle: Any
    """Ray's reference to some groups, each a list[Trajectory]."""
    place: int
    """Place of this group among those of `bundle`."""


def renumbered(groups: Sequence[SampledGroup]) -> list[SampledGroup]:
    """The groups, numbered by their place, where they do not come from one generation batch."""
    return [
        replace(group, outcomes=[replace(outcome, group=number) for outcome in group.outcomes])
        for number, group in enumerate(groups)
    ]
