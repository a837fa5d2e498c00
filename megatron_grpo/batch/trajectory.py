"""One rollout: its tokens and text in a rollout worker, and its outcome on the driver."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

StopReason = Literal["stop", "length"]
SUSPECT_PREFIX = "suspect/"
"""Beginning of the names of an environment's figures that are signs of an undeserved reward."""
REWARD_REMOVED = "suspects_left_out"
"""Figure of a response: 1 if it lost its reward because it is suspect, else 0."""


def list_suspicions(figures: Mapping[str, float]) -> list[str]:
    """Names of the figures suspect/NAME of a response that are above 0: signs that its reward is undeserved."""
    return [
        name.removeprefix(SUSPECT_PREFIX)
        for name, figure in figures.items()
        if name.startswith(SUSPECT_PREFIX) and figure > 0
    ]


class Span(NamedTuple):
    """Tokens [start, end) of a trajectory that were sampled by one weight version."""

    start: int
    end: int
    version: int


@dataclass(slots=True, kw_only=True)
class Sample:
    """The identity and the score of one rollout: the fields that its outcome and its trajectory share."""

    prompt_idx: int
    """Row of the dataset that the prompt comes from."""
    group: int
    """Number of the prompt in its generation batch, or in the step; the samples of one prompt share it."""
    sample: int
    """Number of the sample in its group."""
    reward: float | None = 0.0
    """Reward of the rollout; None: no reward function gave one, or it failed, and baselines and loss leave it out."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """Reward per reward function, when there are several."""
    reward_errors: int = 0
    """Number of reward functions that failed for the response, and count as if they had given no reward."""
    reward_metrics: dict[str, float] = field(default_factory=dict)
    """Further figures of the rollout: env/NAME and suspect/NAME from the environment, and the run's own."""
    correct: bool | None = False
    """Whether the response is correct; None: the environment cannot say."""
    loss_multiplier: float = 1.0
    """Weight of the rollout in the loss, from 0 (it is left out) to 1."""
    failure: str | None = None
    """Reason why the rollout failed, on its second attempt too; None: it did not fail."""
    task_name: str = ""
    """Name of the environment that answered and scored the rollout."""

    @property
    def is_unscored(self) -> bool:
        """Whether the rollout has no reward although it neither failed nor lost its reward as suspect."""
        return self.reward is None and self.failure is None and not self.reward_metrics.get(REWARD_REMOVED)


@dataclass(slots=True, kw_only=True)
class Outcome(Sample):
    """One rollout without its tokens and text, as the driver holds it for scoring, dynamic sampling and metrics."""

    tokens: int
    """Length of the whole sequence, prompt and responses."""
    response_tokens: int
    """Number of sampled tokens of the sequence."""
    truncated: bool
    """Whether the response was cut off by a length limit."""
    version: int
    """Newest weight version that sampled a token of the rollout; -1 when none was sampled."""
    finite_logprobs: bool = True
    """Whether every sampling log-probability is finite."""
    oldest_version: int = -1
    """Oldest weight version that sampled a token of the rollout; -1 when none was sampled."""
    versions: int = 0
    """Number of weight versions that sampled tokens of the rollout."""


@dataclass(slots=True, kw_only=True)
class Trajectory(Sample):
    """One sampled response to one prompt. Token ids are the truth; the text is only for people and environments.

    Lives in a rollout worker and in the object store; workers lay it out in shards and write it to files.
    """

    token_ids: NDArray[np.int32]
    """[tokens], int32: prompt and response."""
    spans: list[Span]
    """Spans of the sampled tokens, over which the loss is taken; in order, disjoint."""
    logprobs: NDArray[np.float32]
    """[sampled tokens], float32: log-probability under which each token was drawn, in the order of the spans."""
    response: str
    stop_reason: StopReason
    notes: dict[str, str] = field(default_factory=dict)
    """Notes of the environment on the rollout, for readers of the file of rollouts."""
    routed: NDArray[Any] | None = None
    """[first tokens, `RoutedForm.columns`]: the experts that the engine chose while it sampled; None: not recorded. The
    last token, which the engine never runs, has none."""

    @property
    def truncated(self) -> bool:
        """Whether the response was cut off by a length limit."""
        return self.stop_reason == "length"

    @property
    def response_tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """[sampled tokens], int32: the tokens of the spans, one after the other."""
        return np.concatenate([self.token_ids[span.start : span.end] for span in self.spans] or [self.token_ids[:0]])

    @property
    def outcome(self) -> Outcome:
        """The outcome of this trajectory, for the driver."""
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
        """Every field except the routed experts, in types that JSON has, for people."""
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
        """The inverse of `to_saved_row` and `to_row`."""
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
    objects_ref: Any
    """Ray's reference to a list of groups, each a list[Trajectory]."""
    index_in_ref: int
    """Index of this group in the list of `objects_ref`."""


def renumber_groups(groups: Sequence[SampledGroup]) -> list[SampledGroup]:
    """The groups numbered by their place in the list, for groups of several generation batches."""
    return [
        replace(group, outcomes=[replace(outcome, group=number) for outcome in group.outcomes])
        for number, group in enumerate(groups)
    ]
