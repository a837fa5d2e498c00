"""Files of a step's rollouts, of what it computed and of its engines: what is written is read again."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_grpo import observability
from megatron_grpo.batch import replay_files, rollout_files
from megatron_grpo.batch.generation_requests import EngineCounts, compute_engine_metrics
from megatron_grpo.batch.images import StoredImage
from megatron_grpo.batch.replay_files import (
    StateFigure,
    StepFigures,
    TensorFigure,
    choose_watched_tokens,
    locate_figures_file,
    read_figures,
    write_figures,
)
from megatron_grpo.batch.rollout_files import (
    StepRecord,
    drop_rollouts_after,
    examine_file,
    find_recorded_folder,
    find_recorded_steps,
    locate_rollouts_file,
    read_recorded_rollouts,
    read_rollouts,
    write_rollouts,
)
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.data.loader import PromptLoader, PromptSampler
from tests.support.documents import undocumented
from tests.support.recorded_run import make_facts, make_record
from tests.support.trajectories import failed_trajectory, make_outcome, make_trajectory, plain_groups, with_learnt

ROWS = [
    make_trajectory(
        3,
        prompt_idx=2**40,
        sample=1,
        response="42 é\n\0",
        correct=True,
        reward=1 / 3,
        prompt="6 x 7?\n",
        answer="42",
        columns={"level": "3", "source": "é"},
    ),
    make_trajectory(2, reward=math.nan, correct=None, reward_parts={"a": 1 / 3, "b": math.nan}, stop_reason="length"),
    failed_trajectory(prompt_tokens=4, failure="it raised"),
    make_trajectory(4, spans=[Span(1, 2, 3), Span(4, 5, 4)], logprobs=[-math.inf, -1e-30], loss_multiplier=0.0),
]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Arrays as lists, with their types, keys in order: for a comparison as texts, in which NaN is NaN."""
    names = [name for name, value in row.items() if isinstance(value, np.ndarray)]
    arrays = {name: (str(row[name].dtype), row[name].tolist()) for name in names}
    return json.loads(json.dumps(row | arrays, sort_keys=True))


def make_expected_row(step: int, group: int, trajectory: Trajectory, prev: bool) -> dict[str, Any]:
    row = trajectory.to_row()
    ((_, learnt),) = with_learnt(trajectory, prev=prev)
    arrays: dict[str, Any] = {"token_ids": ("int32", row["token_ids"]), "logprobs": ("float32", row["logprobs"])}
    arrays["advantages"] = ("float32", learnt["advantages"].tolist())
    arrays["prev_logprobs"] = ("float32", learnt["prev_logprobs"].tolist()) if "prev_logprobs" in learnt else None
    return json.loads(json.dumps({"step": step, **row, **arrays, "group": group}, sort_keys=True))


@pytest.mark.parametrize("prev", [False, True])
@pytest.mark.parametrize("tokens", [1, 6, 1000])
def test_every_field_survives(tokens: int, prev: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_files, "ROW_GROUP_TOKENS", tokens)
    write_rollouts(
        locate_rollouts_file(tmp_path, 7),
        [(0, with_learnt(*ROWS[:2], prev=prev)), (5, with_learnt(*ROWS[2:], prev=prev))],
    )
    expected_rows = [
        make_expected_row(7, group, trajectory, prev) for group, trajectory in zip([0, 0, 5, 5], ROWS, strict=True)
    ]
    assert str([plain(row) for row in read_rollouts(tmp_path, 7)]) == str(expected_rows)


def test_a_row_keeps_images_and_has_no_entry_without_any() -> None:
    images = [StoredImage("9f86d081884c7d65", 6, 8)]
    row = json.loads(json.dumps(replace(ROWS[0], images=images).to_saved_row()))
    assert Trajectory.from_row(row).images == images
    assert "images" not in ROWS[0].to_saved_row()


def test_a_file_keeps_images(tmp_path: Path) -> None:
    images = [StoredImage("9f86d081" * 8, 6, 8), StoredImage("0" * 64, 2, 2)]
    write_rollouts(locate_rollouts_file(tmp_path, 1), [(0, with_learnt(replace(ROWS[0], images=images), ROWS[1]))])
    rows = list(read_rollouts(tmp_path, 1))
    assert [Trajectory.from_row(row).images for row in rows] == [images, []]
    assert "images" not in rows[1]


def test_rollouts_of_a_step_that_failed_before_it_had_advantages(tmp_path: Path) -> None:
    write_rollouts(locate_rollouts_file(tmp_path, 3), [(0, [(trajectory, {}) for trajectory in ROWS])])
    rows = list(read_rollouts(tmp_path, 3))
    assert [row["advantages"] for row in rows] == [None] * len(ROWS)
    assert [row["token_ids"].tolist() for row in rows] == [trajectory.token_ids.tolist() for trajectory in ROWS]


