"""Faults of whole engines over a group that fails as NCCL's does; tests/unit/weight_sync/test_refit_damage.py has
every fault at every moment without models."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from megatron_grpo.config.schema import ParallelConfig
from tests.integration.test_refit import start_policy
from tests.integration.test_refit_faults import (
    REFIT,
    RESTARTS,
    Scene,
    assert_replaced,
    assert_sent_again,
    folders,
    ray_cluster,
)
from tests.integration.vllm_helpers import engines
from tests.support import nccl_like
from tests.support.refit_faults import DROP, FIRST, KILL_WORKER, LAST, MIDDLE, STALL_WORKER, FaultyReshard

__all__ = ["folders", "ray_cluster"]  # fixtures of the tests here
pytestmark = pytest.mark.slow
WORKER = "tests.support.nccl_like_worker.NcclLikeWorker"


@pytest.fixture(scope="module")
def scene(folders: list[Path]) -> Iterator[Scene]:
    policy = start_policy(folders[0], ParallelConfig(tensor=2))
    arguments = {"worker_extension_cls": WORKER}
    with engines(folders[2], data=2, engine_restarts=RESTARTS, engine_args=arguments) as generation:
        policy.wait_ready()
        ray.get(policy.submit(_install))
        yield Scene(folders[:2], generation, policy)
    policy.shutdown()


@pytest.fixture
def transport(scene: Scene) -> FaultyReshard:
    return FaultyReshard(scene.policy, scene.generation, replace(REFIT, shared_memory=False))


@pytest.mark.parametrize(("fault", "moment"), [(KILL_WORKER, FIRST), (STALL_WORKER, MIDDLE), (KILL_WORKER, LAST)])
def test_an_engine_that_dies_or_hangs_is_replaced(
    fault: str, moment: str, scene: Scene, transport: FaultyReshard
) -> None:
    assert_replaced(transport, scene, fault, moment)


def test_a_message_that_is_lost_is_sent_again(scene: Scene, transport: FaultyReshard) -> None:
    assert_sent_again(transport, scene, DROP, MIDDLE)


def _install(_rank: Any) -> None:
    nccl_like.install()
