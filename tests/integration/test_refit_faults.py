"""Faults of real processes at every moment of a refit: it recovers, or one error says who and what, and in time."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import ray

from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.cluster.process_log import driver_log
from megatron_grpo.config.schema import ParallelConfig, RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.hf_weights import load_hf_weights
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.refit_calls import SETTLE_S, PolicyLostError, RefitError
from tests.integration.test_refit import assert_serves, start_policy
from tests.integration.vllm_helpers import (
    Oracle,
    engines,
    generate,
    make_model,
    request,
    start_ray,
    worker_pids,
)
from tests.support.refit_faults import (
    DROP,
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
    inject,
)

DEADLINE_S = 60.0
REFIT = RefitConfig(bucket_mib=0.02, timeout_s=DEADLINE_S, retries=1)
"""Buckets so small that every link has several messages."""
RESTARTS = 50

# With every `make test`, test_refit_damage.py has these faults without engines; .ci/run has two of these cases.
pytestmark = pytest.mark.slow


@dataclass
class Scene:
    """A policy that takes turns to be two models, and two engines that start as a third."""

    folders: list[Path]
    generation: VllmGeneration
    policy: MegatronPolicy
    oracles: list[Oracle] = field(init=False)
    versions: ClassVar[Iterator[int]] = count(1)

    def __post_init__(self) -> None:
        self.oracles = [Oracle(folder) for folder in self.folders]

    def learn(self) -> int:
        """Give the policy other weights; the version to publish them as."""
        version = next(self.versions)
        ray.get(self.policy.submit(_become, str(self.folders[version % 2])), timeout=60)
        return version

    def assert_serves(self, version: int) -> None:
        """Every engine's tokens and log-probabilities are those of transformers with the policy's weights."""
        assert_serves(self.generation, self.oracles[version % 2], version)


@pytest.fixture(scope="module", autouse=True)
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """With logs and heartbeats, as in a run."""
    with driver_log(tmp_path_factory.mktemp("run"), "info"):
        start_ray()
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_model(folder / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def generation(folders: list[Path], request: pytest.FixtureRequest) -> Iterator[VllmGeneration]:
    """Two engines; the parameter is in how many stages, else in one."""
    with engines(folders[2], pipeline=getattr(request, "param", 1), data=2, engine_restarts=RESTARTS) as started:
        yield started


@pytest.fixture(scope="module")
def lasting_policy(folders: list[Path]) -> Iterator[MegatronPolicy]:
    policy = start_policy(folders[0], ParallelConfig(tensor=2))
    policy.wait_ready()
    yield policy
    policy.shutdown()


@pytest.fixture
def scene(folders: list[Path], generation: VllmGeneration, lasting_policy: MegatronPolicy) -> Scene:
    return Scene(folders[:2], generation, lasting_policy)


@pytest.fixture
def doomed(folders: list[Path], generation: VllmGeneration) -> Iterator[Scene]:
    """With a policy that is not to live long."""
    policy = start_policy(folders[0], ParallelConfig(tensor=2))
    policy.wait_ready()
    yield Scene(folders[:2], generation, policy)
    policy.shutdown()


def test_an_engine_of_one_rank_has_no_process_beside_its_core(generation: VllmGeneration) -> None:
    assert [psutil.Process(pid).cmdline()[0] for pid in worker_pids(generation)] == ["VLLM::EngineCore"]


def cases(
    faults: tuple[str, ...], moments: tuple[str, ...] = MOMENTS, in_ci: tuple[str, str] | None = None
) -> list[Any]:
    marks = {in_ci: pytest.mark.ci}
    return [
        pytest.param(fault, moment, marks=marks.get((fault, moment), ()), id=f"{fault}, {moment}")
        for fault in faults
        for moment in moments
    ]


@pytest.mark.parametrize(("fault", "moment"), cases((KILL_WORKER, STALL_WORKER), in_ci=(KILL_WORKER, MIDDLE)))
def test_an_engine_that_dies_or_hangs_is_replaced(fault: str, moment: str, scene: Scene) -> None:
    assert_replaced(FaultyReshard(scene.policy, scene.generation, REFIT), scene, fault, moment)


@pytest.mark.parametrize("generation", [2], indirect=True)
@pytest.mark.parametrize(("fault", "moment"), cases((KILL_WORKER, STALL_WORKER), (MIDDLE,)))
def test_so_it_is_with_engines_of_two_stages(fault: str, moment: str, scene: Scene) -> None:
    """Whose workers are processes beside vLLM's engine core."""
    assert_replaced(FaultyReshard(scene.policy, scene.generation, REFIT), scene, fault, moment)


