"""Links of real groups, each rank in a thread; a group that fails as NCCL does has the properties of one."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.platform.device import open_store
from megatron_grpo.weight_sync import links, shard_sender
from megatron_grpo.weight_sync.links import BUFFERS, Side
from megatron_grpo.weight_sync.pieces import NO_RELAY
from megatron_grpo.weight_sync.refit_group import Rendezvous
from megatron_grpo.weight_sync.shard_receiver import TargetLinks
from megatron_grpo.weight_sync.shard_sender import SourceLinks
from megatron_grpo.weight_sync.shared_memory import HostMemory
from megatron_grpo.weight_sync.transfer_plan import plan_messages, write_plan
from tests.support import nccl_like
from tests.support.engine_table import table_boxes
from tests.support.nccl_like import NcclLikeGroup, NcclLikeTransfer
from tests.support.refit_models import DENSE

CPU = torch.device("cpu")
VERSION = 3
SHAPE = parse_model_shape(DENSE)
SOURCES, TARGETS = 2, 2
LINKS: dict[Side, type[SourceLinks | TargetLinks]] = {"source": SourceLinks, "target": TargetLinks}


@pytest.fixture(params=["sent", "one stream", "handed over", "not to be seen"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How messages come: over gloo; one after the other and slowly connected, as over NCCL; in memory; and as between
    two machines that both share memory."""
    if request.param == "not to be seen":
        monkeypatch.setattr(HostMemory, "map_address", lambda address: None)
    if request.param == "one stream":
        monkeypatch.setattr(links, "join_group", nccl_like.join)
    return str(request.param)


@pytest.fixture
def ranks(way: str) -> Iterator[dict[tuple[Side, int], Any]]:
    """All ranks of a policy with TP2 and an engine with PP2, connected."""
    store = open_store("127.0.0.1", 60.0)
    training, generation = ParallelConfig(tensor=2), GenerationParallelConfig(pipeline=2)
    dtypes = ["float32"] * len(build_weight_map(SHAPE))
    shards = split_policy(training, SHAPE), table_boxes(generation, SHAPE)
    scheduled = plan_messages(SHAPE, *shards, 1, dtypes, 1024)
    write_plan(store, scheduled, SOURCES, TARGETS, dtypes, shared_memory=way in ("handed over", "not to be seen"))
    rendezvous = Rendezvous(host="127.0.0.1", port=store.port, receivers=TARGETS, timeout_s=60.0)
    members: list[tuple[Side, int]] = [("source", 0), ("source", 1), ("target", 0), ("target", 1)]
    with ThreadPoolExecutor(len(members)) as pool:
        futures = [
            pool.submit(LINKS[side], rendezvous, number, CPU, build_weight_map(SHAPE)) for side, number in members
        ]
        yield {member: future.result() for member, future in zip(members, futures, strict=True)}


def test_what_is_packed_arrives_and_buffers_are_used_again_when_they_are_empty(
    ranks: dict[tuple[Side, int], Any], way: str
) -> None:
    assert all(len(rank.messages) > 2 * BUFFERS for rank in ranks.values()), "every buffer is used several times"
    for _ in range(2):  # links last for many refits, each with a deadline of its own
        for rank in ranks.values():
            rank._watch._end = 0.0
        with ThreadPoolExecutor(len(ranks)) as pool:
            run = {
                m: pool.submit(_send if m[0] == "source" else _receive, rank_links) for m, rank_links in ranks.items()
            }
            came = {member[1]: future.result() for member, future in run.items() if member[0] == "target"}
        for target, messages in came.items():
            for number, content in enumerate(messages):
                source = ranks["target", target]._peers[number]
                earlier = ranks["target", target]._peers[:number].count(source)
                assert torch.equal(content, _content(source, target, earlier, len(content)))
    for target in range(TARGETS):
        assert (ranks["target", target]._buffers is None) == (way == "handed over"), (
            "who is handed all needs no buffers"
        )


