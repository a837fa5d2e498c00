"""Hidden states of a forward pass, put together from the pieces of all ranks (`trainer.hidden_states`)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_grpo.trainer.hidden_states import EMBEDDING, LAYER_POINTS, NORM, Piece


def locate_point(point: str) -> tuple[int, int]:
    """Compute the sort key of a point: its position in the order of computation."""
    if point == EMBEDDING:
        return (-1, 0)
    if point == NORM:
        return (1 << 30, 0)
    _, layer, *rest = point.split(".", 2)
    return int(layer), list(LAYER_POINTS.values()).index(rest[0] if rest else "")


def assemble_pieces(pieces: Iterable[Piece], tokens: int) -> dict[str, Tensor]:
    """Assemble the pieces of all ranks, point by point.

    Returns [tokens of the whole batch, width] for each point; NaN at tokens that no rank captured.
    """
    by_point: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_point.setdefault(piece.point, []).append(piece)
    assembled = {}
    for point in sorted(by_point, key=locate_point):
        at_point = by_point[point]
        width = max(piece.column + piece.values.shape[1] for piece in at_point)
        assembled[point] = at_point[0].values.new_full((tokens, width), torch.nan)
        for piece in at_point:
            assembled[point][piece.tokens, piece.column : piece.column + piece.values.shape[1]] = piece.values
    return assembled
