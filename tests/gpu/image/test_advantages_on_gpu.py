"""PPO's advantages on a GPU are those on the CPU."""

import pytest
import torch

from tests.support.fake_rollouts import fake_ray
from tests.support.ppo_batch import advantages_of, make_config

__all__ = ["fake_ray"]  # a fixture of the test here


@pytest.mark.gpu
@pytest.mark.usefixtures("fake_ray")
@pytest.mark.parametrize("estimator", [{}, {"length_adaptive_alpha": 0.7}, {"name": "raw_reward"}])
def test_the_device_makes_no_difference(estimator: dict[str, object]) -> None:
    on_cpu, on_gpu = (
        advantages_of(make_config(estimator, calculate_advantages_on_gpu=chosen)) for chosen in (False, True)
    )
    for entry in ("advantages", "returns"):
        torch.testing.assert_close(on_gpu[entry], on_cpu[entry])
