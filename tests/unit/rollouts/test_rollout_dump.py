"""What is written of a step's rollouts, as far as the step has got: advantages of responses, of tokens, or none yet."""

from collections.abc import Sequence

import numpy as np
import pytest
from ray.exceptions import OwnerDiedError

from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.rollouts import partitions as dump
from megatron_grpo.rollouts.partitions import fetch_trained_values, select_trained_values
from tests.support.trajectories import make_trajectory

LENGTHS = np.array([3, 2])
SEQUENCES = [np.array([1]), np.array([0])]
"""Two shards, in another order than the step's."""
BY_TOKEN = np.array([10, 20], dtype=np.float32), np.array([1, 2, 3], dtype=np.float32)


def make_batch(stored: Sequence[str], by_response: list[float] | None = None) -> StepBatch:
    """What a step knows of its sequences: numbers of their tokens in each of these entries."""
    return StepBatch(
        lengths=LENGTHS,
        response_tokens=LENGTHS - 1,
        in_loss=np.ones(2, dtype=np.bool_),
        partitions=SEQUENCES,
        fields={name: list(BY_TOKEN) for name in ["token_ids", *stored]},
        advantages=None if by_response is None else np.array(by_response, dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("stored", "by_response", "advantages", "prev"),
    [
        ([], None, None, None),
        (["prev_logprobs"], None, None, [2, 3]),
        (["prev_logprobs"], [0.5, -0.5], [0.5, 0.5], [2, 3]),
        (["advantages"], None, [2, 3], None),
    ],
    ids=["nothing yet", "log-probabilities alone", "advantages of responses", "advantages of tokens"],
)
def test_what_a_step_knows_by_now(
    stored: list[str],
    by_response: list[float] | None,
    advantages: list[float] | None,
    prev: list[float] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dump.ray, "get", list)
    learnt = select_trained_values(fetch_trained_values(make_batch(stored, by_response)), 0, make_trajectory(2))
    for learnt_entry, expected in ((learnt.get("advantages"), advantages), (learnt.get("prev_logprobs"), prev)):
        assert (None if learnt_entry is None else learnt_entry.tolist()) == expected


def test_what_is_lost_with_the_rank_that_held_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(references: Sequence[object]) -> list[object]:
        raise OwnerDiedError("id", "address", "owner")

    monkeypatch.setattr(dump.ray, "get", get)
    learnt = select_trained_values(
        fetch_trained_values(make_batch(["prev_logprobs"], [0.5, -0.5])), 0, make_trajectory(2)
    )
    assert learnt.keys() == {"advantages"}
    assert learnt["advantages"].tolist() == [0.5, 0.5]