def test_a_file_without_engines_is_read(tmp_path: Path) -> None:
    file = locate_rollouts_file(tmp_path, 1)
    write_rollouts(
        file, [(0, with_learnt(*(replace(trajectory, engine=number) for number, trajectory in enumerate(ROWS))))]
    )
    assert [row["engine"] for row in read_rollouts(tmp_path, 1)] == list(range(len(ROWS)))
    pq.write_table(
        pq.read_table(file).drop_columns(["engine", "prompt", "answer", "columns", "images", "segment_images"]), file
    )
    assert [row["group"] for row in read_rollouts(tmp_path, 1)] == [0] * len(ROWS)
    assert [Trajectory.from_row(row).prompt for row in read_rollouts(tmp_path, 1)] == [""] * len(ROWS)
    assert Trajectory.from_row({**ROWS[0].to_row(), "engine": 1}).engine == 1


def test_the_file_is_compressed_and_has_typed_columns(tmp_path: Path) -> None:
    file = locate_rollouts_file(tmp_path, 1)
    write_rollouts(file, [(0, with_learnt(*ROWS))])
    metadata = pq.ParquetFile(file).metadata
    columns = [metadata.row_group(0).column(index) for index in range(metadata.num_columns)]
    assert {column.compression for column in columns} == {"ZSTD"}
    types = {column.path_in_schema.split(".")[0]: column.physical_type for column in columns}
    assert (types["token_ids"], types["logprobs"], types["reward"]) == ("INT32", "FLOAT", "DOUBLE")


def test_steps_come_in_their_order(tmp_path: Path) -> None:
    for step in (10, 2):
        write_rollouts(locate_rollouts_file(tmp_path, step), [(0, with_learnt(*ROWS[:1]))])
    assert [row["step"] for row in observability.read_rollouts(tmp_path)] == [2, 10]


def test_what_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    write_rollouts(locate_rollouts_file(tmp_path, 1), [(0, with_learnt(*ROWS))])
    with pytest.raises(FileNotFoundError, match="no rollouts of step 2"):
        read_rollouts(tmp_path, 2)
    with pytest.raises(FileNotFoundError, match="has no rollouts"):
        read_rollouts(tmp_path / "no_run")


def test_a_file_that_is_not_complete_does_not_appear(tmp_path: Path) -> None:
    def interrupted() -> Any:
        yield 0, with_learnt(*ROWS)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_rollouts(locate_rollouts_file(tmp_path, 1), interrupted())
    with pytest.raises(FileNotFoundError):
        read_rollouts(tmp_path)


def test_a_run_that_resumes_drops_what_came_after(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_rollouts(locate_rollouts_file(tmp_path, step), [(0, with_learnt(*ROWS))])
        for kind in ("validation", "rows"):
            write_rollouts(locate_rollouts_file(tmp_path, step, kind), [(0, with_learnt(*ROWS))])
    folder = tmp_path / "rollouts"
    (folder / ".step_3.parquet").touch()
    drop_rollouts_after(tmp_path, 1)
    assert [file.name for file in folder.iterdir()] == ["step_1.parquet"]
    for kind in ("validation", "rows"):
        assert {row["step"] for row in read_rollouts(tmp_path, kind=kind)} == {1}
    drop_rollouts_after(tmp_path / "no_run", 1)


FIGURES = StepFigures(
    loss=1 / 3,
    grad_norm=2.5,
    learning_rate=1e-6,
    tensors=[
        TensorFigure("weight", 0, "model.norm.weight", 1 / 7, [0.1, -0.2]),
        TensorFigure("gradient", 1, "lm_head.weight", 0.0, [0.0, 0.0]),
    ],
    states=[StateFigure("layers.0.mlp", 12, [0.5, -0.25]), StateFigure("norm", 3, [1.0])],
    config={"policy": {"precision": "float32"}},
    device="cpu",
)


def test_every_figure_survives(tmp_path: Path) -> None:
    file = locate_figures_file(tmp_path, 7)
    assert read_figures(file) is None
    write_figures(file, FIGURES)
    assert read_figures(file) == FIGURES
    assert [entry.name for entry in file.parent.iterdir()] == ["step_7.parquet"]
    assert FIGURES.versions["torch"], "versions of the libraries are recorded"
    write_figures(file, replace(FIGURES, tensors=[]))
    assert read_figures(file) == replace(FIGURES, tensors=[])


def test_a_file_of_an_earlier_version_has_no_hidden_states(tmp_path: Path) -> None:
    file = locate_figures_file(tmp_path, 7)
    write_figures(file, replace(FIGURES, states=[]))
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["token"]), file)
    assert read_figures(file) == replace(FIGURES, states=[])


def write_table(file: Path, metadata: dict[str, Any], **columns: list[Any]) -> None:
    plain = {
        "kind": ["weight"],
        "optimizer_step": [0],
        "name": ["w"],
        "norm": [1.0],
        "token": [None],
        "sketch": [[0.0]],
    }
    write_figures(file, FIGURES)
    schema = pq.read_schema(file).with_metadata({b"megatron_grpo.replay": json.dumps(metadata).encode()})
    names = {name: values for name, values in {**plain, **columns}.items() if values}
    types = [
        schema.field(name) if name not in columns else pa.field(name, pa.array(columns[name]).type) for name in names
    ]
    pq.write_table(pa.table(names, schema=pa.schema(types, metadata=schema.metadata)), file)