@pytest.mark.parametrize("one_stream", [False, True], ids=["gloo", "one stream"])
def test_messages_of_another_node_come_through_the_rank_beside_the_engine(
    one_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of a policy on nodes of their own, an engine on each: a message leaves its node once."""
    if one_stream:
        monkeypatch.setattr(shard_sender, "join_group", nccl_like.join)
    store = open_store("127.0.0.1", 60.0)
    training, generation = ParallelConfig(tensor=2, pipeline=2), GenerationParallelConfig(tensor=2)
    dtypes = ["float32"] * len(build_weight_map(SHAPE))
    shards = split_policy(training, SHAPE), table_boxes(generation, SHAPE)
    scheduled = plan_messages(SHAPE, *shards, 2, dtypes, 1024, devices_per_node=2)
    assert np.array_equal(scheduled["relay"] != NO_RELAY, scheduled["source"] // 2 != scheduled["target"] // 2)
    write_plan(store, scheduled, 4, 4, dtypes, shared_memory=True)
    rendezvous = Rendezvous(host="127.0.0.1", port=store.port, receivers=4, timeout_s=60.0, devices_per_node=2)
    members: list[tuple[Side, int]] = [(side, number) for side in LINKS for number in range(4)]
    with ThreadPoolExecutor(len(members)) as pool:
        futures = [
            pool.submit(LINKS[side], rendezvous, number, CPU, build_weight_map(SHAPE)) for side, number in members
        ]
        ends: dict[tuple[Side, int], Any] = {
            member: future.result() for member, future in zip(members, futures, strict=True)
        }
        run = {
            member: pool.submit(_send_numbered if member[0] == "source" else _receive, rank_links)
            for member, rank_links in ends.items()
        }
        came = {member[1]: future.result() for member, future in run.items() if member[0] == "target"}
    sizes = {end._group._group.size() for end in ends.values()} if not one_stream else {4}
    assert sizes == {4}, "a group of two policy ranks and two engine ranks on each node, not one of eight"
    for target, messages in came.items():
        assert ends["target", target]._buffers is None, "all is handed over in memory"
        for pieces, content in zip(ends["target", target].messages, messages, strict=True):
            source, turn = int(pieces[0]["source"]), int(pieces[0]["turn"])
            assert torch.equal(content, _content(source, target, turn, len(content)))
    sent = [
        len(rank_links.messages) - sum(rank_links.is_relayed)
        for (side, _), rank_links in ends.items()
        if side == "source"
    ]
    relayed = [sum(rank_links.is_relayed) for (side, _), rank_links in ends.items() if side == "source"]
    assert sum(sent) == sum(map(len, came.values()))
    assert min(relayed) > 2 * BUFFERS, "buffers of relays are used several times"


def _send_numbered(rank_links: SourceLinks) -> None:
    def fill(number: int, buffer: Tensor) -> None:
        first = rank_links.messages[number][0]
        buffer[:-16] = _content(rank_links._rank, int(first["target"]), int(first["turn"]), len(buffer) - 16)

    rank_links.send(fill, VERSION)


def test_a_rank_that_fails_is_no_reason_to_wait_for_the_deadline(ranks: dict[tuple[Side, int], Any]) -> None:
    def out(_number: int, _buffer: Tensor) -> None:
        raise RuntimeError("the cable is out")

    began = time.monotonic()
    with ThreadPoolExecutor(len(ranks)) as pool:
        bad = pool.submit(ranks["source", 1].send, out, VERSION)
        other_futures = [pool.submit(_send, ranks["source", 0])]
        other_futures += [pool.submit(_receive, ranks["target", target]) for target in range(TARGETS)]
        for future in (bad, *other_futures):
            with pytest.raises(RuntimeError):
                future.result()
    assert time.monotonic() - began < 20
    with pytest.raises(RuntimeError, match="failed before and were not made anew"):
        ranks["source", 1].begin(0)


def _content(source: int, target: int, number: int, nbytes: int) -> Tensor:
    """[nbytes], uint8: what the message of this number over a link holds."""
    generator = torch.Generator().manual_seed(100 * source + 10 * target + 1000 * number)
    return torch.randint(256, (nbytes,), generator=generator, dtype=torch.uint8)


def _send(rank_links: SourceLinks) -> None:
    def fill(number: int, buffer: Tensor) -> None:
        target = rank_links._peers[number]
        earlier = rank_links._peers[:number].count(target)
        buffer[:-16] = _content(rank_links._rank, target, earlier, len(buffer) - 16)

    rank_links.send(fill, VERSION)


def _receive(rank_links: TargetLinks) -> list[Tensor]:
    """The content of each message."""
    came: list[Tensor] = []
    rank_links.receive(lambda _, buffer: came.append(buffer[:-16].clone()), VERSION)
    return came


A_WHILE_S = 0.3


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as executor:
        yield executor


@pytest.fixture
def members(pool: ThreadPoolExecutor) -> Iterator[list[NcclLikeGroup]]:
    store = open_store("127.0.0.1", 60.0)
    rendezvous = Rendezvous(host="127.0.0.1", port=store.port, receivers=2, timeout_s=60.0)
    joined = [pool.submit(nccl_like.join, rendezvous, rank, 3, torch.device("cpu")) for rank in range(3)]
    groups = [future.result() for future in joined]
    yield groups
    for group in groups:
        group.abort()


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
    for transfer, member in ((sending, members[0]), (receiving, members[2])):
        assert not transfer.done()
        member.abort()
        with pytest.raises(RuntimeError, match="aborted"):
            transfer.result(timeout=20)
