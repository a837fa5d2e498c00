"""Runs on ranks of a model: finds the tensors whose whole gradient is exactly zero."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_grpo.models.hf_weights import bind_entries, list_local_experts, view_slices

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import ModelRank

HEAD_ROWS = 8  # rows that are read first: only a tensor in which these are zero is read whole


@dataclass(frozen=True, slots=True)
class _BoundGradient:
    """A parameter's gradient buffer, and views of its Hugging Face tensors."""

    parameter: Any
    address: int  # of the buffer when the views were made
    views: dict[str, list[Tensor]]


class ZeroGradients:
    """Finds tensors without gradient on a rank, by their names in Hugging Face format.

    A rank has a part of a tensor, of its own tokens: the gradient is zero if it is on all ranks that have a part.
    Views of the buffers are made once, and a step reads HEAD_ROWS rows of each tensor, so that it costs little.
    """

    def __init__(self, rank: ModelRank) -> None:
        self._rank = rank
        self._bound: list[_BoundGradient] = []

    def list_names(self) -> list[str]:
        """List the trained tensors of which this rank has a part."""
        return list(dict.fromkeys(name for bound in self._collect() for name in bound.views))

    @torch.no_grad()
    def find(self) -> tuple[str, ...]:
        """Find tensors whose gradient is zero here, from an optimizer step to the next."""
        views: defaultdict[str, list[Tensor]] = defaultdict(list)
        for bound in self._collect():
            for name, parts in bound.views.items():
                views[name] += parts
        heads = _find_zeros({name: [part[:HEAD_ROWS] for part in parts] for name, parts in views.items()})
        return tuple(_find_zeros({name: views[name] for name in heads}))

    def _collect(self) -> list[_BoundGradient]:
        # Buffers are made anew when they come back from host memory.
        if not self._bound or any(bound.parameter.main_grad.data_ptr() != bound.address for bound in self._bound):
            self._bound = self._bind()
        return self._bound

    def _bind(self) -> list[_BoundGradient]:
        chunks, shape = self._rank.chunks, self._rank.shape
        experts, process_groups = list_local_experts(chunks[0], shape), chunks[0].pg_collection
        bound = []
        for row in bind_entries(chunks, shape):
            entry, expert = row.entry, experts[row.expert] if row.entry.per_expert else 0
            splitters = process_groups.expt_tp if entry.per_expert else process_groups.tp
            slices = entry.list_slices(shape, row.layer, splitters.rank(), splitters.size(), expert)
            names = [part.name for part in slices]
            views: defaultdict[str, list[Tensor]] = defaultdict(list)
            if hasattr(row.parameter, "main_grad"):  # parameters that are not trained have no buffer
                gradient = row.parameter.main_grad
                for name, parts in zip(names, view_slices(entry, gradient, slices, shape), strict=True):
                    views[name] += parts
                bound.append(_BoundGradient(row.parameter, gradient.data_ptr(), dict(views)))
            for matrix in ("lora_a", "lora_b") if row.adapted is not None else ():
                parameter = attrgetter(matrix)(row.adapted)
                name = f"{', '.join(dict.fromkeys(names))} ({matrix})"
                gradient = parameter.main_grad
                bound.append(_BoundGradient(parameter, gradient.data_ptr(), {name: [gradient]}))
        return bound


def _find_zeros(views: dict[str, list[Tensor]]) -> list[str]:
    """Find the names whose views are all zero; the device is asked once."""
    flags = [view.any() for parts in views.values() for view in parts]
    values = iter(torch.stack(flags).tolist() if flags else ())
    return [name for name, parts in views.items() if not sum(next(values) for _ in parts)]
