"""A rank's memory on a GPU, given up while others need it and taken back."""

from __future__ import annotations

import pytest
import torch

from tests.parity.policy_training import train_arguments
from tests.parity.ranks import Layout
from tests.parity.test_device_memory import make_rank, nbytes, of_training
from tests.parity.training import whole_tensors
from tests.support.tiny_models import TinyModel

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.gpu]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_device_has_its_bytes_back(precision: str, tiny_models: dict[str, TinyModel]) -> None:
    rank = make_rank(Layout(), tiny_models["qwen3_tied"], {"precision": precision})
    rank.train(*train_arguments(Layout()))
    before = whole_tensors(rank)
    for weights in (False, True):
        held, wanted = torch.cuda.memory_allocated(), nbytes(of_training(rank))
        if weights:
            wanted = nbytes(parameter for chunk in rank.chunks for parameter in chunk.parameters())
        rank.memory.give_up(weights=weights)
        assert held - torch.cuda.memory_allocated() >= wanted > 0
    rank.memory.take_back()
    after = whole_tensors(rank)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert rank.train(*train_arguments(Layout())).grad_norm > 0