@pytest.mark.parametrize(("fault", "moment"), cases((DROP, FLIP), in_ci=(FLIP, LAST)))
def test_a_message_that_is_lost_or_damaged_is_sent_again(
    fault: str, moment: str, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    assert_sent_again(FaultyReshard(scene.policy, scene.generation, REFIT), scene, fault, moment)
    assert ("checksum" in caplog.text) == (fault == FLIP), "what is damaged is noticed on arrival, not by the deadline"


@pytest.mark.parametrize(("fault", "moment"), cases((KILL_RANK, STALL_RANK)))
def test_a_rank_that_dies_or_hangs_is_one_error(fault: str, moment: str, doomed: Scene) -> None:
    """Nobody can take its place, and no engine is replaced for it."""
    transport = FaultyReshard(doomed.policy, doomed.generation, REFIT)
    transport.connect()
    restarts = doomed.generation.restarts.copy()
    ranks = [ray.get(ref) for ref in doomed.policy.submit(_pid)]
    number = SIGNALS[fault]
    transport.publish(doomed.learn())
    version = doomed.learn()
    if moment == LAST:
        transport.before_commit = lambda: os.kill(ranks[FAULTY_RANK], number)
        transport.publish(version)  # it has sent all that it had to
        doomed.assert_serves(version)
        version += 1
    else:
        ray.get(doomed.policy.submit(_inject, moment, (ranks[FAULTY_RANK], number), None))
    began = time.monotonic()
    with pytest.raises(PolicyLostError) as raised:
        transport.publish(version)
    seconds = time.monotonic() - began
    message = str(raised.value)
    print(f"{fault}, {moment}: {seconds:.1f} s: {message}")
    state = "gone" if fault == KILL_RANK else "stuck"
    assert message.endswith(f"policy rank {FAULTY_RANK} is {state}")
    assert message.startswith(f"refit of version {version}: ")
    assert seconds < DEADLINE_S + SETTLE_S + 60
    assert doomed.generation.restarts == restarts
    with pytest.raises(RuntimeError, match="was not committed"):
        generate(doomed.generation, [request([2, 3], seed=0, max_new_tokens=2)], SamplingSettings(max_new_tokens=2))


def test_an_engine_is_replaced_as_often_as_is_allowed(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with nothing lost for the others: the next refit that is allowed to heals."""
    transport = FaultyReshard(scene.policy, scene.generation, REFIT)
    transport.connect()
    limit = scene.generation.restarts[0]
    monkeypatch.setattr(scene.generation.config, "engine_restarts", limit)
    version = scene.learn()
    _kill(worker_pids(scene.generation)[0])
    again = f"; it was replaced as often as generation.engine_restarts={limit} allows" if limit else ""
    with pytest.raises(RefitError, match=rf"generation engine 0 is lost: a vLLM process.*{again}$"):
        transport.publish(version)
    monkeypatch.setattr(scene.generation.config, "engine_restarts", limit + 1)
    assert len(transport.publish(version).replaced) == 1
    scene.assert_serves(version)


def test_an_engine_that_dies_between_refits_gets_the_weights_that_were_published_last(scene: Scene) -> None:
    """While others sample from these, as when it dies over a response."""
    transport = FaultyReshard(scene.policy, scene.generation, REFIT)
    transport.connect()
    version = scene.learn()
    transport.publish(version)
    before = scene.generation.starts[1].processes.started
    _kill(worker_pids(scene.generation, 1)[0])
    transport.restore({1: "generation engine 1 is lost"})
    scene.assert_serves(version)
    assert not [pid for pid, started in before if _lives(pid, started)]
    version = scene.learn()
    report = transport.publish(version)
    assert report.replaced == ("generation engine 1 was replaced: generation engine 1 is lost",)
    assert report.retries == 0
    scene.assert_serves(version)


def assert_replaced(transport: FaultyReshard, scene: Scene, fault: str, moment: str) -> None:
    transport.connect()
    transport.publish(scene.learn())
    version, restarts = scene.learn(), scene.generation.restarts.copy()
    before = scene.generation.starts[0].processes.started
    target = worker_pids(scene.generation)[0], SIGNALS[fault]
    if moment == LAST:
        transport.before_commit = lambda: os.kill(*target)
    else:
        ray.get(scene.policy.submit(_inject, moment, target, None))
    began = time.monotonic()
    report = transport.publish(version)
    seconds = time.monotonic() - began
    print(f"{fault}, {moment}: {seconds:.1f} s; {report.replaced}")
    scene.assert_serves(version)
    assert scene.generation.restarts - restarts == {0: 1}
    (replacement,) = report.replaced
    assert replacement.startswith("generation engine 0 was replaced: ")
    assert not [pid for pid, started in before if _lives(pid, started)], "something is left of the old engine"


def assert_sent_again(transport: FaultyReshard, scene: Scene, fault: str, moment: str) -> None:
    transport.connect()
    transport.publish(scene.learn())
    version, restarts = scene.learn(), scene.generation.restarts.copy()
    ray.get(scene.policy.submit(_inject, moment, None, fault))
    began = time.monotonic()
    report = transport.publish(version)
    seconds = time.monotonic() - began
    print(f"{fault}, {moment}: {seconds:.1f} s")
    scene.assert_serves(version)
    assert report.retries == 1
    assert report.replaced == ()
    assert scene.generation.restarts == restarts


def _become(rank: Any, folder: str) -> None:
    load_hf_weights(rank.chunks, rank.shape, folder)


def _pid(_: Any) -> int:
    return os.getpid()


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def _lives(pid: int, started: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == started and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _inject(rank: Any, moment: str, target: tuple[int, int] | None, fault: str | None) -> None:
    """On a rank of the policy: `refit_faults.inject`."""
    import torch

    if torch.distributed.get_rank() == FAULTY_RANK:
        inject(rank.weight_sender.links, moment, target, fault)
