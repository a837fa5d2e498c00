"""Advantages and returns on a GPU are those on the CPU."""

import torch
from torch import Tensor

from megatron_grpo.losses.advantages import group_advantages, leave_one_out_baseline, reward_to_go
from megatron_grpo.losses.value import gae, whiten

LENGTHS = [3, 7, 1, 5]


def estimates(device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(4, 8, generator=generator).to(device)
    by_token, values = torch.randn(2, sum(LENGTHS), generator=generator).to(device)
    mask = (torch.rand(sum(LENGTHS), generator=generator) < 0.7).to(device)
    return {
        "group": group_advantages(rewards, leave_one_out=True, normalize=True),
        "over batch": group_advantages(rewards, leave_one_out=False, normalize=True, over_batch=True),
        "leave one out": leave_one_out_baseline(rewards),
        "reward to go": reward_to_go(by_token, LENGTHS),
        "gae": gae(by_token, values, LENGTHS, 0.99, torch.full((len(LENGTHS),), 0.95, device=device)),
        "whitened": whiten(values, mask),
    }


def test_the_device_makes_no_difference(device: str) -> None:
    expected = estimates("cpu")
    for name, estimate in estimates(device).items():
        assert estimate.device.type == device, name
        torch.testing.assert_close(estimate.cpu(), expected[name], msg=lambda text, name=name: f"{name}: {text}")
