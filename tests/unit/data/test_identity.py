"""The identity of data is its content: a new path to it changes nothing, and new rows under the old path do."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from megatron_grpo.config.data_schema import DataConfig, DatasetConfig, EnvironmentConfig
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.schema import Config
from megatron_grpo.data.identity import identify
from megatron_grpo.data.loader import StreamLoader
from megatron_grpo.data.rows import digest_file
from megatron_grpo.run.checkpoints import Checkpointer, find_start_checkpoint
from megatron_grpo.run.directory import DATA_FILE, compare_with_last_start, record_start

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]
OTHER = [{"prompt": f"{n}-{n}=", "answer": "0"} for n in range(8)]
FILES = ["rows.jsonl", "rows.parquet", "rows.csv", "saved", "splits", "folder"]


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    if path.is_dir():
        shutil.rmtree(path)
    table = Dataset.from_list(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".jsonl":
        path.write_text(lines)
    elif path.suffix == ".parquet":
        table.to_parquet(str(path))
    elif path.suffix == ".csv":
        table.to_csv(str(path))
    elif path.name == "saved":
        table.save_to_disk(str(path))
    elif path.name == "splits":
        DatasetDict({"train": table, "test": Dataset.from_list(OTHER)}).save_to_disk(str(path))
    else:
        path.mkdir()
        (path / "train.jsonl").write_text(lines)
    return path


def config_of(path: Path | str, **data: Any) -> Config:
    return Config(data=DataConfig(train_path=str(path), **data), env={"math": EnvironmentConfig()})


def config_of_sets(*sets: DatasetConfig, **data: Any) -> Config:
    named = {f"set_{number}": dataset for number, dataset in enumerate(sets)}
    return Config(data=DataConfig(train_sets=named, **data), env={"math": EnvironmentConfig()})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "run"
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("name", FILES)
def test_new_rows_under_the_old_path_are_refused(tmp_path: Path, run_dir: Path, name: str) -> None:
    path = write(tmp_path / name)
    record_start(run_dir, config_of(path))
    assert compare_with_last_start(run_dir, config_of(path)) == []
    write(path, OTHER)
    with pytest.raises(ConfigError, match=r"holds another run: data\.train_path=.* has other rows: 8 rows, digest"):
        compare_with_last_start(run_dir, config_of(path))
    with pytest.raises(ConfigError, match="holds another run"):
        record_start(run_dir, config_of(path))
    write(path)
    assert compare_with_last_start(run_dir, config_of(path)) == [], "it is back as it was"


@pytest.mark.parametrize("name", FILES)
def test_a_new_path_to_the_same_rows_is_the_same_data(
    tmp_path: Path, run_dir: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / name)
    record_start(run_dir, config_of(path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "elsewhere").mkdir()
    copy = tmp_path / "elsewhere" / name
    (shutil.copytree if path.is_dir() else shutil.copy)(path, copy)
    for other_name in (name, f"./{name}", *(["link"] if path.is_dir() or path.suffix == ".jsonl" else []), copy):
        changes = compare_with_last_start(run_dir, config_of(other_name))
        assert changes == [f"data.train_path: {path} -> {other_name}"]
    os.rename(path, tmp_path / f"moved_{name}")
    compare_with_last_start(run_dir, config_of(tmp_path / f"moved_{name}"))


def test_the_digest_is_of_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "x" * 9_999_000, "answer": "1"}, {"prompt": "y" * 100, "answer": "2"}]
    write(path, rows)
    before = digest_file(str(path))
    content = path.read_bytes()
    digests = {before}
    for offset in (20, len(content) // 2, 2**23, len(content) - 5):
        path.write_bytes(content[:offset] + b"z" + content[offset + 1 :])
        digests.add(digest_file(str(path)))
    assert len(digests) == 5
    path.write_bytes(content)
    assert digest_file(str(path)) == before


def test_a_file_of_the_same_size_and_time_is_another(tmp_path: Path, run_dir: Path) -> None:
    path = write(tmp_path / "rows.jsonl")
    record_start(run_dir, config_of(path))
    status = path.stat()
    path.unlink()
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS).replace("7+7", "9+9"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    if path.stat().st_ino == status.st_ino:
        pytest.skip("the file system gave the inode to the new file, so this process takes it for the old one")
    with pytest.raises(ConfigError, match="has other rows"):
        compare_with_last_start(run_dir, config_of(path))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a, b: config_of_sets(b, a), "data.train_sets.set_0.path=.* has other rows"),
        (lambda a, b: config_of_sets(a), "has 1 training set, and had 2"),
        (
            lambda a, b: config_of_sets(a, DatasetConfig(path=b.path, weight=2.0)),
            "the weight of .*set_1.* is 2, and was 1",
        ),
        (lambda a, b: config_of_sets(a, b, shuffle=False), "data.shuffle is false, and was true"),
    ],
    ids=["order", "sets", "weight", "shuffle"],
)
def test_sets_and_their_order_and_weights_are_compared(
    tmp_path: Path, run_dir: Path, change: Callable[[DatasetConfig, DatasetConfig], Config], reason: str
) -> None:
    first = DatasetConfig(path=str(write(tmp_path / "a.jsonl")))
    second = DatasetConfig(path=str(write(tmp_path / "b.jsonl", OTHER)))
    record_start(run_dir, config_of_sets(first, second))
    with pytest.raises(ConfigError, match=reason):
        compare_with_last_start(run_dir, change(first, second))
    renamed = Config(data=DataConfig(train_sets={"x": first, "y": second}), env={"math": EnvironmentConfig()})
    compare_with_last_start(run_dir, renamed)


def test_one_set_is_the_same_as_a_path(tmp_path: Path, run_dir: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    record_start(run_dir, config_of(path))
    compare_with_last_start(run_dir, config_of_sets(DatasetConfig(path=str(path))))


def test_rows_that_become_usable_are_other_data(tmp_path: Path, run_dir: Path) -> None:
    rows = [*ROWS, {"prompt": "a", "answer": None, "solution": "3"}]
    rows = [{"solution": "1", **row} for row in rows]
    path = write(tmp_path / "a.jsonl", rows)
    record_start(run_dir, config_of(path, bad_rows="skip"))
    with pytest.raises(ConfigError, match=r"are others than when it began \(data.bad_rows, data.processor"):
        compare_with_last_start(run_dir, config_of(path, bad_rows="skip", answer_key="solution"))


def test_changed_validation_rows_are_remarked_on(tmp_path: Path, run_dir: Path) -> None:
    path, held_out = write(tmp_path / "a.jsonl"), write(tmp_path / "b.jsonl", OTHER)
    config = config_of(path, val_path=str(held_out))
    record_start(run_dir, config)
    write(held_out, ROWS[:4])
    (remark,) = compare_with_last_start(run_dir, config)
    assert remark.startswith(f"data.val_path={held_out} has other rows: 4 rows, digest")
    assert "before 8 rows, digest" in remark
    assert "cannot be compared" in remark
    record_start(run_dir, config)
    assert compare_with_last_start(run_dir, config) == []


def test_a_run_without_digests_goes_on_with_a_remark(tmp_path: Path, run_dir: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    record_start(run_dir, config_of(path))
    (run_dir / DATA_FILE).unlink()
    (remark,) = compare_with_last_start(run_dir, config_of(path))
    assert remark == f"{run_dir / DATA_FILE} is missing: whether the data is that of the earlier start is not known"
    (tmp_path / "link.jsonl").symlink_to(path)
    assert remark in compare_with_last_start(run_dir, config_of(tmp_path / "link.jsonl"))
    with pytest.raises(ConfigError, match=r"its data\.train_path is .*a\.jsonl, this one's is .*b\.jsonl"):
        compare_with_last_start(run_dir, config_of(write(tmp_path / "b.jsonl")))


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"training": 3}', b"\xff", b"[" * 99999])
def test_a_damaged_identity_is_told(tmp_path: Path, run_dir: Path, content: bytes) -> None:
    path = write(tmp_path / "a.jsonl")
    record_start(run_dir, config_of(path))
    (run_dir / DATA_FILE).write_bytes(content)
    with pytest.raises(ConfigError, match=r"data\.json is damaged: .*; put it back, choose another run_dir, or delete"):
        compare_with_last_start(run_dir, config_of(path))


def test_a_checkpoint_of_a_run_on_other_data_is_refused(tmp_path: Path, run_dir: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    record_start(run_dir, config_of(path))
    checkpoint = run_dir / "checkpoints" / "step_1"
    config = config_of(write(tmp_path / "b.jsonl", OTHER))
    config.checkpointing.resume = str(checkpoint)

    class Chosen(Checkpointer):
        def find_start(self, stop: Any = None, read_contents: Any = None) -> Path | None:
            return checkpoint

    def start(config: Config) -> Path | None:
        return find_start_checkpoint(Chosen(tmp_path / "new", config.checkpointing, look_only=True), config)

    with pytest.raises(ConfigError, match=r"step_1 has a position in other data: .*has other rows.* export it"):
        start(config)
    same_config = config_of(write(tmp_path / "c.jsonl"))
    same_config.checkpointing.resume = str(checkpoint)
    assert start(same_config) == checkpoint


def test_rows_of_a_folder_have_one_digest_in_every_form(tmp_path: Path) -> None:
    digests = set()
    for name in ("saved", "splits", "folder"):
        (identity,) = identify(config_of(write(tmp_path / name))).training.values()
        digests.add(identity.digest)
        assert identity.rows == 8
    assert len(digests) == 1


class Stream:
    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


def test_a_stream_that_begins_otherwise_is_other_data() -> None:
    def loader(rows: list[dict[str, Any]], split: str = "train") -> StreamLoader:
        process: Any = None
        return StreamLoader(
            Stream(rows),
            config=DatasetConfig(path="a/b", split=split),
            data=DataConfig(),
            environments={"math": "math"},
            prompts=process,
            prompts_per_batch=2,
            seed=1,
        )

    state = json.loads(json.dumps(loader(ROWS).state_dict()))
    loader(ROWS).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"data\.train_path=a/b +the checkpoint .* other data: its first rows differ"):
        loader(OTHER).load_state_dict(state)
    with pytest.raises(ConfigError, match="its split was train"):
        loader(ROWS, "test").load_state_dict(state)
    earlier = {name: state[name] for name in ("epoch", "left_out", "drawn", "stream")}
    loader(OTHER).load_state_dict(earlier)
