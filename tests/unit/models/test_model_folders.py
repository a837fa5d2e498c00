"""A model's folder: where it is, its identity and vocabulary, and checkpoints in its place."""

import asyncio
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from megatron_grpo.config.data_schema import DataConfig, EnvironmentConfig
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.policy_schema import ModelConfig, PolicyConfig
from megatron_grpo.config.schema import Config, GenerationConfig
from megatron_grpo.generation.engine import VllmEngine
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.models import source
from megatron_grpo.models.source import (
    PREPARED_MODELS,
    compute_model_digest,
    compute_vocabulary_digest,
    fetch_model_folder,
    find_local_folder,
    require_folder,
)
from megatron_grpo.preflight.model_file_checks import explain_unusable_model
from megatron_grpo.run.directory import compare_with_last_start, record_start
from megatron_grpo.trainer.actor import RankActor, RankSettings


def test_a_folder_with_a_model_is_enough(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    require_folder(str(tmp_path))


def test_ranks_and_engines_of_a_machine_without_the_folder_name_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a rank changes it
    monkeypatch.setattr("ray.get_gpu_ids", list)
    monkeypatch.setattr(RankActor, "import_packages", lambda _: None)
    shape: Any = None
    rank = RankSettings(config=Config().policy, shape=shape, folder=str(tmp_path), decay_steps=1)
    engine = VllmSettings(
        index=0, model_path=str(tmp_path), config=GenerationConfig(), precision="bfloat16", max_total_sequence_length=8
    )
    expected = rf"^{socket.gethostname()} has no model in {tmp_path}: .*HF_HOME"
    with pytest.raises(RunError, match=expected):
        RankActor("policy rank 0", 0, 1).start(rank, ("here", 1))
    with pytest.raises(RunError, match=expected):
        asyncio.run(VllmEngine(engine).start())


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a run that began with the model in `origin`."""
    (tmp_path / "origin").mkdir()
    folder = tmp_path / "run" / "checkpoints" / "step_5"
    (folder / "megatron").mkdir(parents=True)
    values = {"policy": {"model": {"path": str(tmp_path / "origin")}}}
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(values))
    return folder


def test_its_export_stands_for_a_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    export = fetch_model_folder(str(checkpoint))
    assert export.parent == tmp_path / "run" / "exports"
    assert export.name.startswith("step_5-")
    assert find_local_folder(str(checkpoint)) == tmp_path / "origin", "whose sizes and tokenizer it has"
    export.mkdir(parents=True)
    assert find_local_folder(str(checkpoint)) == export


def test_of_a_checkpoint_of_a_checkpoint_the_first_model_has_the_sizes(checkpoint: Path, tmp_path: Path) -> None:
    second = tmp_path / "second" / "checkpoints" / "step_9"
    (second / "megatron").mkdir(parents=True)
    values = {"policy": {"model": {"path": str(checkpoint)}}}
    (tmp_path / "second" / "config.yaml").write_text(yaml.safe_dump(values))
    assert find_local_folder(str(second)) == tmp_path / "origin"


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda run: (run / "config.yaml").unlink(), "is a checkpoint without its run"),
        (lambda run: (run / "config.yaml").write_text("a: 1"), "is not the configuration of a run"),
        (lambda run: (run.parent / "origin").rmdir(), "the model that its run began with is not there"),
    ],
)
def test_a_checkpoint_that_cannot_be_a_model_is_explained(checkpoint: Path, damage: object, text: str) -> None:
    assert callable(damage)
    damage(checkpoint.parent.parent)
    (problem,) = explain_unusable_model(f"policy.model.path={checkpoint}", str(checkpoint))
    assert text in problem.text


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


def digest(folder: Path, content: Any, **form: Any) -> str | None:
    text = content if isinstance(content, str) else json.dumps(content, **form)
    (folder / "tokenizer.json").write_text(text)
    return compute_vocabulary_digest(folder)


VOCABULARY = {"a": 0, "b": 1, "é": 2}
WRITTEN = {"model": {"type": "BPE", "vocab": VOCABULARY}, "added_tokens": [{"id": 3, "content": "<end>"}]}


def test_the_way_of_writing_does_not_matter(tmp_path: Path) -> None:
    turned = {"added_tokens": WRITTEN["added_tokens"], "model": {"vocab": dict(reversed(VOCABULARY.items()))}}
    scored = {**WRITTEN, "model": {"vocab": [["a", -1.0], ["b", -2.0], ["é", -3.0]]}}
    digests = {
        digest(tmp_path, content, **form) for content in (WRITTEN, turned, scored) for form in ({}, {"indent": 2})
    }
    assert len(digests) == 1
    assert None not in digests


def test_another_number_or_token_does(tmp_path: Path) -> None:
    changed_contents = [
        {**WRITTEN, "model": {"vocab": {**VOCABULARY, "b": 2, "é": 1}}},
        {**WRITTEN, "model": {"vocab": {**VOCABULARY, "c": 4}}},
        {**WRITTEN, "added_tokens": []},
    ]
    assert len({digest(tmp_path, content) for content in (WRITTEN, *changed_contents)}) == 4


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {}}', '{"model": {"vocab": [1]}}', "[" * 10**5])
def test_what_is_no_tokenizer_has_none(content: str, tmp_path: Path) -> None:
    assert compute_vocabulary_digest(tmp_path) is None
    assert digest(tmp_path, content) is None


@pytest.mark.parametrize("name", PREPARED_MODELS)
def test_token_ids_of_prepared_models_are_those_of_their_vocabulary(name: str) -> None:
    if name == "counting":
        ids = source.COUNTING_VOCABULARY
    elif name.startswith(("addition", "distillation", "labelled", "preference")):
        ids = source.VOCABULARY
    else:
        ids = source.CONVERSATION_VOCABULARY
    config = PREPARED_MODELS[name]
    config = config.get("text_config", config)
    numbers = [config[key] for key in ("vocab_size", "eos_token_id", "pad_token_id")]
    assert numbers == [len(ids), ids[source.EOS], ids[source.PAD]]
