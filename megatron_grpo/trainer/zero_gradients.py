"""Runs on ranks of a model: finds the tensors whose whole gradient is exactly zero."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_grpo.models.hf_weights import bind_entries, list_local_experts, view_slices

if TYPE_CHECKING:
    from megatron_grpo.trainer.rank import ModelRank

HEAD_ROWS = 8  # rows that are read first: only a tensor in which these are zero is read whole


Views = dict[str, list[Tensor]]  # of gradient buffers, by name of the tensor


class ZeroGradients:
    """Finds tensors without gradient on a rank, by their names in Hugging Face format.

    A rank has a part of a tensor, of its own tokens: the gradient is zero if it is on all ranks that have a part.
    Views of the buffers are made once, and a step reads HEAD_ROWS rows of each tensor, so that it costs little.
    """

    def __init__(self, rank: ModelRank) -> None:
        self._rank = rank
        self._addresses: list[tuple[Any, int]] = []  # parameters, and addresses of their buffers when views were made
        self._views: Views = {}
        self._heads: Views = {}

    def list_names(self) -> list[str]:
        """List the trained tensors of which this rank has a part."""
        self._update_views()
        return list(self._views)

    @torch.no_grad()
    def find(self) -> tuple[str, ...]:
        """Find tensors whose gradient is zero on this rank."""
        self._update_views()
        return tuple(_find_zeros({name: self._views[name] for name in _find_zeros(self._heads)}))

    def _update_views(self) -> None:
        # Buffers are made anew when they come back from host memory.
        if self._addresses and all(parameter.main_grad.data_ptr() == at for parameter, at in self._addresses):
            return
        views: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._addresses = []
        for parameter, names, parts in self._iterate_parameters():
            self._addresses.append((parameter, parameter.main_grad.data_ptr()))
            for name, part in zip(names, parts, strict=True):
                views[name] += part
        self._views = dict(views)
        self._heads = {name: [part[:HEAD_ROWS] for part in parts] for name, parts in views.items()}

    def _iterate_parameters(self) -> Iterator[tuple[Any, list[str], list[list[Tensor]]]]:
        """Yield trained parameters, with names of their tensors and views of each."""
        chunks, shape = self._rank.chunks, self._rank.shape
        experts, process_groups = list_local_experts(chunks[0], shape), chunks[0].pg_collection
        for bound in bind_entries(chunks, shape):
            entry, expert = bound.entry, experts[bound.expert] if bound.entry.per_expert else 0
            splitters = process_groups.expt_tp if entry.per_expert else process_groups.tp
            slices = entry.list_slices(shape, bound.layer, splitters.rank(), splitters.size(), expert)
            names = [part.name for part in slices]
            if hasattr(bound.parameter, "main_grad"):  # parameters that are not trained have no buffer
                yield bound.parameter, names, view_slices(entry, bound.parameter.main_grad, slices, shape)
            for matrix in ("lora_a", "lora_b") if bound.adapted is not None else ():
                parameter = getattr(bound.adapted, matrix)
                yield parameter, [f"{', '.join(dict.fromkeys(names))} ({matrix})"], [[parameter.main_grad]]


def _find_zeros(views: Views) -> list[str]:
    """Find the names whose views are all zero; the device is asked once."""
    flags = [view.any() for parts in views.values() for view in parts]
    values = iter(torch.stack(flags).tolist() if flags else ())
    return [name for name, parts in views.items() if not sum(next(values) for _ in parts)]
