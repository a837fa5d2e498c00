"""Damage of a refit: checksums, versions of workers, engines that are replaced, and the matrix of faults."""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, RayTaskError
from torch import Tensor

from megatron_grpo.cluster import futures
from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.weight_sync import pieces, refit_calls, transfer_modes
from megatron_grpo.weight_sync import refit_calls as diagnosis
from megatron_grpo.weight_sync.engine_worker import RefitWorker
from megatron_grpo.weight_sync.pieces import TRAILER_BYTES, compute_checksum, find_checksum_problem, write_checksum
from megatron_grpo.weight_sync.refit_calls import PolicyLostError
from tests.support.refit_faults import (
    DROP,
    FAIL,
    FAULTY_RANK,
    FLIP,
    KILL_RANK,
    KILL_WORKER,
    LAST,
    MIDDLE,
    MOMENTS,
    SIGNALS,
    STALL_RANK,
    STALL_WORKER,
    FaultyReshard,
)
from tests.support.refit_processes import GREETING, JOINING, Generation, PlayedRay, Policy

NEVER, FINE = object(), object()
TOLD = RayTaskError("receive_weights", "", RuntimeError("worker 0: message 3 did not come"))
LOST = RayTaskError("receive_weights", "", EngineLostError("a vLLM process of this engine has ended"))
DEAD = ActorDiedError()


def find_diagnoses(monkeypatch: pytest.MonkeyPatch, ranks: Sequence[Any], engines: Sequence[Any]) -> dict[int, str]:
    """What is said of calls of ranks and engines: FINE, an error, or NEVER over."""
    answers = {f"rank {number}": answer for number, answer in enumerate(ranks)}
    answers |= {f"engine {number}": answer for number, answer in enumerate(engines)}

    def wait(refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert refs, "Ray's own refuses to wait for nothing"
        over = [ref for ref in refs if answers[ref] is not NEVER]
        if len(over) < num_returns:
            time.sleep(timeout)
        return over, [ref for ref in refs if ref not in over]

    def get(ref: str) -> Any:
        if isinstance(answers[ref], Exception):
            raise answers[ref]
        return answers[ref]

    played: Any = SimpleNamespace(wait=wait, get=get, ObjectRef=str)
    monkeypatch.setattr(diagnosis, "ray", played)
    monkeypatch.setattr(futures, "ray", played)
    monkeypatch.setattr(diagnosis, "SETTLE_S", 0.1)
    sends: Any = [f"rank {number}" for number in range(len(ranks))]
    receives: Any = {number: f"engine {number}" for number in range(len(engines))}
    return diagnosis.find_lost_engines(sends, receives, "refit of version 3: late")


@pytest.mark.parametrize("engines", [[TOLD, FINE], [TOLD, TOLD]])
def test_who_can_say_what_went_wrong_is_not_lost(engines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_diagnoses(monkeypatch, [FINE, TOLD], engines) == {}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (LOST, "generation engine 1 is lost: a vLLM process of this engine has ended"),
        (DEAD, "generation engine 1 died (its process is gone)"),
        (NEVER, "generation engine 1 does not come back"),
    ],
)
@pytest.mark.parametrize("ranks", [[FINE, TOLD], []])
def test_engines_that_are_dead_or_silent_are_lost(
    ranks: list[Any], answer: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_diagnoses(monkeypatch, ranks, [TOLD, answer]) == {1: f"refit of version 3: late; {reason}"}


def test_a_rank_may_be_waiting_for_an_engine_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(find_diagnoses(monkeypatch, [NEVER, FINE], [NEVER, TOLD])) == [0]


@pytest.mark.parametrize(("ranks", "engines"), [([FINE, DEAD], [TOLD, TOLD]), ([TOLD, DEAD], [LOST, NEVER])])
def test_a_dead_rank_is_the_end_whatever_the_engines_are(
    ranks: list[Any], engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PolicyLostError, match=r"^refit of version 3: late; policy rank 1 is gone$"):
        find_diagnoses(monkeypatch, ranks, engines)


def test_a_rank_that_nobody_keeps_waiting_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyLostError, match=r"^refit of version 3: late; policy rank 0 is stuck$"):
        find_diagnoses(monkeypatch, [NEVER, TOLD], [TOLD, TOLD])


