"""The group that fails as NCCL does has the properties for which the fault matrix runs over it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from megatron_grpo.platform.device import open_store
from megatron_grpo.weight_sync.refit_group import Rendezvous
from tests.support import nccl_like
from tests.support.nccl_like import NcclLikeGroup, NcclLikeTransfer

A_WHILE_S = 0.3


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made


@pytest.fixture
def members(pool: ThreadPoolExecutor) -> Iterator[list[NcclLikeGroup]]:
    store = open_store("127.0.0.1", 60.0)
    rendezvous = Rendezvous(host="127.0.0.1", port=store.port, receivers=2, timeout_s=60.0)
    joined = [pool.submit(nccl_like.join, rendezvous, rank, 3, torch.device("cpu")) for rank in range(3)]
    made = [one.result() for one in joined]
    yield made
    for one in made:
        one.abort()


def numbers() -> list[Tensor]:
    return [torch.arange(200, dtype=torch.uint8)]


def room() -> list[Tensor]:
    return [torch.zeros(200, dtype=torch.uint8)]


def link(pool: ThreadPoolExecutor, source: NcclLikeGroup, target: NcclLikeGroup, ranks: tuple[int, int]) -> None:
    sent = pool.submit(source.send, numbers(), ranks[1], 0)
    came = target.recv(room(), ranks[0], 0)
    assert eventually(came)
    assert eventually(sent.result())


def eventually(transfer: NcclLikeTransfer) -> bool:
    until = time.monotonic() + 20
    while not transfer.is_completed() and time.monotonic() < until:
        time.sleep(0.01)
    return transfer.is_completed()


def test_a_send_ends_with_its_receive(pool: ThreadPoolExecutor, members: list[NcclLikeGroup]) -> None:
    link(pool, members[0], members[1], (0, 1))
    sent = members[0].send(numbers(), 1, 0)
    time.sleep(A_WHILE_S)
    assert not sent.is_completed()
    with pytest.raises(AssertionError, match="may never complete"):
        sent.wait()
    space = room()
    came = members[1].recv(space, 0, 0)
    assert eventually(sent)
    assert eventually(came)
    assert torch.equal(space[0], numbers()[0])


def test_transfers_of_a_process_go_one_after_the_other(pool: ThreadPoolExecutor, members: list[NcclLikeGroup]) -> None:
    link(pool, members[0], members[1], (0, 1))
    link(pool, members[0], members[2], (0, 2))
    first, second = members[0].send(numbers(), 1, 0), members[0].send(numbers(), 2, 0)
    came = members[2].recv(room(), 0, 0)
    time.sleep(A_WHILE_S)
    assert not second.is_completed()
    assert not came.is_completed()
    members[1].recv(room(), 0, 0)
    assert eventually(first)
    assert eventually(came)


def test_nobody_is_told_that_a_peer_has_aborted(pool: ThreadPoolExecutor, members: list[NcclLikeGroup]) -> None:
    link(pool, members[0], members[1], (0, 1))
    pending = members[1].recv(room(), 0, 0)
    members[0].abort()
    time.sleep(A_WHILE_S)
    assert not pending.is_completed()


def test_the_first_transfer_blocks_and_an_abort_ends_it(pool: ThreadPoolExecutor, members: list[NcclLikeGroup]) -> None:
    sending, receiving = pool.submit(members[0].send, numbers(), 1, 0), pool.submit(members[2].recv, room(), 1, 0)
    time.sleep(A_WHILE_S)
    for one, member in ((sending, members[0]), (receiving, members[2])):
        assert not one.done()
        member.abort()
        with pytest.raises(RuntimeError, match="aborted"):
            one.result(timeout=20)
