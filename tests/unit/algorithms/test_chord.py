"""CHORD: the weight of a step, the rows of a step, and the batch of samples and demonstrations."""

import math
from typing import Any

import numpy as np
import pytest

from megatron_grpo.algorithms.chord import choose_rows, join_batches
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.config.chord_schema import ChordConfig
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.trainer.microbatch_schedule import split_among_replicas


def compute_reference_weight(earlier_steps: int, warmup: int, decay: int, peak: float, valley: float) -> float:
    """The authors' schedule, of the steps before."""
    if warmup > earlier_steps:
        return peak * (earlier_steps / warmup)
    progress = min(1.0, (earlier_steps - warmup) / decay) if decay else 1.0
    return valley + (peak - valley) * (1 + math.cos(math.pi * progress)) / 2


@pytest.mark.parametrize(("warmup", "decay"), [(0, 200), (5, 10), (3, 0), (0, 0)])
def test_the_weight_rises_and_falls_as_the_authors_have_it(warmup: int, decay: int) -> None:
    chord = ChordConfig(warmup_steps=warmup, decay_steps=decay, peak_weight=0.8, final_weight=0.1)
    for step in range(1, warmup + decay + 5):
        expected = compute_reference_weight(step - 1, warmup, decay, 0.8, 0.1)
        assert chord.find_weight(step) == pytest.approx(expected)


@pytest.mark.parametrize(("count", "per_step"), [(7, 3), (5, 5), (3, 8)])
def test_every_epoch_has_each_row_once_in_a_new_order_whatever_the_first_step(count: int, per_step: int) -> None:
    steps = [choose_rows(count, per_step, step, seed=4).tolist() for step in range(1, 4 * count + 1)]
    rows = [row for step in steps for row in step]
    epochs = [rows[start : start + count] for start in range(0, len(rows) - count + 1, count)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert choose_rows(count, per_step, 3, seed=4).tolist() == steps[2]
    assert rows != [row for step in range(1, 4 * count + 1) for row in choose_rows(count, per_step, step, seed=5)]


def make_batch(lengths: list[int], responses: list[int], **fields: Any) -> StepBatch:
    return StepBatch(
        lengths=np.array(lengths),
        response_tokens=np.array(responses),
        in_loss=np.array([True] * len(lengths)),
        **fields,
    )


def test_replicas_get_their_samples_and_their_demonstrations() -> None:
    samples = make_batch(
        [5, 6, 7],
        [2, 3, 4],
        advantages=np.array([1.0, -1.0, 0.5], dtype=np.float32),
        rollouts=np.array([0, 0, 1]),
        rollout_shares=np.array([0.4, 0.6, 1.0], dtype=np.float32),
        partitions=[np.array([0, 2]), np.array([1])],
        fields={"token_ids": ["t0", "t1"], "generation_logprobs": ["g0", "g1"], "prev_logprobs": ["p0", "p1"]},
    )
    demonstrations = make_batch(
        [3, 4],
        [1, 2],
        partitions=[np.array([1]), np.array([0])],
        fields={"token_ids": ["e0", "e1"], "generation_logprobs": ["z0", "z1"]},
    )
    joined = join_batches(samples, demonstrations)
    assert joined.fields["token_ids"] == ["t0", "e0", "t1", "e1"]
    assert joined.fields["prev_logprobs"] == ["p0", "z0", "p1", "z1"], "zeros where only samples have values"
    by_replica = [
        np.concatenate(joined.partitions[chosen]).tolist() for chosen in split_among_replicas(joined, replicas=2)
    ]
    assert by_replica == [[0, 2, 4], [1, 3]]
    assert joined.rollouts.tolist() == [0, 0, 1, 2, 3]
    assert joined.in_loss.tolist() == [True, True, True, False, False]
    assert joined.imitated_tokens.tolist() == [0, 0, 0, 1, 2]
    (everything,) = joined.split_minibatches(len(joined))
    counts, alone = GlobalCounts.count(joined, everything), GlobalCounts.count(samples, np.arange(3))
    assert (counts.tokens, counts.sequences, counts.all_sequences) == (
        alone.tokens,
        alone.sequences,
        alone.all_sequences,
    )
    assert counts.imitated_tokens == 3
    assert samples.fields["token_ids"] == ["t0", "t1"], "the samples' own batch is written as it was"
