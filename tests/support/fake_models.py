"""Models in training for tests of the steps around them: one process, the real losses, nothing learnt."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.batch.packing import Cost
from megatron_grpo.batch.replay_files import StateFigure, TensorFigure, choose_watched_tokens
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields, require_field
from megatron_grpo.losses.loss import GlobalCounts, LossFunction
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.trainer.microbatch_schedule import derive_cost
from megatron_grpo.trainer.model_ranks import MegatronTeacher, TrainResult
from tests.support.fake_rollouts import add_entry, by_sequence
from tests.support.token_fields import in_rectangles


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one optimizer step was given."""

    sequences: list[int]
    """Numbers in the step."""
    tokens: TokenBatch
    """The entries that the loss reads, and those that follow from the batch."""

    def entry(self, name: str) -> list[list[float]]:
        values: Tensor = require_field(getattr(self.tokens.fields, name))
        return [piece.tolist() for piece in values.split(self.tokens.lengths)]


class FakeModel(ABC):
    """A model of one process. Every call is written to a log that it may share with others."""

    device_name = "cpu"
    name: str
    """In the log."""

    def __init__(self, shape: ModelShape, log: list[str] | None = None) -> None:
        self._shape = shape
        self.log = [] if log is None else log
        self.lessons: list[Lesson] = []

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @property
    def cost(self) -> Cost:
        return derive_cost(self.shape)

    def train(self, batch: StepBatch, sequences: NDArray[np.int64], loss_fn: LossFunction) -> TrainResult:
        self.log.append(f"{self.name} learns")
        tokens = fetched(batch, sequences, loss_fn.field_names)
        self.lessons.append(Lesson(sequences.tolist(), tokens))
        rectangles = in_rectangles(tokens)
        _, metrics = loss_fn(self.output(rectangles), rectangles, GlobalCounts.count(batch, sequences))
        figures = {name: float(value) for name, value in metrics.items()}
        return TrainResult(
            loss=figures.pop("loss"), grad_norm=1.0, learning_rate=0.1, metrics=figures, gpu_memory_gib=3.5
        )

    @abstractmethod
    def output(self, tokens: TokenFields) -> Tensor:
        """The model's number for every token of rectangles, [sequences, length]."""

    def _add(self, batch: StepBatch, name: str, numbers: list[list[float]]) -> NDArray[np.bool_]:
        """Put a number for every token into the shards; whether those of sampled tokens are finite, by sequence."""
        add_entry(batch, name, np.array([value for row in numbers for value in row]))
        flags = [
            all(math.isfinite(value) for value, drawn in zip(row, sampled, strict=True) if drawn)
            for row, sampled in zip(numbers, by_sequence(batch, "sampled"), strict=True)
        ]
        return np.array(flags, dtype=np.bool_)


class FakePolicy(FakeModel):
    """A policy whose log-probabilities are those of sampling, but for the sequences in `logprobs`."""

    name = "policy"

    def __init__(self, shape: ModelShape, log: list[str] | None = None, *, reference_offset: float = 0.0) -> None:
        """
        Args:
            shape: the policy's sizes.
            log: where calls are written to.
            reference_offset: how much more likely the reference policy finds every sampled token, in nats.
        """
        super().__init__(shape, log)
        self.reference_offset = reference_offset
        self.logprobs: dict[int, float] = {}
        """Of all tokens of a sequence, by its number, where they are not those of sampling."""
        self.moved: list[float] = []
        """Of each move of the reference policy, the policy's share."""

    def output(self, tokens: TokenFields) -> Tensor:
        tokens.divergence = require_field(tokens.loss_mask) / 8 if tokens.teacher_outputs is not None else None
        drawn = tokens.generation_logprobs
        return require_field(tokens.loss_mask) * -0.5 if drawn is None else drawn

    def add_field(self, batch: StepBatch, field: str) -> NDArray[np.bool_]:
        line, offset = {
            "prev_logprobs": ("policy says", 0.0),
            "prev_entropy": ("policy says entropies", 0.0),
            "score_sizes": ("policy says sizes", 0.0),
            "unfiltered_logprobs": ("policy says without filter", -0.25),
            "reference_logprobs": ("reference says", self.reference_offset),
            "values": ("policy scores", 0.5),
            "teacher_outputs": ("policy teaches", 0.0),
        }[field]
        self.log.append(line)
        if field == "teacher_outputs":
            return FakeTeacher().add_outputs(batch, np.arange(len(batch)))
        return self._add(batch, field, self._numbers(batch, offset))

    def begin_record(self) -> None:
        self.log.append("record begins")

    def end_record(self) -> list[TensorFigure]:
        self.log.append("record ends")
        return [TensorFigure("weight", 0, "model.norm.weight", 2.0, [1.0, -0.5])]

    def watch_states(self, batch: StepBatch) -> None:
        self.watched = choose_watched_tokens(int(batch.lengths.sum()))

    def end_states(self) -> list[StateFigure]:
        return [StateFigure("norm", int(token), [0.5]) for token in self.watched]

    def sync_reference(self, alpha: float) -> None:
        self.moved.append(alpha)

    def _numbers(self, batch: StepBatch, offset: float) -> list[list[float]]:
        return [
            [self.logprobs.get(number, value + offset) for value in values.tolist()]
            for number, values in enumerate(by_sequence(batch, "generation_logprobs"))
        ]


class FakeValue(FakeModel):
    """A value model that expects one number everywhere."""

    name = "value"

    def __init__(self, shape: ModelShape, log: list[str] | None = None, *, number: float = 0.25) -> None:
        super().__init__(shape, log)
        self.number = number

    def output(self, tokens: TokenFields) -> Tensor:
        return torch.full_like(require_field(tokens.loss_mask), self.number)

    def add_field(self, batch: StepBatch, field: str) -> NDArray[np.bool_]:
        self.log.append("value says")
        return self._add(batch, field, [[self.number] * int(length) for length in batch.lengths])


class FakeTeacher(MegatronTeacher):
    """A teacher with one number for every token."""

    def __init__(self) -> None:
        """Start no ranks."""

    def add_outputs(self, batch: StepBatch, sequences: NDArray[np.int64]) -> NDArray[np.bool_]:
        add_entry(batch, "teacher_outputs", np.ones((int(batch.lengths.sum()), 1), dtype=np.int16))
        return np.ones(len(batch), dtype=np.bool_)


def fetched(batch: StepBatch, sequences: NDArray[np.int64], names: tuple[str, ...]) -> TokenBatch:
    """Some sequences as a single replica that owns all shards gets them, with those of the entries that are there."""
    stored = {name: [entry.get() for entry in batch.fields[name]] for name in names if name in batch.fields}
    of_replica = TokenBatch.from_replica(batch.select_partitions(slice(None)), stored)
    order = np.concatenate(batch.partitions).tolist()
    return of_replica.select([order.index(number) for number in sequences])