class Receiver:
    """Takes every version but the one that is refused."""

    refused: int | None = None

    def receive(self, version: int) -> None:
        if version == self.refused:
            raise ValueError("a checksum is broken")

    def abandon(self) -> None: ...


class Worker(RefitWorker):
    """As mixed into vLLM's worker."""

    rank, device = 3, torch.device("cpu")
    vllm_config: Any = None
    model_runner: Any = SimpleNamespace(reset_lora_state=lambda: None)


def test_a_version_is_confirmed_by_who_received_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)  # vLLM replaces it on CPUs
    worker, receiver = Worker(), Receiver()
    assert worker.receive_refit(1) == "worker 3: connect_refit() comes first"
    worker.receiver = receiver
    assert worker.confirm_refit(1) == "worker 3 holds version None of the weights, and not 1"
    assert worker.receive_refit(1) is None
    assert worker.confirm_refit(1) is None
    assert worker.confirm_refit(2) == "worker 3 holds version 1 of the weights, and not 2"
    receiver.refused = 2
    assert worker.receive_refit(2) == "worker 3: a checksum is broken"
    assert worker.confirm_refit(1) == "worker 3 holds version None of the weights, and not 1"
    receiver.refused = None
    assert worker.receive_refit(2) is None
    assert worker.confirm_refit(2) is None


def test_every_flipped_bit_is_noticed() -> None:
    buffer = _message(payload_bytes=32)
    assert find_checksum_problem(buffer, version=7) is None
    for position in range(buffer.numel()):
        for bit in range(8):
            damaged = buffer.clone()
            damaged[position] ^= 1 << bit
            assert find_checksum_problem(damaged, version=7) is not None, (position, bit)


def test_exchanged_words_are_noticed() -> None:
    words = torch.randint(-(2**62), 2**62, (64,))
    checksums = {int(compute_checksum(words))}
    for i in range(64):
        for j in range(i):
            exchanged = words.clone()
            exchanged[[i, j]] = words[[j, i]]
            checksums.add(int(compute_checksum(exchanged)))
    assert len(checksums) == 1 + 64 * 63 // 2


def test_a_message_of_another_version_is_refused() -> None:
    assert find_checksum_problem(_message(payload_bytes=16), version=8) == "holds version 7, not 8"


def test_checksum_is_the_documented_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python's integers, over several chunks."""
    monkeypatch.setattr(pieces, "CHUNK_WORDS", 8)
    pieces._make_weights.cache_clear()
    words = torch.randint(-(2**63), 2**63 - 1, (21,))
    expected, values = 0, words.tolist()
    for begin in range(0, 21, 8):
        part = sum(word * (((i + 1) * pieces.GOLDEN) | 1) for i, word in enumerate(values[begin : begin + 8]))
        expected = (expected * pieces.GOLDEN + part) % 2**64
    actual = int(compute_checksum(words)) % 2**64
    pieces._make_weights.cache_clear()
    assert actual == expected


def _message(payload_bytes: int) -> Tensor:
    buffer = torch.randint(256, (payload_bytes + TRAILER_BYTES,), dtype=torch.uint8)
    write_checksum(buffer, version=7)
    return buffer


DEADLINE_S, SETTLE_S = 8.0, 6.0
LONG_S = 100.0
"""Deadline with faults of which all are told at once, however busy the machine is."""
BUSY_S = 45.0
"""Less than LONG_S, and enough for DEADLINE_S, SETTLE_S and new processes on a machine with other things to do."""
SILENT = (STALL_WORKER, STALL_RANK, DROP)
"""Faults that only the deadline shows."""


@dataclass
class Scene:
    """A policy with two ranks, two engines, and a first version that is served."""

    policy: Policy
    generation: Generation
    transport: FaultyReshard

    def inject(self, *arguments: Any) -> None:
        self.policy.actors[FAULTY_RANK].call("inject", *arguments).result(timeout=10)

    def publish(self, version: int, engines: int = 2) -> tuple[Any, float]:
        """The report, and the seconds it took."""
        began = time.monotonic()
        report = self.transport.publish(version)
        served = [actor.call("serves").result(timeout=10) for actor in self.generation.actors]
        assert served == [version] * engines
        return report, time.monotonic() - began


