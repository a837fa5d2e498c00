"""One rollout: its outcome on the driver, and its tokens and text in a rollout worker."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.images import StoredImage

StopReason = Literal["stop", "length"]
SUSPECT_PREFIX = "suspect/"  # of metrics that hint at reward hacking, e.g. suspect/equal_outputs
REWARD_REMOVED = "suspects_left_out"  # metric of a response: 1 if it lost its reward because it is suspect, else 0

SCORING_RETRIES = "scoring_retries"  # metric of a group's first response: calls for the group that were repeated


def list_suspicions(metrics: Mapping[str, float]) -> list[str]:
    """List the suspect/NAME metrics above 0, by NAME."""
    suspicious = [name for name, value in metrics.items() if name.startswith(SUSPECT_PREFIX) and value > 0]
    return [name.removeprefix(SUSPECT_PREFIX) for name in suspicious]


class Span(NamedTuple):
    """Tokens [start, end) that one weight version sampled.

    Example: tokens 12 to 19, sampled with the weights of step 3
        Span(start=12, end=20, version=3)
    """

    start: int
    end: int
    version: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One rollout without its tokens and text, for the driver.

    Example: the third response to the prompt in row 17, 8 tokens after a prompt of 12
        Outcome(
            prompt_idx=17, group=0, sample=2, reward=1.0, correct=True, task_name="math",
            tokens=20, response_tokens=8, truncated=False, version=3, oldest_version=3, versions=1,
        )
    """

    prompt_idx: int  # row of the dataset
    group: int  # number of the prompt in its generation batch, or in the step; the samples of one prompt share it
    sample: int  # number of the sample in its group
    reward: float | None = 0.0  # None: no function gave one, or the rollout failed; baselines and the loss leave it out
    reward_parts: dict[str, float] = field(default_factory=dict)  # reward per reward function, when there are several
    turn_rewards: list[float] = field(default_factory=list)
    """Reward of each turn, whose sum is `reward`; empty if the environment gave none by turn."""
    turn_tokens: list[int] = field(default_factory=list)  # sampled tokens of each turn; empty as `turn_rewards`
    reward_errors: int = 0  # reward functions that failed for the response; they count as if they had given no reward
    reward_metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics of the rollout: env/NAME and suspect/NAME from the environment, and the run's own."""
    correct: bool | None = False  # None: the environment cannot say
    loss_multiplier: float = 1.0  # weight of the rollout in the loss, from 0 (it is left out) to 1
    fault: str | None = None  # reason why the response's own text failed; it stays in the loss, as a worst response
    failure: str | None = None  # reason why the rollout failed, on its second attempt too; None: it did not fail
    task_name: str = ""  # the environment that answered and scored the rollout
    tokens: int  # of the whole sequence, prompt and responses; of all segments, if there are several
    response_tokens: int  # sampled tokens of the rollout
    truncated: bool  # a length limit cut the response off
    version: int  # newest weight version that sampled a token; -1 when none was sampled
    finite_logprobs: bool = True  # every sampling log-probability is finite
    oldest_version: int = -1  # oldest weight version that sampled a token; -1 when none was sampled
    versions: int = 0  # number of weight versions that sampled tokens
    images: list[StoredImage] = field(default_factory=list)  # in the order of their placeholders
    segment_images: list[int] = field(default_factory=list)
    """Number of images of each segment; empty: the rollout is one sequence, or has no images."""
    segments: list[list[int]] = field(default_factory=list)
    """Tokens and sampled tokens of each segment: [[tokens, sampled], ...]. Empty: the rollout is one sequence."""

    @property
    def sequences(self) -> list[list[int]]:
        """Tokens and sampled tokens of each sequence to train on."""
        return self.segments or [[self.tokens, self.response_tokens]]

    @property
    def sequence_images(self) -> list[list[StoredImage]]:
        """Images of each sequence to train on."""
        if not self.segment_images:
            return [self.images] * len(self.sequences)
        return [self.images[begin:end] for begin, end in pairwise(accumulate(self.segment_images, initial=0))]

    @property
    def is_unscored(self) -> bool:
        """True if no reward function scored a sound rollout."""
        return self.reward is None and self.failure is None and not self.reward_metrics.get(REWARD_REMOVED)


