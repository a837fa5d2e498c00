"""The fake that tests of steps sample with is called as the real rollout workers are."""

import inspect

import pytest

from megatron_grpo.rollouts.pool import RolloutPool
from tests.support.fake_rollouts import FakeRollouts


@pytest.mark.parametrize(
    "name", ["make_settings", "collect", "begin", "build_partitions", "compute", "fetch", "put", "dump", "wait_dump"]
)
def test_a_call_that_the_fake_takes_the_real_one_takes(name: str) -> None:
    def list_parameters(pool: type) -> list[tuple[str, object, object]]:
        parameters = inspect.signature(getattr(pool, name)).parameters.values()
        return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]

    assert list_parameters(FakeRollouts) == list_parameters(RolloutPool)
