"""A step's file of rollouts says everything that is needed to train on it, and says so when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_grpo.batch.rollout_files import (
    StepRecord,
    examine_file,
    find_recorded_folder,
    find_recorded_steps,
    locate_rollouts_file,
    read_recorded_rollouts,
    write_rollouts,
)
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.data.loader import PromptLoader, PromptSampler
from tests.support.recording import make_facts, make_record
from tests.support.trajectories import failed_trajectory, make_outcome, make_trajectory, plain_groups, with_learnt

GROUPS = [
    [make_trajectory(3, reward=1 / 3, correct=True, reward_parts={"b": 0.1, "a": 0.7}), make_trajectory(2, sample=1)],
    [
        failed_trajectory(group=1, failure="it raised"),
        make_trajectory(4, group=1, sample=1, spans=[Span(1, 2, 3), Span(4, 5, 4)], logprobs=[-1.5, -1e-30]),
    ],
]
DROPPED = [make_outcome(5, reward=1 / 7, reward_metrics={"x": 0.1}), make_outcome(1, reward=None, failure="late")]


def write(folder: Path, record: StepRecord, groups: list[list[Trajectory]] | None = None, step: int = 1) -> Path:
    file = locate_rollouts_file(folder, step)
    rows = GROUPS if groups is None else groups
    write_rollouts(file, [(number, with_learnt(*one)) for number, one in enumerate(rows)], record.to_metadata())
    return file


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    record = make_record(make_facts(dropped=DROPPED, carried=1, dynamic_sampling={"dynamic_sampling_gen_batches": 2.0}))
    file = write(tmp_path, record)
    facts, groups = read_recorded_rollouts(file)
    assert facts == record.step
    assert plain_groups(groups) == plain_groups(GROUPS)
    assert [one.outcome for group in groups for one in group] == [one.outcome for group in GROUPS for one in group]
    found = examine_file(file)
    assert (found.record, found.rollouts, found.largest_token) == (record, 4, 4)


def test_rollouts_that_nothing_was_learnt_from_are_read_too(tmp_path: Path) -> None:
    file = locate_rollouts_file(tmp_path, 1)
    write_rollouts(file, [(0, [(trajectory, {}) for trajectory in GROUPS[0]])], make_record().to_metadata())
    assert plain_groups(read_recorded_rollouts(file)[1]) == plain_groups(GROUPS[:1])


def test_the_position_of_a_loader_survives(tmp_path: Path) -> None:
    def loader() -> PromptLoader:
        dataset = [{"idx": row, "loss_multiplier": 1.0} for row in range(7)]
        return PromptLoader(dataset, prompts_per_batch=2, order=PromptSampler([7], [1.0], shuffle=True, seed=3))  # type: ignore[arg-type]

    first, second = loader(), loader()
    batches = iter(first)
    next(batches)
    file = write(tmp_path, make_record(make_facts(position=first.state_dict())))
    second.load_state_dict(read_recorded_rollouts(file)[0].position)
    assert next(iter(second)) == next(batches)


def test_the_folder_of_the_run_and_that_of_its_rollouts_are_one(tmp_path: Path) -> None:
    for step in (10, 2):
        write(tmp_path, make_record(), step=step)
    (tmp_path / "rollouts" / ".step_11.parquet").touch()
    assert list(find_recorded_steps(tmp_path)) == [2, 10]
    assert find_recorded_steps(tmp_path) == find_recorded_steps(tmp_path / "rollouts")
    assert find_recorded_folder(tmp_path) == find_recorded_folder(tmp_path / "rollouts")
    assert find_recorded_steps(tmp_path / "no_run") == {}


def test_a_file_that_was_cut_off_is_found_by_its_end(tmp_path: Path) -> None:
    file = write(tmp_path, make_record())
    content = file.read_bytes()
    for cut in (0, 10, len(content) - 1):
        file.write_bytes(content[:cut])
        with pytest.raises(ValueError, match="is damaged or was not written to its end"):
            examine_file(file)


def test_damage_in_the_middle_is_found_when_it_is_read(tmp_path: Path) -> None:
    long = [[make_trajectory(5000, token_ids=[7 * place % 5003 for place in range(5001)])]]
    file = write(tmp_path, make_record(), long)
    content = bytearray(file.read_bytes())
    content[200:3000] = bytes(2800)
    file.write_bytes(bytes(content))
    examine_file(file)
    with pytest.raises((ValueError, OSError)):
        read_recorded_rollouts(file)


@pytest.mark.parametrize("changed", [{}, {"run": {"prompts": 3}}, {"step": {}}, {"run": None}])
def test_a_file_of_another_version_is_refused(changed: dict[str, object], tmp_path: Path) -> None:
    ((key, value),) = make_record().to_metadata().items()
    metadata = {key: json.dumps({**json.loads(value), **changed}).encode()} if changed else {}
    write_rollouts(locate_rollouts_file(tmp_path, 1), [(0, with_learnt(*GROUPS[0]))], metadata)
    with pytest.raises(ValueError, match="was written by another version"):
        examine_file(locate_rollouts_file(tmp_path, 1))