@dataclass(slots=True, kw_only=True)
class Trajectory(Outcome):
    """An outcome with its tokens and text, outside the driver.

    Training uses the token ids; the text is only for people and environments. Counts are taken from the arrays when a
    trajectory is made: `replace` it rather than assign other arrays.

    Example: two tokens sampled after a prompt of three
        Trajectory(
            prompt_idx=17, group=0, sample=2, reward=1.0,
            token_ids=np.array([5, 6, 7, 40, 2]), spans=[Span(3, 5, version=3)], logprobs=np.array([-0.7, -0.1]),
            response="42", stop_reason="stop",
        )
    """

    tokens: int = field(init=False)
    response_tokens: int = field(init=False)
    truncated: bool = field(init=False)
    version: int = field(init=False)
    finite_logprobs: bool = field(init=False)
    oldest_version: int = field(init=False)
    versions: int = field(init=False)
    segments: list[list[int]] = field(init=False)

    token_ids: NDArray[np.int32]  # prompt and response: [tokens], int32
    spans: list[Span]  # of the sampled tokens, over which the loss is taken; in order, disjoint
    logprobs: NDArray[np.float32]
    """Log-probability under which each token was drawn, span after span: [sampled tokens], float32."""
    response: str
    stop_reason: StopReason
    notes: dict[str, str] = field(default_factory=dict)  # the environment's, for readers of the file of rollouts
    prompt: str = ""  # the row's prompt as text; a long one without its middle
    answer: str | None = None  # the row's reference answer; None: it has none
    columns: dict[str, str] = field(default_factory=dict)  # the row's other columns, as text
    routed: NDArray[np.uint8] | None = None
    """Experts that the engine chose while it sampled: [tokens but the last, `RoutedForm.token_bytes`], uint8. None: not
    recorded. The engine never runs the last token."""
    engine: int | None = None  # number of the engine that sampled it; None: no token was sampled, or not recorded
    segment_tokens: list[int] = field(default_factory=list)
    """Tokens of each segment of a rollout with several, which lie end to end in `token_ids`. A segment is a sequence of
    its own, whose first tokens may repeat tokens of earlier segments as context. Empty: one sequence."""

    def __post_init__(self) -> None:
        # Counted once here, because metrics and the batch of a step read the counts without the arrays.
        versions = [span.version for span in self.spans]
        self.tokens = len(self.token_ids)
        self.response_tokens = sum(span.end - span.start for span in self.spans)
        self.truncated = self.stop_reason == "length"
        self.version, self.oldest_version = max(versions, default=-1), min(versions, default=-1)
        self.versions = len(set(versions))
        self.finite_logprobs = bool(np.isfinite(self.logprobs).all())
        self.segments = [[end - begin, self._count_sampled(begin, end)] for begin, end in pairwise(self._bounds)]

    @property
    def _bounds(self) -> list[int]:
        return [0, *accumulate(self.segment_tokens)] if self.segment_tokens else []

    def _count_sampled(self, begin: int, end: int) -> int:
        return sum(span.end - span.start for span in self.spans if begin <= span.start < end)

    def split_segments(self) -> list[Trajectory]:
        """Split into one trajectory per segment; of one sequence, itself."""
        if not self.segment_tokens:
            return [self]
        parts, first = [], 0
        for (begin, end), images in zip(pairwise(self._bounds), self.sequence_images, strict=True):
            spans = [span for span in self.spans if begin <= span.start < end]
            count = self._count_sampled(begin, end)
            part = replace(
                self,
                token_ids=self.token_ids[begin:end],
                spans=[Span(span.start - begin, span.end - begin, span.version) for span in spans],
                logprobs=self.logprobs[first : first + count],
                routed=None if self.routed is None else self.routed[begin : end - 1],
                segment_tokens=[],
                images=images,
                segment_images=[],
            )
            parts.append(part)
            first += count
        return parts

    @property
    def response_ids(self) -> NDArray[np.int32]:
        """The sampled tokens: [sampled tokens], int32."""
        return np.concatenate([self.token_ids[span.start : span.end] for span in self.spans] or [self.token_ids[:0]])

    @property
    def outcome(self) -> Outcome:
        return Outcome(**{field.name: getattr(self, field.name) for field in fields(Outcome)})

    def to_row(self) -> dict[str, Any]:
        """Convert to types of JSON, without the counts and the routed experts."""
        apart = ("routed",) if self.images else ("routed", "images")
        row = {name: getattr(self, name) for name in ROW_FIELDS if name not in apart}
        row["token_ids"], row["logprobs"] = self.token_ids.tolist(), self.logprobs.tolist()
        row["spans"] = [[span.start, span.end, span.version] for span in self.spans]
        return row

    def to_saved_row(self) -> dict[str, Any]:
        """Convert as `to_row`, with routed experts in base 85."""
        if self.routed is None:
            return self.to_row()
        # Base 85 is a quarter longer than the bytes; a list of numbers would be several times as long.
        encoded = base64.b85encode(self.routed.tobytes()).decode()
        return self.to_row() | {"routed": [self.routed.shape[1], encoded]}

    @staticmethod
    def from_row(row: Mapping[str, Any]) -> Trajectory:
        """Invert `to_saved_row` or `to_row`; further entries are left out."""
        routed = None
        if row.get("routed") is not None:
            token_bytes, encoded = row["routed"]
            routed = np.frombuffer(base64.b85decode(encoded), dtype=np.uint8).reshape(-1, token_bytes)
        arrays = {
            "routed": routed,
            "token_ids": np.asarray(row["token_ids"], dtype=np.int32),
            "logprobs": np.asarray(row["logprobs"], dtype=np.float32),
        }
        values = {name: row[name] for name in ROW_FIELDS if name in row}
        images = [image.values() if isinstance(image, Mapping) else image for image in row.get("images") or ()]
        values["images"] = [StoredImage(*image) for image in images]
        return Trajectory(**{**values, **arrays, "spans": [Span(*span) for span in row["spans"]]})


ROW_FIELDS = tuple(field.name for field in fields(Trajectory) if field.init)  # of a trajectory's row: not the counts


@dataclass(slots=True)
class SampledGroup:
    """The samples of one prompt, as the driver has them.

    Example: the second group of an object that holds the groups of several prompts
        group = SampledGroup([Outcome(...), Outcome(...)], objects_ref=ref, index_in_ref=1)
        ray.get(group.objects_ref)[group.index_in_ref]  # list[Trajectory] of length 2
    """

    outcomes: list[Outcome]
    objects_ref: Any  # Ray's reference to a list of groups, each a list[Trajectory]
    index_in_ref: int


def renumber_groups(groups: Sequence[SampledGroup]) -> list[SampledGroup]:
    """Number groups of several generation batches from 0."""
    return [
        replace(group, outcomes=[replace(outcome, group=number) for outcome in group.outcomes])
        for number, group in enumerate(groups)
    ]
