"""Ranges of a tensor as boxes, against the tensor itself."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.trainer.optimizer import split_into_boxes


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (1, 3, 4), (3, 1, 2, 2)])
def test_boxes_hold_the_range_in_its_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            found = list(split_into_boxes(shape, start, stop))
            cut = [
                whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].reshape(-1)
                for offset, size in found
            ]
            assert torch.cat([whole[:0].reshape(-1)[:0], *cut]).tolist() == list(range(start, stop))
            assert len(found) <= 2 * len(shape) - 1
