"""Files from elsewhere that would run code if somebody let them: models, tokenizers, rows, recordings, resumes."""

import json
import os
import pickle
import tarfile
from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch

from megatron_grpo.batch.rollout_files import (
    examine_file,
    locate_rollouts_file,
    read_recorded_rollouts,
    read_rows,
    write_rollouts,
)
from megatron_grpo.config.data_schema import DatasetConfig, RewardModelConfig
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.data.sources import SourceError, open_source
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.environments.reward_model import RewardModel, find_model_problem
from megatron_grpo.run.checkpoint_files import LOADER_FILE, CheckpointError, read_loader_state
from tests.support.trajectories import make_trajectory, with_learnt


class Canary:
    """An object whose unpickling makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path / "canary")


@pytest.fixture(autouse=True)
def consenting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody at the terminal says yes to everything."""
    monkeypatch.setattr("builtins.input", lambda _="": "y")


def name_module(folder: Path, canary: Canary) -> None:
    """Write a module of a model with its own code, which makes the folder when it is imported."""
    folder.mkdir(exist_ok=True)
    code = f"import os\nos.mkdir({str(canary.folder)!r})\nclass Mine: pass\n"
    (folder / "mine.py").write_text(code)


def test_the_canary_sings(canary: Canary) -> None:
    """Otherwise the tests below show nothing."""
    pickle.loads(pickle.dumps(canary))
    assert canary.folder.is_dir()


@pytest.mark.parametrize("model_type", ["qwen3", "mine"])
def test_a_tokenizer_runs_no_code_of_its_folder(tmp_path: Path, canary: Canary, model_type: str) -> None:
    folder = tmp_path / "model"
    name_module(folder, canary)
    auto_map = {"AutoConfig": "mine.Mine", "AutoTokenizer": ["mine.Mine", "mine.Mine"]}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "auto_map": auto_map}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Mine", "auto_map": auto_map}))
    with suppress(RunError, OSError, ValueError):
        load_tokenizer(folder)
    assert not canary.folder.exists()


@pytest.mark.parametrize("kind", ["code", "pickle"])
def test_a_reward_model_runs_no_code_of_its_folder(tmp_path: Path, canary: Canary, kind: str) -> None:
    folder = tmp_path / "model"
    name_module(folder, canary)
    auto_map = {"AutoConfig": "mine.Mine", "AutoModelForSequenceClassification": "mine.Mine"}
    config = {"architectures": ["MineForSequenceClassification"], "num_labels": 1, "model_type": "mine"}
    small = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    if kind == "pickle":
        config |= {"model_type": "qwen2", "num_attention_heads": 2, "num_key_value_heads": 2, **small}
        torch.save({"score.weight": canary}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto_map}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    assert find_model_problem(str(folder)) is None
    with pytest.raises((RunError, OSError, ValueError, pickle.UnpicklingError)):
        RewardModel(str(folder), RewardModelConfig(), 0)
    assert not canary.folder.exists()


def extension(canary: Canary) -> pa.Schema:
    """Columns of an extension type whose description is a pickle, as old versions of pyarrow read it."""
    names = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": pickle.dumps(canary)}
    return pa.schema([pa.field("prompt", pa.string(), metadata=names), pa.field("answer", pa.string())])


def parquet(path: Path, canary: Canary) -> Path:
    file = path.with_suffix(".parquet")
    pyarrow.parquet.write_table(pa.table({"prompt": ["1+1="], "answer": ["2"]}, schema=extension(canary)), file)
    return file


def arrow(path: Path, canary: Canary) -> Path:
    file = path.with_suffix(".arrow")
    schema = extension(canary)
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(pa.table({"prompt": ["1+1="], "answer": ["2"]}, schema=schema))
    return file


def script(path: Path, canary: Canary) -> Path:
    """A folder with a loading script of its own name."""
    name_module(path, canary)
    (path / "mine.py").rename(path / f"{path.name}.py")
    return path


def pandas(path: Path, canary: Canary) -> Path:
    path.mkdir()
    (path / "rows.pkl").write_bytes(pickle.dumps(canary))
    return path


def webdataset(path: Path, canary: Canary) -> Path:
    path.mkdir()
    with tarfile.open(path / "rows.tar", "w") as archive:
        for name in ("0.pickle", "0.pyd", "0.pth", "0.npy", "0.npz"):
            content = pickle.dumps(canary)
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, BytesIO(content))
    return path


@pytest.mark.parametrize("forge", [parquet, arrow, script, pandas, webdataset], ids=lambda forge: forge.__name__)
def test_rows_run_no_code(
    tmp_path: Path, canary: Canary, forge: Callable[[Path, Canary], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    with suppress(SourceError, ConfigError):
        source = open_source(DatasetConfig(path=str(forge(tmp_path / "rows", canary))))
        assert len(source) == 1
        assert source[0]
    assert not canary.folder.exists()


def test_recorded_rollouts_run_no_code(tmp_path: Path, canary: Canary) -> None:
    file = locate_rollouts_file(tmp_path, 1)
    write_rollouts(file, [(0, with_learnt(make_trajectory(2), make_trajectory(3)))])
    table = pyarrow.parquet.read_table(file)
    names = extension(canary).field("prompt").metadata
    forged = table.schema.set(0, table.schema.field(0).with_metadata(names)).with_metadata(
        {b"step": pickle.dumps(canary)}
    )
    pyarrow.parquet.write_table(table.cast(forged), file)
    for read in (lambda: list(read_rows(1, file)), lambda: examine_file(file), lambda: read_recorded_rollouts(file)):
        with suppress(RunError, ConfigError, ValueError):
            read()
    assert not canary.folder.exists()


def test_the_loader_of_a_resume_runs_no_code(tmp_path: Path, canary: Canary) -> None:
    torch.save({"epoch": 0, "position": canary}, tmp_path / LOADER_FILE)
    with pytest.raises(CheckpointError, match=r"cannot be loaded"):
        read_loader_state(tmp_path)
    assert not canary.folder.exists()
