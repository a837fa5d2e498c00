"""Datasets of a script reach the run's folder only when the run may start; a refused start leaves nothing."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Image, Value

import megatron_grpo
from megatron_grpo import api
from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.data.sources import open_source
from megatron_grpo.run.directory import lock_run_directory, record_start

ROWS = [{"prompt": f"{a}+{b}=", "answer": f"{a + b:03d}"} for a in range(10, 18) for b in range(10, 18)]
OTHER = [{"prompt": f"{a}+{b}=", "answer": f"{a + b:03d}"} for a in range(50, 58) for b in range(10, 18)]


def yield_rows(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield from rows


FORMS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "list": list,
    "generator": yield_rows,
    "dataset": Dataset.from_list,
    "stream": lambda rows: Dataset.from_list(rows).to_iterable_dataset(),
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Configurations of the runs that would have started; each records its start as a run does."""
    configs: list[Config] = []

    def start(config: Config, *_: Any) -> None:
        with lock_run_directory(config.run_dir) as folder:
            record_start(folder, config)
        configs.append(config)

    monkeypatch.setattr(api, "run_algorithm", start)
    return configs


def train(folder: Path, rows: Any, *overrides: str, **arguments: Any) -> None:
    settings = ["+exp=quickstart", f"run_dir={folder}", "checkpointing=none", *overrides]
    megatron_grpo.train(settings, train_dataset=rows, **arguments)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Inode and content of every file in a folder but the lock, by its path."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path): (path.stat().st_ino, path.read_bytes()) for path in files}


@pytest.mark.parametrize("form", ["list", "dataset"])
def test_a_live_run_keeps_its_rows(started: list[Config], tmp_path: Path, form: str) -> None:
    folder = tmp_path / "run"
    train(folder, FORMS[form](ROWS), val_dataset=ROWS[:8])
    before = contents(tmp_path)
    assert any(name.startswith(f"{folder}/data/train.") for name in before)
    with lock_run_directory(str(folder)), pytest.raises(ConfigError, match="is in use by another run that is still"):
        train(folder, FORMS[form](OTHER), val_dataset=OTHER[:8])
    assert contents(tmp_path) == before
    assert len(started) == 1


def test_a_run_that_begins_while_the_rows_are_checked_keeps_its_own(
    started: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    for module in ("megatron_grpo.run.user_objects", "megatron_grpo.preflight.machine_checks"):
        monkeypatch.setattr(f"{module}.is_in_use", lambda _: False)
    with lock_run_directory(str(folder)):
        (folder / "data").mkdir()
        (folder / "data" / "train.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
        before = contents(tmp_path)
        with pytest.raises(RunError, match="is in use by another run"):
            train(folder, OTHER)
        assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("form", "again"), [("list", "generator"), ("dataset", "dataset"), ("list", "dataset"), ("stream", "stream")]
)
def test_a_resume_with_the_same_rows_keeps_the_file(
    started: list[Config], tmp_path: Path, form: str, again: str
) -> None:
    train(tmp_path / "run", FORMS[form](ROWS), val_dataset={"easy": ROWS[:8]})
    before = contents(tmp_path / "run" / "data")
    train(tmp_path / "run", FORMS[again](ROWS), val_dataset={"easy": ROWS[:8]})
    assert contents(tmp_path / "run" / "data") == before
    first, second = started
    assert (first.data.train_path, first.data.val_sets) == (second.data.train_path, second.data.val_sets)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "latest"}


def test_a_file_that_another_version_of_arrow_wrote_is_kept(started: list[Config], tmp_path: Path) -> None:
    train(tmp_path / "run", Dataset.from_list(ROWS))
    file = tmp_path / "run" / "data" / "train.parquet"
    pq.write_table(pq.read_table(file), file, row_group_size=7, compression="gzip")
    (tmp_path / "run" / "data.json").unlink()
    before = contents(tmp_path / "run" / "data")
    train(tmp_path / "run", Dataset.from_list(ROWS))
    assert contents(tmp_path / "run" / "data") == before


@pytest.mark.parametrize(("form", "digests"), [("generator", True), ("list", False), ("dataset", False)])
def test_other_rows_are_another_run(started: list[Config], tmp_path: Path, form: str, digests: bool) -> None:
    train(tmp_path / "run", FORMS[form](ROWS))
    if not digests:
        (tmp_path / "run" / "data.json").unlink()
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"holds another run: train_dataset has other rows .*choose another run_dir"):
        train(tmp_path / "run", FORMS[form](OTHER))
    assert contents(tmp_path) == before


