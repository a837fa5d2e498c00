"""Memory that tensors share one after the other: never two at once, and no more of it than what is in use at once."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from megatron_grpo.cpu.host_memory import ReusedMemory

PAGE = 4096


def take(memory: ReusedMemory, numbers: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    with memory, torch.device("cpu"):
        return torch.empty_strided((numbers,), (1,), dtype=dtype, requires_grad=False)


def test_the_lowest_place_that_is_large_enough_is_taken() -> None:
    memory = ReusedMemory(16 * PAGE)
    first, second, third = take(memory, 2 * PAGE), take(memory, PAGE), take(memory, PAGE)
    assert memory.used == [(0, 2 * PAGE), (2 * PAGE, 3 * PAGE), (3 * PAGE, 4 * PAGE)]
    del first
    fourth = take(memory, PAGE + 1)
    fifth = take(memory, PAGE)
    assert memory.used[0] == (0, PAGE + 1)
    assert memory.used[-1] == (4 * PAGE, 5 * PAGE), "behind the first there is no page left"
    assert all(one.is_contiguous() for one in (second, third, fourth, fifth))


def test_a_place_is_free_when_nothing_refers_to_it_any_more() -> None:
    memory = ReusedMemory(PAGE)
    tensor = take(memory, 100)
    parameter = nn.Parameter(tensor.view(torch.float32)[1:], requires_grad=False)
    del tensor
    assert memory.used == [(0, 100)], "a view is left"
    parameter.data = torch.empty(0)
    assert memory.used == []


def test_what_does_not_fit_comes_from_elsewhere() -> None:
    memory = ReusedMemory(PAGE)
    within, beyond, nothing = take(memory, PAGE), take(memory, 1), take(memory, 0)
    assert memory.used == [(0, PAGE)]
    assert (beyond.numel(), nothing.numel(), within.numel()) == (1, 0, PAGE)


def test_only_that_one_function_takes_from_it() -> None:
    memory = ReusedMemory(PAGE)
    with memory:
        assert torch.empty(3).shape == (3,)
        matrix = torch.empty_strided((3, 2), (1, 3), dtype=torch.bfloat16)
        assert torch.empty_strided((2,), (1,)).dtype == torch.get_default_dtype()
    assert memory.used == [(0, 12)]
    assert (matrix.shape, matrix.stride()) == ((3, 2), (1, 3))


@pytest.mark.parametrize("seed", range(5))
def test_tensors_that_come_and_go_keep_what_was_written_to_them(seed: int) -> None:
    chance = random.Random(seed)
    memory = ReusedMemory(64 * PAGE)
    kept: dict[int, torch.Tensor] = {}
    for number in range(300):
        kept[number] = take(memory, chance.randrange(1, 5 * PAGE), torch.int16).fill_(number)
        for gone in chance.sample(sorted(kept), k=max(0, len(kept) - 10)):
            del kept[gone]
        assert all(bool((tensor == value).all()) for value, tensor in kept.items())
    kept.clear()
    assert memory.used == []