METADATA = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "config": {}, "device": "cpu", "versions": {}}


@pytest.mark.parametrize(
    ("metadata", "columns", "text"),
    [
        ({"config": "x"}, {}, "config"),
        ({"config": [1]}, {}, "config"),
        ({"loss": "x"}, {}, "loss"),
        ({"versions": {"torch": [1]}}, {}, "versions"),
        ({"config": json.loads("[" * 300 + "]" * 300)}, {}, "more than 100 levels"),
        ({}, {"kind": ["state"]}, "kind"),
        ({}, {"norm": ["1"]}, "its column norm is string, not double"),
        ({}, {"sketch": [["0"]]}, "its column sketch is list"),
        ({}, {"name": []}, "it has no column name"),
        ({}, {"kind": ["hidden state"]}, "token"),
    ],
)
def test_a_forged_file_is_refused(
    metadata: dict[str, Any], columns: dict[str, list[Any]], text: str, tmp_path: Path
) -> None:
    file = locate_figures_file(tmp_path, 7)
    write_table(file, METADATA)
    assert read_figures(file) is not None
    write_table(file, METADATA | metadata, **columns)
    with pytest.raises(ValueError, match=rf"step_7\.parquet is damaged, or was written by another version: .*{text}"):
        read_figures(file)


def test_more_figures_than_a_run_writes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = locate_figures_file(tmp_path, 7)
    write_figures(file, FIGURES)
    monkeypatch.setattr(replay_files, "_MOST_ROWS", 3)
    with pytest.raises(ValueError, match="it has 4 rows, and at most 3 are read"):
        read_figures(file)


def test_the_watched_tokens_are_different_tokens_of_the_step() -> None:
    assert choose_watched_tokens(5).tolist() == [0, 1, 2, 3, 4]
    watched = choose_watched_tokens(2_000_000).tolist()
    assert len(watched) == len(set(watched)) == 32
    assert watched == sorted(watched) == choose_watched_tokens(2_000_000).tolist()
    assert watched[0] < 500_000 < 1_500_000 < watched[-1] < 2_000_000


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    file = locate_figures_file(tmp_path, 7)
    write_figures(file, FIGURES)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"step_7.parquet is damaged, or was written by another version"):
        read_figures(file)


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
    write_rollouts(file, [(number, with_learnt(*group)) for number, group in enumerate(rows)], record.to_metadata())
    return file


def test_what_is_recorded_is_read_again(tmp_path: Path) -> None:
    record = make_record(make_facts(dropped=DROPPED, carried=1, dynamic_sampling={"dynamic_sampling_gen_batches": 2.0}))
    file = write(tmp_path, record)
    facts, groups = read_recorded_rollouts(file)
    assert facts == record.step
    assert plain_groups(groups) == plain_groups(GROUPS)
    outcomes, expected = ([trajectory.outcome for group in part for trajectory in group] for part in (groups, GROUPS))
    assert outcomes == expected
    summary = examine_file(file)
    assert (summary.record, summary.rollouts, summary.largest_token) == (record, 4, 4)


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
    long = [[make_trajectory(5000, token_ids=[7 * position % 5003 for position in range(5001)])]]
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


FIRST = EngineCounts(
    running=8, waiting=0, kv_cache_usage=0.25, prefix_tokens=100, prefix_hits=75, tokens=300, busy_s=2.0
)
SECOND = EngineCounts(
    running=4, waiting=3, kv_cache_usage=0.5, prefix_tokens=300, prefix_hits=25, tokens=100, busy_s=1.0
)


def test_figures_of_two_engines() -> None:
    assert compute_engine_metrics([FIRST, SECOND]) == {
        "engine_running": 8.0,
        "engine_waiting": 3.0,
        "engine_kv_cache_usage": 0.5,
        "engine_tokens_per_s": 125.0,
        "engine_prefix_hit_rate": 0.25,
    }


def test_two_periods_of_an_engine() -> None:
    assert (
        EngineCounts(
            running=8, waiting=3, kv_cache_usage=0.5, prefix_tokens=400, prefix_hits=100, tokens=400, busy_s=3.0
        )
        == FIRST + SECOND
    )


def test_an_engine_that_did_nothing_has_no_speed_and_nothing_without_a_lookup_a_rate() -> None:
    assert compute_engine_metrics([FIRST, EngineCounts()])["engine_tokens_per_s"] == 150.0
    assert compute_engine_metrics([EngineCounts()]) == {
        "engine_running": 0.0,
        "engine_waiting": 0.0,
        "engine_kv_cache_usage": 0.0,
    }


def test_proposed_tokens_and_documentation() -> None:
    figures = compute_engine_metrics([EngineCounts(drafted=8, accepted=2), FIRST])
    assert figures["engine_draft_acceptance_rate"] == 0.25
    assert undocumented(figures) == set()
