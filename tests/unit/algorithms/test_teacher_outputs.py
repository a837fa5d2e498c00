"""Which teacher scores which sequence, and what of it reaches the loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_grpo.algorithms.distillation import add_teacher_outputs
from megatron_grpo.algorithms.stages import build_batch
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.rollouts.partitions import gather_partitions, split_by_partition
from megatron_grpo.trainer.model_ranks import MegatronTeacher
from tests.support.fake_rollouts import FakeRay, FakeRollouts, Reference
from tests.support.trajectories import failed_trajectory, make_trajectory

RECIPE = ["+exp=quickstart_distillation", "teacher.parallel.data=2"]
TWO_TEACHERS = ["+env.games.type=countdown", "+teachers.games.model.path=/games"]
TASKS = ["addition", "games", "addition", "games"]


@pytest.fixture(autouse=True)
def without_ray(fake_ray: FakeRay) -> FakeRay:
    return fake_ray


class FakeTeacher(MegatronTeacher):
    """A teacher whose output at every token of its sequences is one number, in its own width."""

    def __init__(self, number: int, width: int) -> None:
        self.number, self.width = number, width
        self.asked: list[list[int]] = []

    def add_outputs(self, batch: StepBatch, sequences: NDArray[np.int64]) -> NDArray[np.bool_]:
        self.asked.append(sequences.tolist())
        is_own = np.repeat(np.isin(np.arange(len(batch)), sequences), batch.lengths)
        values = np.zeros((len(is_own), self.width), dtype=np.int16)
        values[is_own] = self.number
        parts = split_by_partition(values, batch.partitions, batch.lengths)
        batch.fields["teacher_outputs"] = [Reference(part) for part in parts]
        finite = np.zeros(len(batch), dtype=np.bool_)
        finite[sequences[1:]] = True  # its first sequence is not finite
        return finite


def scored_batch(config: Config, tasks: list[str]) -> tuple[StepBatch, NDArray[np.bool_], dict[str, FakeTeacher]]:
    rollouts: Any = FakeRollouts()
    rows = [make_trajectory(3 + i, prompt_idx=i, group=i, task_name=task) for i, task in enumerate(tasks)]
    groups = rollouts.put([[row] for row in rows])
    batch = build_batch(config, groups, rollouts)
    teachers = {"teacher": FakeTeacher(5, 2), "teachers.games": FakeTeacher(-7, 3)}
    run: Any = SimpleNamespace(config=config, teachers=teachers, rollouts=rollouts)
    is_finite = add_teacher_outputs(run, batch, [row.outcome for row in rows])
    return batch, is_finite, teachers


def test_every_sequence_has_the_output_of_its_tasks_teacher() -> None:
    batch, is_finite, teachers = scored_batch(compose_config([*RECIPE, *TWO_TEACHERS]), TASKS)
    assert len(batch.partitions) == 2, "the teacher's replicas divide the step, though the policy has one"
    assert {name: teacher.asked for name, teacher in teachers.items()} == {
        "teacher": [[0, 2]],
        "teachers.games": [[1, 3]],
    }
    parts = [reference.get() for reference in batch.fields["teacher_outputs"]]
    merged = gather_partitions(parts, batch.partitions, batch.lengths)
    expected = {"addition": [5, 5, 0], "games": [-7, -7, -7]}
    for task, piece in zip(TASKS, np.split(merged, np.cumsum(batch.lengths)[:-1]), strict=True):
        assert (piece == expected[task]).all()
    assert batch.teachers is not None
    assert batch.teachers.tolist() == [0, 1, 0, 1]
    assert is_finite.tolist() == [False, False, True, True]
    assert not [name for name in batch.fields if name.startswith("teacher_outputs_")]


def test_a_step_may_lack_a_task() -> None:
    batch, _, teachers = scored_batch(compose_config([*RECIPE, *TWO_TEACHERS]), ["games", "games"])
    assert teachers["teacher"].asked == []
    assert batch.teachers is not None
    assert batch.teachers.tolist() == [1, 1]


def test_one_teacher_needs_no_numbers() -> None:
    batch, _, _ = scored_batch(compose_config(RECIPE), ["addition", "addition"])
    assert batch.teachers is None
    assert batch.fields["teacher_outputs"][0].get().shape[1] == 2


def test_a_response_without_a_reward_is_learnt_from_unless_rewards_count() -> None:
    outcomes = [make_trajectory(3, reward=None).outcome, failed_trajectory().outcome, make_trajectory(3).outcome]
    alone = compose_config(["+exp=quickstart_distillation"])
    assert StepBatch.from_outcomes(alone, outcomes).in_loss.tolist() == [True, False, True]
    mixed = compose_config(
        ["+exp=quickstart_distillation", "loss_fn.policy_loss_weight=1", "grpo.num_generations_per_prompt=2"]
    )
    assert StepBatch.from_outcomes(mixed, outcomes).in_loss.tolist() == [False, False, True]