def test_rows_of_a_start_that_came_to_nothing_are_replaced(
    started: list[Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RunError("Ray does not start")

    with monkeypatch.context() as patched:
        patched.setattr(api, "run_algorithm", fail)
        with pytest.raises(RunError):
            train(tmp_path / "run", ROWS)
    train(tmp_path / "run", OTHER)
    (config,) = started
    assert [json.loads(line) for line in Path(config.data.train_path).read_text().splitlines()] == OTHER


@pytest.mark.parametrize(
    ("overrides", "arguments", "message"),
    [
        (["grpo.max_num_step=3"], {}, "did you mean grpo.max_num_steps"),
        (["data.prompt_key=question"], {}, r"train_dataset +has no column 'question'"),
        ([], {"val_dataset": [{"prompt": "1", "answer": {3}}]}, "cannot be kept as JSON"),
        ([], {"val_dataset": {"a b": ROWS}}, "cannot be the NAME"),
        (["generation.parallel.tensor=3"], {}, "problem"),
    ],
)
def test_a_refused_start_leaves_no_folder(
    started: list[Config], tmp_path: Path, overrides: list[str], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(tmp_path / "a" / "run", ROWS, *overrides, **arguments)
    assert list(tmp_path.iterdir()) == []
    assert started == []


def test_media_in_a_dataset_are_kept_without_decoding(started: list[Config], tmp_path: Path) -> None:
    features = Features({"prompt": Value("string"), "answer": Value("string"), "image": Image()})
    columns = [{**row, "image": {"bytes": b"not an image", "path": None}} for row in ROWS]
    rows = Dataset(pa.Table.from_pylist(columns, schema=features.arrow_schema))
    train(tmp_path / "run", rows)
    assert started[0].data.train_path == str(tmp_path / "run" / "data" / "train.parquet")
    with pytest.raises(
        ConfigError, match=r"train_dataset\[0\] +cannot be kept as JSON: .*; give .*a datasets\.Dataset"
    ):
        train(tmp_path / "other", rows.to_iterable_dataset())
    assert not (tmp_path / "other").exists()


def test_null_filled_messages_of_a_script_are_those_that_were_written(
    started: list[Config], tmp_path: Path, model: Path
) -> None:
    (model / "chat_template.jinja").touch()
    kinds = [
        ({"role": "user", "content": "1+1="}, {"a": 1}),
        ({"role": "user", "content": "2", "name": "Ann"}, {"b": 2}),
    ]
    rows = [{"prompt": [turn], "answer": "2", "extra": extra} for turn, extra in kinds * 32]
    for form in FORMS:
        settings = [f"policy.model.path={model}", f"run_dir={tmp_path / form}"]
        megatron_grpo.train(settings, train_dataset=FORMS[form](rows))
        source = open_source(DatasetConfig(path=started[-1].data.train_path))
        assert list(source.read_all()) == rows


def test_an_interrupted_or_failing_script_leaves_no_folder(started: list[Config], tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield ROWS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "a" / "run", rows())
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_is_refused_late_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Config, *_: Any) -> None:
        assert Path(config.data.train_path).is_file()
        raise ConfigError([Problem("rewards", "cannot be imported")])

    monkeypatch.setattr(api, "run_algorithm", refuse)
    with pytest.raises(ConfigError, match="cannot be imported"):
        train(tmp_path / "a" / "run", ROWS)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match="cannot be imported"):
        train(tmp_path / "b", ROWS)
    assert (tmp_path / "b").is_dir(), "it was there before"


def test_the_folder_is_its_users_alone(started: list[Config], tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        train(tmp_path / "run", ROWS)
    finally:
        os.umask(before)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_bad_rows_are_named_by_the_argument(started: list[Config], tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "1", "answer": None}]
    for form in ("list", "dataset"):
        with pytest.raises(ConfigError, match=r"train_dataset\[64\] +column 'answer' .* is null") as raised:
            train(tmp_path / "run", FORMS[form](rows))
        assert str(tmp_path) not in str(raised.value)


def test_the_errors_of_a_script_have_the_documented_names() -> None:
    assert megatron_grpo.ConfigError is ConfigError
    assert megatron_grpo.RunError is RunError
    assert {"ConfigError", "RunError"} <= set(megatron_grpo.__all__)
