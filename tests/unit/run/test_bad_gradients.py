"""Which sequences a gradient that is not finite is blamed on."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.policy.driver.policy import MegatronPolicy
from megatron_grpo.policy.driver.rank_group import _Shard
from megatron_grpo.policy.interface import StepShare
from megatron_grpo.policy.rank.actor import RankPlace

PLACES = [RankPlace(data=0, is_reporter=False, device_name="cpu", startup_s={})] + [
    RankPlace(data=replica, is_reporter=True, device_name="cpu", startup_s={}) for replica in (0, 1)
]
SHARDS = [_Shard([[3, 0], [5]], local=None), _Shard([[1], [4, 2]], local=None)]


@pytest.mark.parametrize(
    ("losses", "bad_logprobs", "expected"),
    [
        ([[0.1, 0.2], [0.3, math.nan]], [], [2, 4]),
        ([[0.1, 0.2], [0.3, math.inf]], [4], [4]),
        ([[math.nan, 0.2], [math.nan, 0.4]], [], [0, 1, 3]),
        ([[0.1, 0.2], [0.3, 0.4]], [], [0, 1, 2, 3, 4, 5]),
        ([[0.1, 0.2], [0.3, 0.4]], [5], [5]),
    ],
    ids=["microbatch", "narrowed", "two replicas", "only the gradient", "only a log-probability"],
)
def test_a_bad_gradient_is_traced_to_its_sequences(
    losses: list[list[float]], bad_logprobs: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = SequenceBatch([2] * 6, torch.zeros(12, dtype=torch.int64))
    logprobs = torch.full((12,), -1.0)
    for index in bad_logprobs:
        logprobs[2 * index + 1] = math.nan
    policy = MegatronPolicy.__new__(MegatronPolicy)  # no processes: what is tested is bookkeeping
    policy._places = PLACES
    monkeypatch.setattr(policy, "get_logprobs", lambda _: logprobs)
    shares = [StepShare(math.nan, 0.0, None)]
    shares += [StepShare(math.nan, 0.0, [{"loss": loss} for loss in replica]) for replica in losses]
    assert policy._suspects(batch, SHARDS, shares) == expected
