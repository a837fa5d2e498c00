"""What the rest of the system knows of a model in training: an optimizer step, a checkpoint; and of the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.model_shape import ModelShape
from megatron_grpo.data.sequences import SequenceBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """What losses and metrics of one optimizer step are divided by, over all ranks and microbatches."""

    tokens: float
    """Tokens in the loss (sum of loss_mask), at least one."""
    sequences: float
    """Sequences with at least one token in the loss."""
    all_sequences: float
    """All sequences, those without a token in the loss included."""
    positive_tokens: float = 0.0
    """Tokens in the loss of correct responses; 0 when the batch does not say which are correct."""

    @staticmethod
    def of(batch: SequenceBatch) -> GlobalCounts:
        """The counts of an optimizer step on this batch, which has a token in the loss."""
        mask = batch.tokens["loss_mask"]
        positive = (mask * batch.tokens["positive"]).sum() if "positive" in batch.tokens else 0.0
        counts = GlobalCounts(
            tokens=float(mask.sum()),
            sequences=float(sum(bool(piece.any()) for piece in mask.split(batch.lengths))),
            all_sequences=float(len(batch)),
            positive_tokens=float(positive),
        )
        assert counts.tokens > 0, "an optimizer step needs a token to learn from"
        return counts


class LossFunction(Protocol):
    """A loss over one microbatch whose sum over all microbatches and ranks is the loss of the step."""

    @property
    def needs_entropy(self) -> bool:
        """Whether tokens["entropy"] is wanted: the exact entropy of each token's distribution, with gradient."""

    def __call__(
        self, curr_logprobs: Tensor, /, tokens: dict[str, Tensor], counts: GlobalCounts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """
        Args:
            curr_logprobs: [sequences, length], float32, with gradient; position t speaks of token t. What a
                value model trains on gets values here.
            tokens: entries of SequenceBatch.tokens, each [sequences, length], float32, zero on padding; "entropy" too
                when needs_entropy.
            counts: of the whole step.

        Returns:
            The microbatch's share of the loss (scalar) and of each metric (scalars). Shares add up to the step's value;
            a metric whose name ends in _max or _min is reduced by that instead (`combine_metrics`).
        """


def combine_metrics(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Metrics from the shares of the parts: sums, or extremes for names ending in _max or _min."""
    total: dict[str, float] = {}
    for share in shares:
        for name, value in share.items():
            if name not in total:
                total[name] = value
            elif is_extreme(name):
                total[name] = (max if name.endswith("_max") else min)(total[name], value)
            else:
                total[name] += value
    return total


def is_extreme(name: str) -> bool:
    """Whether a metric is a maximum or minimum rather than a mean."""
    return name.endswith(("_max", "_min"))


@dataclass(slots=True)
class TrainResult:
    """The outcome of training on a batch."""

    loss: float
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    metrics: dict[str, float] = field(default_factory=dict)
    """From the loss function, reduced over all tokens of the step."""
    optimizer_steps: int = 1
    """More when this is the outcome of several."""


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one rank knows of an optimizer step."""

    grad_norm: float
    """Not finite: the optimizer step was not made."""
    learning_rate: float
    metrics: list[dict[str, float]] | None
    """Loss and metrics of each of its microbatches, on the reporting rank of each data-parallel replica."""


class NonFiniteGradientError(RunError):
    """The gradient of an optimizer step is NaN or infinite; the step was not made.

    Args:
        grad_norm: its norm.
        sequences: indices into the batch of the sequences that it can come from.
    """

    def __init__(self, grad_norm: float, sequences: list[int]) -> None:
        super().__init__(f"the gradient norm is {grad_norm}; the weights were left as they were")
        self.grad_norm = grad_norm
        self.sequences = sequences


class TrainedModel(ABC):
    """A model in training, spread over many processes, that looks like one."""

    @property
    @abstractmethod
    def shape(self) -> ModelShape:
        """Its sizes."""

    @property
    @abstractmethod
    def device_name(self) -> str:
        """What a rank runs on, as its vendor calls it; "cpu" without a GPU."""

    @abstractmethod
    def train(self, batch: SequenceBatch, loss_fn: LossFunction) -> TrainResult:
        """One optimizer step on the whole batch, split over data-parallel ranks and microbatches.

        `batch.tokens` holds loss_mask, with a token in the loss, and what the loss function needs.

        Raises:
            NonFiniteGradientError: the weights are untouched.
        """

    @abstractmethod
    def save_checkpoint(self, folder: str) -> None:
        """Write weights, optimizer, schedule and random state to an existing, empty folder."""

    @abstractmethod
    def load_checkpoint(self, folder: str) -> None:
        """The inverse, also from a checkpoint of another layout."""

    @abstractmethod
    def shutdown(self) -> None:
        """End every process; idempotent."""


class PolicyInterface(TrainedModel):
    """The policy. Its checkpoints hold the reference policy too once that has moved."""

    @abstractmethod
    def get_logprobs(self, batch: SequenceBatch) -> Tensor:
        """Log-probability of every token under the current weights: [sum(lengths)], float32."""

    @abstractmethod
    def get_reference_logprobs(self, batch: SequenceBatch) -> Tensor:
        """The same under the frozen reference policy."""

    @abstractmethod
    def sync_reference(self, alpha: float) -> None:
        """Move the reference policy: reference = alpha * policy + (1 - alpha) * reference (TR-DPO)."""
