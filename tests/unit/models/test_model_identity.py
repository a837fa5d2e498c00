"""The identity of a model is its content: another path to it changes nothing, other weights under its path do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_grpo.config.data_schema import DataConfig, EnvironmentConfig
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.policy_schema import ModelConfig, PolicyConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.source import compute_model_digest
from megatron_grpo.run.directory import compare_with_last_start, record_start


def config_of(model: Path, data: Path) -> Config:
    policy = PolicyConfig(model=ModelConfig(path=str(model)))
    return Config(policy=policy, data=DataConfig(train_path=str(data)), env={"math": EnvironmentConfig()})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two files of weights, one of them of more than the parts that are read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}, indent=2))
    (folder / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(1)
    save_file({"a": torch.randn(600_000, generator=generator)}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": torch.randn(10, generator=generator)}, folder / "model-00002-of-00002.safetensors")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    return file


def train_further(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    save_file({name: tensor + 1e-3 for name, tensor in load_file(file).items()}, file)


def change_the_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {}}')


def change_a_setting(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8, "rope_theta": 5.0}))


@pytest.mark.parametrize("change", [train_further, change_the_vocabulary, change_a_setting])
def test_another_model_under_the_same_path_is_refused(
    model: Path, data: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    record_start(run_dir, config_of(model, data))
    assert compare_with_last_start(run_dir, config_of(model, data)) == []
    change(model)
    with pytest.raises(ConfigError, match=r"holds another run: policy\.model\.path=\S+ is another model"):
        compare_with_last_start(run_dir, config_of(model, data))


def test_the_same_model_under_another_path_is_the_same(model: Path, data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    record_start(run_dir, config_of(model, data))
    moved = shutil.move(model, tmp_path / "moved")
    (Path(moved) / "config.json").write_text(json.dumps({"hidden_size": 8, "model_type": "llama"}))  # the same content
    (Path(moved) / "chat_template.jinja").write_text("{{ messages }}")
    (line,) = compare_with_last_start(run_dir, config_of(Path(moved), data))
    assert line.startswith("policy.model.path: ")


def test_a_folder_without_weights_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert compute_model_digest(tmp_path) is None
    assert compute_model_digest(tmp_path / "nowhere") is None
