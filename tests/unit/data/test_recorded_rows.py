"""Recorded rollouts as rows to learn from: which are taken, and their tokens."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_grpo.algorithms.supervised import make_trajectory
from megatron_grpo.batch.rollout_files import locate_rollouts_file, write_rollouts
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.config.data_schema import SUPERVISED, DataConfig, DatasetConfig
from megatron_grpo.data.processors import TaskDataSpec
from megatron_grpo.data.recorded_rows import RecordedRows
from megatron_grpo.data.rows import examine_set
from megatron_grpo.data.supervised_rows import recorded_data_processor

REWARDS = {1: [[0.0, 1.0], [0.5, 0.5]], 2: [[None, 0.2], [1.0, 1.0]]}
"""Rewards of the samples of each prompt, by step."""


def rollout(step: int, prompt: int, sample: int, reward: float | None) -> Trajectory:
    """Six given tokens around two turns of the model, of which the first has two weight versions."""
    first = 100 * step + 10 * prompt + sample
    return Trajectory(
        prompt_idx=prompt,
        group=prompt,
        sample=sample,
        reward=reward,
        token_ids=np.arange(first, first + 10, dtype=np.int32),
        spans=[Span(2, 4, 0), Span(4, 5, 1), Span(8, 10, 1)],
        logprobs=-np.ones(5, dtype=np.float32),
        response="text",
        stop_reason="stop",
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step, groups in REWARDS.items():
        rows = [
            (prompt, [(rollout(step, prompt, sample, reward), {}) for sample, reward in enumerate(rewards)])
            for prompt, rewards in enumerate(groups)
        ]
        write_rollouts(locate_rollouts_file(tmp_path, step), rows)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "locations"),
    [
        ({}, [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (2, 0, 1), (2, 1, 0), (2, 1, 1)]),
        ({"min_reward": 0.5}, [(1, 0, 1), (1, 1, 0), (1, 1, 1), (2, 1, 0), (2, 1, 1)]),
        ({"best_of_group": True}, [(1, 0, 1), (1, 1, 0), (2, 0, 1), (2, 1, 0)]),
        ({"best_of_group": True, "min_reward": 1.0}, [(1, 0, 1), (2, 1, 0)]),
    ],
)
def test_rollouts_are_chosen_by_their_rewards(
    run_dir: Path, settings: dict[str, Any], locations: list[tuple[int, int, int]]
) -> None:
    rows = RecordedRows(DataConfig(from_rollouts=str(run_dir), **settings))
    names = [rows.locate(number).rsplit("/", 1)[1] for number in range(len(rows))]
    assert names == [f"step_{step}.parquet, prompt {prompt}, sample {sample}" for step, prompt, sample in locations]


def test_the_tokens_are_those_that_were_sampled(run_dir: Path) -> None:
    """From the file to the sequence of a batch: the same ids, and the same ones in the loss."""
    row = RecordedRows(DataConfig(from_rollouts=str(run_dir)))[1]
    spec = TaskDataSpec(task_name="math")
    sequence = make_trajectory(recorded_data_processor(row, spec, None, 10, 3)["message_log"], datum(row), group=0)
    recorded = rollout(1, 0, 1, 1.0)
    assert sequence.token_ids.tolist() == recorded.token_ids.tolist()
    assert sequence.response_ids.tolist() == recorded.response_ids.tolist()
    assert recorded_data_processor(row, spec, None, 9, 3)["loss_multiplier"] == 0


@pytest.mark.parametrize(
    ("segment_tokens", "spans"),
    [
        ([5, 5], [Span(3, 5, 0), Span(8, 10, 0)]),  # two branches, or an edited history
        ([4, 3, 3], [Span(2, 3, 0), Span(3, 4, 1), Span(6, 7, 1), Span(8, 10, 1)]),
        ([5, 5], [Span(3, 5, 0)]),  # nothing was sampled in the second
    ],
)
def test_each_segment_is_learnt_behind_its_own_context(
    tmp_path: Path, segment_tokens: list[int], spans: list[Span]
) -> None:
    """As reinforcement learning does: the sequences are those that `split_segments` gives."""
    sampled = sum(span.end - span.start for span in spans)
    full = replace(
        rollout(1, 0, 0, 1.0), segment_tokens=segment_tokens, spans=spans, logprobs=np.zeros(sampled, dtype=np.float32)
    )
    write_rollouts(locate_rollouts_file(tmp_path, 1), [(0, [(full, {}), (rollout(1, 0, 1, 0.5), {})])])
    rows = RecordedRows(DataConfig(from_rollouts=str(tmp_path), best_of_group=True))
    expected = [part for part in full.split_segments() if part.spans]
    assert len(rows) == len(expected)
    for number, part in enumerate(expected):
        data = recorded_data_processor(rows[number], TaskDataSpec(task_name="math"), None, 5, number)
        sequence = make_trajectory(data["message_log"], data, group=0)
        assert sequence.token_ids.tolist() == part.token_ids.tolist()
        assert sequence.response_ids.tolist() == part.response_ids.tolist()
        assert data["loss_multiplier"] == 1.0, "a segment has a length of its own"
        assert rows.locate(number).endswith(f"sample 0, segment {number + 1}")


def datum(row: dict[str, Any]) -> Any:
    return recorded_data_processor(row, TaskDataSpec(task_name="math"), None, 10, 3)


def test_a_run_without_rollouts_is_named(tmp_path: Path) -> None:
    data = DataConfig(from_rollouts=str(tmp_path))
    report = examine_set(DatasetConfig(path=str(tmp_path)), data, {"math": SUPERVISED})
    assert [problem.text for problem in report.problems] == [
        "has no rollouts/step_N.parquet; give the folder of a run that recorded them (logger.rollouts=all)"
    ]


def test_the_digest_is_of_the_chosen_rollouts(run_dir: Path) -> None:
    """A resume compares it: other rewards in the filter are other data."""
    digests = set()
    for settings in ({}, {"min_reward": 0.5}, {"best_of_group": True}):
        data = DataConfig(from_rollouts=str(run_dir), **settings)
        report = examine_set(DatasetConfig(path=str(run_dir)), data, {"math": SUPERVISED})
        assert not report.problems
        assert len(report.usable) == report.rows > 0
        digests.add(report.digest)
    assert len(digests) == 3
