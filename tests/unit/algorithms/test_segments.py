"""A rollout of several segments: one row, one reward, one weight in means, and sequences of their own to train on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.batch.rollout_files import RunFacts, StepFacts, StepRecord, read_recorded_rollouts, write_rollouts
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.schema import Config
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.rollouts import partitions
from megatron_grpo.verification.replay.record import RecordedStep
from tests.support.step_advantages import advantages_of, laid_out
from tests.support.trajectories import failed_trajectory, make_trajectory, plain_groups

SEGMENTED = {
    "token_ids": [1, 2, 3, 4, 1, 2, 9, 5, 6, 7, 8],
    "spans": [Span(2, 3, 0), Span(3, 4, 1), Span(7, 9, 1), Span(10, 11, 2)],
    "logprobs": [-0.5, -1, -2, -3, -4],
    "segment_tokens": [4, 5, 2],
}


def step(segment_tokens: list[int], **changes: Any) -> list[Trajectory]:
    """Two prompts with two samples each; the first sample has these segments."""
    first = make_trajectory(**(SEGMENTED | {"segment_tokens": segment_tokens}), reward=1.0)
    peers = [make_trajectory(3, reward=0.0), make_trajectory(2, reward=0.25), make_trajectory(1, reward=1.0)]
    return [first, *peers]


def config(**parts: Any) -> Config:
    config = Config()
    config.grpo.num_generations_per_prompt, config.grpo.num_prompts_per_step = 2, 2
    return config


def test_the_batch_has_a_sequence_for_each_segment() -> None:
    batch = StepBatch.from_outcomes(
        config(), [trajectory.outcome for trajectory in [*step([4, 5, 2])[:2], failed_trajectory()]]
    )
    assert batch.lengths.tolist() == [4, 5, 2, 4, 1]
    assert batch.response_tokens.tolist() == [2, 2, 1, 3, 0]
    assert batch.rollouts is not None
    assert batch.rollouts.tolist() == [0, 0, 0, 1, 2]
    assert batch.in_loss.tolist() == [True, True, True, True, False]
    assert [indices.tolist() for indices in batch.split_minibatches(1)] == [[0, 1, 2], [3], [4]]
    assert [indices.tolist() for indices in batch.split_minibatches(2)] == [[0, 1, 2, 3], [4]]
    assert batch.find_rollouts([4, 1, 2]) == [2, 0]
    counts = GlobalCounts.count(batch, np.arange(5))
    assert (counts.tokens, counts.sequences, counts.all_sequences) == pytest.approx((8, 2, 3))


def test_each_segment_has_its_own_images() -> None:
    images = [StoredImage(name, 2, 2) for name in "abc"]
    first, second, *_ = step([4, 5, 2])
    first = replace(first, images=images, segment_images=[2, 0, 1])
    second = replace(second, images=images[:1])
    by_segment = [images[:2], [], images[2:]]
    assert [part.images for part in first.split_segments()] == by_segment
    assert all(not part.segment_images for part in first.split_segments())
    assert Trajectory.from_row(first.to_row()).outcome == first.outcome
    batch = StepBatch.from_outcomes(config(), [first.outcome, second.outcome, make_trajectory(1).outcome])
    assert batch.images == [*by_segment, images[:1], []]


def test_without_segments_a_batch_is_as_before() -> None:
    batch = StepBatch.from_outcomes(config(), [trajectory.outcome for trajectory in step([])])
    assert batch.rollouts is batch.rollout_shares is None
    assert batch.lengths.tolist() == [11, 4, 3, 2]


ESTIMATORS = [
    {},
    {"adv_estimator": {"name": "reinforce_plus_plus"}},
    {"adv_estimator": {"name": "reinforce_plus_plus"}, "kl": True},
    {"kl": True},
]


@pytest.mark.usefixtures("fake_ray")
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=["group", "reinforce++", "reinforce++ with KL", "KL"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_sampled_tokens_have_the_advantages_of_the_rollout_in_one_piece(
    estimator: dict[str, Any], replicas: int
) -> None:
    settings = config()
    settings.policy.parallel.data = replicas
    settings.grpo.adv_estimator.name = estimator.get("adv_estimator", {}).get("name", settings.grpo.adv_estimator.name)
    generator = np.random.default_rng(4)
    entries = {}
    if "kl" in estimator:
        settings.loss_fn.use_kl_in_reward = True
        tokens = sum(trajectory.tokens for trajectory in step([]))
        entries = {name: generator.normal(size=tokens) for name in ("prev_logprobs", "reference_logprobs")}
    full, cut = (advantages_of(settings, step(segments), **entries) for segments in ([], [4, 5, 2]))
    assert [value for row in cut for value in row] == [value for row in full for value in row]
    assert len(cut) == len(full) + 2


@pytest.mark.usefixtures("fake_ray")
def test_a_rollout_leaves_the_loss_as_a_whole() -> None:
    from megatron_grpo.algorithms.token_functions import flag_inconsistent_sequences

    trajectories = step([4, 5, 2])
    batch, _ = laid_out(config(), trajectories)
    parts = [part for trajectory in trajectories for part in trajectory.split_segments()]
    arrays = partitions.concatenate_trajectories(parts)
    arrays["prev_logprobs"] = arrays["generation_logprobs"].copy()
    arrays["prev_logprobs"][7:9] -= 3.0  # in the second segment of the first rollout
    lengths = batch.sum_by_rollout(batch.lengths)
    _, (flags, metrics) = flag_inconsistent_sequences(batch.lengths, arrays, batch.in_loss, lengths, 2.0)
    assert flags.tolist() == [True, False, False, False]
    assert metrics["max_seq_mult_prob_error"] == pytest.approx((3 + 2 * np.exp(3)) / 5)
    assert batch.repeat_by_sequence(flags).tolist() == [True] * 3 + [False] * 3


def test_rows_keep_segments_and_have_the_values_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trajectories = step([4, 5, 2])
    batch = StepBatch.from_outcomes(config(), [trajectory.outcome for trajectory in trajectories])
    batch.partitions = [np.array([1, 3]), np.array([0, 2, 4, 5])]
    tokens = np.arange(batch.lengths.sum(), dtype=np.float32)
    batch.fields = {"prev_logprobs": partitions.split_by_partition(tokens, batch.partitions, batch.lengths)}
    batch.advantages = batch.repeat_by_sequence(np.array([1, -1, 2, -2], dtype=np.float32))
    monkeypatch.setattr(partitions.ray, "get", list)
    values = partitions.fetch_trained_values(batch)
    rows = [
        (trajectory, partitions.select_trained_values(values, i, trajectory))
        for i, trajectory in enumerate(trajectories)
    ]
    assert rows[0][1]["prev_logprobs"].tolist() == [2, 3, 7, 8, 10]
    assert rows[0][1]["advantages"].tolist() == [1] * 5
    facts = RunFacts(prompts_per_step=2, samples_per_prompt=2, max_num_steps=1, vocab=10, vocabulary=None)
    dropped = [trajectories[0].outcome]
    record = StepRecord(facts, StepFacts(position={}, longest=5, dropped=dropped))
    write_rollouts(tmp_path / "step_1.parquet", [(0, rows[:2]), (1, rows[2:])], record.to_metadata())
    read, groups = read_recorded_rollouts(tmp_path / "step_1.parquet")
    assert read.dropped == dropped
    for number, group in enumerate((trajectories[:2], trajectories[2:])):
        for trajectory in group:
            trajectory.group = number
    assert plain_groups(groups) == plain_groups([trajectories[:2], trajectories[2:]])
    assert Trajectory.from_row(trajectories[0].to_saved_row()).segments == [[4, 2], [5, 2], [2, 1]]


def test_a_replay_has_a_sequence_for_each_segment() -> None:
    trajectories = step([4, 5, 2])
    record: Any = RecordedStep(
        run_dir=Path(),
        step=1,
        config=config(),
        checkpoint=None,
        model=Path(),
        trajectories=trajectories,
        advantages=[None] * 4,
        prev_logprobs=[trajectory.logprobs for trajectory in trajectories],
        figures=None,
    )
    assert record.lengths.tolist() == [4, 5, 2, 4, 3, 2]
    assert record.place_at_sampled(record.prev_logprobs)[:11].tolist() == [0, 0, -0.5, -1, 0, 0, 0, -2, -3, 0, -4]
    assert record.predicts[:11].tolist() == [True] * 3 + [False] + [True] * 4 + [False] + [True, False]
    assert record.join_tokens().lengths == record.lengths.tolist()
