"""Figures of a recorded step on a rank: weights, gradients and changes by tensor, and some tokens' hidden states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_grpo.batch.replay_files import TensorFigure
from megatron_grpo.batch.token_batch import TokenBatch
from megatron_grpo.models.hf_weights import iter_adapter_tensors, iter_hf_tensors
from megatron_grpo.trainer.hidden_states import Piece, capture_states

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import Microbatches, ModelRank

SKETCH = 64  # number of sums in a sketch
# Elements of a tensor that are sketched at a time, so that temporaries stay small beside the tensor.
_PIECE = 2**20 * SKETCH


def sketch(tensor: Tensor, name: str) -> list[float]:
    """Sketch a tensor: SKETCH sums of its elements with random signs, in float64.

    The sketch of a difference is the difference of the sketches, and the squares of a sketch's numbers add up to the
    square of the tensor's norm in expectation, with a standard deviation of about sqrt(2 / SKETCH), 18%, of it (count
    sketch: Charikar, Chen and Farach-Colton 2002; the estimate: Alon, Matias and Szegedy 1996). Two runs in different
    layouts can be compared tensor by tensor although neither keeps its tensors. Every element is in exactly one sum;
    elements of one block of SKETCH are in different ones. Signs and sums follow from the name and the element's number.
    """
    seed = _derive_seed(name)
    flat, sums = tensor.detach().reshape(-1), torch.zeros(SKETCH, dtype=torch.float64, device=tensor.device)
    columns = torch.arange(SKETCH, device=flat.device)
    for begin in range(0, len(flat), _PIECE):
        values = flat[begin : begin + _PIECE].double()
        values = torch.nn.functional.pad(values, (0, -len(values) % SKETCH))
        numbers = torch.arange(begin, begin + len(values), device=flat.device)
        blocks = (values * (1 - 2 * (_mix(numbers + seed) & 1))).view(-1, SKETCH)
        shifted = columns + _mix(numbers[::SKETCH] - seed)[:, None] % SKETCH
        sums += blocks.gather(1, shifted % SKETCH).sum(dim=0)
    return sums.tolist()


def sketch_rows(rows: Tensor, name: str, column: int = 0) -> Tensor:
    """Sketch each row: [rows, width] to [rows, SKETCH], float64.

    Rows that are parts of wider rows, from `column` on, have sketches that add up to those of the wider rows.
    """
    seed, numbers = _derive_seed(name), torch.arange(column, column + rows.shape[1], device=rows.device)
    signs = 1 - 2 * (_mix(numbers + seed) & 1)
    shifted = (numbers - _mix(numbers - numbers % SKETCH - seed)) % SKETCH
    sums = torch.zeros(len(rows), SKETCH, dtype=torch.float64, device=rows.device)
    return sums.index_add_(1, shifted, rows.double() * signs)


def _derive_seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")


def _mix(numbers: Tensor) -> Tensor:
    # Mixes bits like SplitMix64 (Steele et al. 2014), int64 to int64.
    mixed = numbers * -7046029254386353131  # 0x9E3779B97F4A7C15; products wrap around
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


StateSketches = tuple[str, NDArray[np.int64], NDArray[np.float64]]
"""A rank's sketches at a point: the point, token indices in the step, [tokens], and sketches, [tokens, SKETCH]."""


class StepRecorder:
    """Sketches a rank's tensors between `begin` and `end`; methods are collective.

    The first rank of each pipeline stage has the figures of the stage's tensors, the others have none. The change of
    the weights is gathered through the gradient buffers: they have a float32 number for each trained weight, and are
    cut into the parts that the ranks update. Where the optimizer keeps its weights in a form of its own
    (policy.optimizer.precision_aware, cpu_offload) there are no figures of updates.
    """

    def __init__(self, rank: ModelRank) -> None:
        self._rank = rank
        self._figures: list[TensorFigure] | None = None
        self._before: list[Tensor] = []
        self._steps = 0
        # [watched], int64, twice: indices of the watched tokens in this replica's batch, and in the step.
        self._watched: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._states: list[tuple[str, Tensor, Tensor]] = []

    def watch(self, in_replica: NDArray[np.int64], in_step: NDArray[np.int64]) -> None:
        """Sketch the hidden states of these tokens in the next pass for log-probabilities."""
        self._watched = in_replica, in_step

    @contextmanager
    def sketching(self, batch: TokenBatch, microbatches: Microbatches) -> Iterator[None]:
        """Sketch the watched tokens, if any, in the body's forward pass."""
        if self._watched is None:
            yield
            return
        (in_replica, in_step), self._watched = self._watched, None
        tokens = np.full(sum(batch.lengths), -1)
        tokens[in_replica] = in_step
        self._states = []

        def keep(piece: Piece) -> None:
            # Sketched on the device: fetching a piece would make the pass wait at every module.
            self._states.append((piece.point, piece.tokens, sketch_rows(piece.values, piece.point, piece.column)))

        with capture_states(self._rank, batch, microbatches, tokens, keep):
            yield

    def end_states(self) -> list[StateSketches]:
        """Return this rank's sketches, which add up over ranks."""
        parts, self._states = self._states, []
        return [(point, tokens.numpy(), sketches.cpu().numpy()) for point, tokens, sketches in parts]

    def begin(self) -> None:
        """Record the weights, and from now on each step's gradient (`add_gradient`)."""
        rank, settings = self._rank, self._rank.config.optimizer
        weights = iter_hf_tensors(rank.gather_chunks(), rank.shape)
        self._figures, self._steps = list(_iter_figures("weight", 0, weights)), 0
        has_updates = not (settings.precision_aware or settings.cpu_offload)
        updated = rank.optimizer.iter_updated_weights() if has_updates else iter(())
        self._before = [part.to("cpu", torch.float32, copy=True) for _, _, part in updated]

    def add_gradient(self) -> None:
        """Record the gradient before the optimizer step, after `begin`."""
        if self._figures is not None:
            self._figures += self._read_buffers("gradient", self._steps)
            self._steps += 1

    @torch.no_grad()
    def end(self) -> list[TensorFigure]:
        """Record the weights' change since `begin`; returns all figures."""
        figures, self._figures = self._figures, None
        assert figures is not None, "begin() comes first"
        if self._before and self._steps:
            updated = self._rank.optimizer.iter_updated_weights()
            for (parameter, start, part), before in zip(updated, self._before, strict=True):
                change = part.float() - before.to(part.device)
                parameter.main_grad.view(-1)[start : start + len(change)] = change
            figures += self._read_buffers("update", 0)
        self._before = []
        return figures

    def _read_buffers(self, kind: Literal["gradient", "update"], step: int) -> list[TensorFigure]:
        rank = self._rank
        rank.optimizer.complete_gradients()
        chunks = rank.chunks
        # Parameters that are not trained have no gradient buffer.
        buffers = iter_hf_tensors(chunks, rank.shape, lambda bound: getattr(bound.parameter, "main_grad", None))
        figures = list(_iter_figures(kind, step, buffers))
        if rank.config.lora.rank:
            figures += _iter_figures(kind, step, iter_adapter_tensors(chunks, rank.shape, attrgetter("main_grad")))
        return figures


def _iter_figures(
    kind: Literal["weight", "gradient", "update"], step: int, tensors: Iterator[tuple[str, Tensor | None]]
) -> Iterator[TensorFigure]:
    for name, tensor in tensors:
        if tensor is not None:
            yield TensorFigure(kind, step, name, float(tensor.double().norm()), sketch(tensor, name))