@pytest.fixture
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """The parameter is the kind of group."""
    for module in (refit_calls, futures):
        monkeypatch.setattr(module, "ray", PlayedRay)
    monkeypatch.setattr(refit_calls, "SETTLE_S", SETTLE_S)
    timeout_s = DEADLINE_S if request.node.callspec.params["fault"] in SILENT else LONG_S
    config = RefitConfig(bucket_mib=0.006, timeout_s=timeout_s, retries=1, shared_memory=False)
    monkeypatch.setattr(transfer_modes, "find_node_address", lambda: "127.0.0.1")
    policy, generation = Policy(request.param, ParallelConfig(tensor=2)), Generation(request.param, engines=2, ranks=2)
    yield Scene(policy, generation, FaultyReshard(policy, generation, config))
    for actor in (*policy.actors, *generation.actors):
        actor.process.kill()


QUICK = {("nccl", fault, MIDDLE) for fault in (KILL_WORKER, FLIP, KILL_RANK)}
"""Of the matrix, what `make test` runs; the rest is slow."""


def cases(faults: tuple[str, ...], moments: tuple[str, ...] = MOMENTS) -> Any:
    """Every fault at every moment, over both kinds of group."""
    parameters = [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=", ".join(case))
        for case in product(("nccl", "gloo"), faults, moments)
    ]
    return pytest.mark.parametrize(("scene", "fault", "moment"), parameters, indirect=["scene"])


@cases((KILL_WORKER, STALL_WORKER))
def test_one_dead_engine_costs_one_engine(scene: Scene, fault: str, moment: str) -> None:
    scene.publish(1)
    target = scene.generation.actors[0].pid, SIGNALS[fault]
    if moment == LAST:
        scene.transport.before_commit = lambda: os.kill(*target)
    else:
        scene.inject(moment, target, None)
    report, seconds = scene.publish(2)
    assert scene.generation.restarts == [1, 0]
    [reason] = report.replaced
    assert reason.startswith("generation engine 0 was replaced: ")
    assert seconds < BUSY_S
    assert scene.publish(3)[0].retries == 0


@cases((KILL_WORKER, STALL_WORKER), (JOINING, GREETING))
def test_so_it_is_while_links_are_made(scene: Scene, fault: str, moment: str) -> None:
    scene.generation.actors[1].call("end", moment, SIGNALS[fault]).result(timeout=10)
    report, seconds = scene.publish(1)
    assert scene.generation.restarts == [0, 1]
    assert len(report.replaced) == 1
    assert seconds < BUSY_S


@cases((DROP, FLIP, FAIL))
def test_a_message_that_is_lost_or_damaged_is_sent_again(scene: Scene, fault: str, moment: str) -> None:
    scene.publish(1)
    scene.inject(moment, None, fault)
    report, seconds = scene.publish(2)
    assert report.retries == 1
    assert scene.generation.restarts == [0, 0]
    assert seconds < BUSY_S


@cases((KILL_RANK, STALL_RANK), MOMENTS[:2])
def test_a_rank_that_dies_or_hangs_is_one_error_and_no_engine_is_replaced(
    scene: Scene, fault: str, moment: str
) -> None:
    scene.publish(1)
    scene.inject(moment, (scene.policy.actors[FAULTY_RANK].pid, SIGNALS[fault]), None)
    began = time.monotonic()
    state = "gone" if fault == KILL_RANK else "stuck"
    with pytest.raises(PolicyLostError, match=f"policy rank {FAULTY_RANK} is {state}$"):
        scene.transport.publish(2)
    assert time.monotonic() - began < BUSY_S
    assert scene.generation.restarts == [0, 0]


@pytest.mark.parametrize(
    ("scene", "fault"), [("gloo", FLIP), pytest.param("nccl", FLIP, marks=pytest.mark.slow)], indirect=["scene"]
)
def test_links_follow_engines_that_join_and_leave(scene: Scene, fault: str) -> None:
    transport, actors = scene.transport, scene.generation.actors
    scene.publish(1)
    actors.append(scene.generation.start(2))
    transport.join(2, 1)
    scene.publish(2, 3)
    first = actors[0]
    transport.leave(0)
    first.process.kill()
    transport.publish(3)
    assert [actor.call("serves").result(timeout=10) for actor in actors[1:]] == [3, 3]
    assert scene.generation.restarts == [0, 0], "no other engine was touched"
