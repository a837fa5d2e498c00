"""Faults at every moment of a refit, with real links between processes and the driver's real attempts; no model.

Over gloo, and over a group that fails as NCCL's does: nobody is told that a peer is gone (tests/support/nccl_like.py).
The outcomes are the same, and nobody waits longer than the deadline. Faults of whole engines: test_refit_faults.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from megatron_grpo.cluster import futures
from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.weight_sync import refit_calls, transfer_modes
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

    def publish(self, version: int) -> tuple[Any, float]:
        """The report, and the seconds it took."""
        began = time.monotonic()
        report = self.transport.publish(version)
        served = [actor.call("serves").result(timeout=10) for actor in self.generation.actors]
        assert served == [version, version]
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
    found = [
        pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow, id=", ".join(one))
        for one in product(("nccl", "gloo"), faults, moments)
    ]
    return pytest.mark.parametrize(("scene", "fault", "moment"), found, indirect=["scene"])


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
    [told] = report.replaced
    assert told.startswith("generation engine 0 was replaced: ")
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
    with pytest.raises(PolicyLostError, match=f"policy rank {FAULTY_RANK} is {state}, and no rank of the policy can"):
        scene.transport.publish(2)
    assert time.monotonic() - began < BUSY_S
    assert scene.generation.restarts == [0, 0]
