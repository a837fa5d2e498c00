"""Which sequences a gradient that is not finite is blamed on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.cluster.actor_processes import ActorProcesses
from megatron_grpo.trainer.messages import RankReport, RankTrainResult
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from tests.support.grpo_run import SHAPE

PLACES = [RankReport(data_rank=0, device_name="cpu", startup_s={}, processes=ActorProcesses("here", ()))] + [
    RankReport(data_rank=replica, device_name="cpu", startup_s={}, processes=ActorProcesses("here", ()))
    for replica in (0, 1)
]
PLANS = [[np.array([3, 0]), np.array([5])], [np.array([1]), np.array([4, 2])]]
"""Of each replica the sequences of its microbatches, by number."""


@pytest.mark.parametrize(
    ("losses", "bad_logprobs", "expected"),
    [
        ([[0.1, 0.2], [0.3, math.nan]], [], [2, 4]),
        ([[0.1, 0.2], [0.3, math.inf]], [4], [4]),
        ([[math.nan, 0.2], [math.nan, 0.4]], [], [0, 1, 3]),
        ([[0.1, 0.2], [0.3, 0.4]], [], [0, 1, 2, 3, 4, 5]),
        ([[0.1, 0.2], [0.3, 0.4]], [5], [5]),
        ([[0.1, math.nan], [0.3, 0.4]], [1], [5]),
    ],
    ids=["microbatch", "narrowed", "two replicas", "only the gradient", "only a log-probability", "elsewhere"],
)
def test_a_bad_gradient_is_traced_to_its_sequences(
    losses: list[list[float]], bad_logprobs: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    finite = np.ones(6, dtype=np.bool_)
    finite[bad_logprobs] = False
    batch = StepBatch(lengths=np.full(6, 2), response_tokens=np.ones(6, dtype=np.int64), in_loss=finite | True)
    policy = MegatronPolicy.__new__(MegatronPolicy)  # no processes: what is tested is bookkeeping
    policy._reports, policy.shape = PLACES, SHAPE

    def forward(of: StepBatch, field: str, _: str) -> tuple[list[Any], Any]:
        assert (of, field) == (batch, "prev_logprobs")
        return [], finite

    monkeypatch.setattr(policy, "_forward", forward)
    shares = [RankTrainResult(math.nan, 0.0, None)]
    shares += [RankTrainResult(math.nan, 0.0, [{"loss": loss} for loss in replica]) for replica in losses]
    suspects = policy._find_suspects(batch, PLANS, shares)
    assert suspects == expected
    assert all(type(number) is int for number in suspects), "as a file of JSON has them"
