"""Sequences of a step with other prompts, and outputs of theirs at the step's own sampled tokens."""

import numpy as np
import pytest

from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.rollouts.partitions import exchange_prompts, place_outputs
from tests.support.fake_rollouts import FakeRay

PARTITIONS = [np.array([0, 2]), np.array([1])]
SEQUENCES = [([1, 2, 30, 31], "..xx"), ([1, 40, 9, 41], ".x.x"), ([3, 4, 5], "...")]
"""Token ids, and which of them were sampled: a response, two turns, and none."""


def make_arrays() -> tuple[np.ndarray, dict[str, np.ndarray]]:
    lengths = np.array([len(ids) for ids, _ in SEQUENCES])
    token_ids = np.concatenate([ids for ids, _ in SEQUENCES]).astype(np.int32)
    sampled = np.array([mark == "x" for _, marks in SEQUENCES for mark in marks])
    return lengths, {"token_ids": token_ids, "sampled": sampled}


@pytest.mark.parametrize(("longest", "second"), [(9, [7, 7, 7, 40, 9, 41]), (5, [1, 40, 9, 41])])
def test_what_follows_the_prompt_stays_and_comes_back_to_its_place(
    longest: int, second: list[int], fake_ray: FakeRay
) -> None:
    lengths, arrays = make_arrays()
    prompts = [np.array([8], dtype=np.int32), np.array([7, 7, 7], dtype=np.int32), np.array([6, 6], dtype=np.int32)]
    _, (changed, fits, fields) = exchange_prompts(lengths, arrays, PARTITIONS, prompts, longest)
    assert changed.tolist() == [3, len(second), 2]
    assert fits.tolist() == [True, longest == 9, True]
    assert [part.get().tolist() for part in fields["token_ids"]] == [[8, 30, 31, 6, 6], second]
    assert fields["sampled"][0].get().tolist() == [False, True, True, False, False]
    hinted = StepBatch(
        lengths=changed,
        response_tokens=np.array([2, 2, 0]),
        in_loss=np.ones(3, dtype=np.bool_),
        partitions=PARTITIONS,
        fields=fields,
    )
    rows = [np.stack([part.get(), -part.get()], axis=1).astype(np.float32) for part in fields["token_ids"]]
    hinted.fields["teacher_outputs"] = [fake_ray.put(row) for row in rows]
    placed, _ = place_outputs(lengths, {"sampled": arrays["sampled"]}, hinted, "teacher_outputs")
    expected = np.where(arrays["sampled"], arrays["token_ids"], 0)
    assert placed["teacher_outputs"].tolist() == np.stack([expected, -expected], axis=1).tolist()
