"""What a configuration asks of the machine: rows, files, folders, models, packages, GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.preflight.load import compose_config, load_config
from megatron_grpo.preflight.machine import machine_problems
from tests.support.config_problems import SMALL, problems_of


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ('{"prompt": "1?", "ans', "not valid JSON"),
        ("[1]", "is list, not an object"),
        ('{"question": "1?", "answer": "1"}', "no column 'prompt' (data.prompt_key); it has question, answer"),
        ('{"prompt": "1?"}', "no column 'answer' (data.answer_key)"),
        ('{"prompt": 1, "answer": "1"}', "neither a text nor a list"),
        ('{"prompt": [{"role": "user"}], "answer": "1"}', "neither a text nor a list"),
        ('{"prompt": "1?", "answer": null}', "column 'answer' (data.answer_key) is null"),
        ('{"prompt": "1?", "answer": "1", "task_name": ["code"]}', "task_name ['code'] is no environment"),
        ('{"prompt": ' + "9" * 5000 + "}", "is no JSON that can be read"),
        ("[" * 100_000, "is no JSON that can be read"),
        ('{"prompt": "1?", "answer": "1", "task_name": "code"}', "task_name 'code' is no environment; env has math"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(given: list[str], rows: Path, row: str, text: str) -> None:
    with rows.open("a") as file:
        file.write(row)
    ((found, message),) = problems_of(given).items()
    assert found == f"{rows}:41"
    assert text in message


def test_many_bad_rows_are_summed_up(given: list[str], rows: Path) -> None:
    rows.write_text("{}\n" * 100)
    problems = problems_of(given)
    assert len(problems) == 6
    assert problems[str(rows)] == "95 more bad lines of 100"


def test_missing_files(model: Path, rows: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    problems = problems_of(
        [
            "policy.model.path=/nowhere",
            "data.train_path=/nowhere/train.jsonl",
            "data.val_path=/nowhere/val.jsonl",
            f"run_dir={tmp_path}/file/run",
            "checkpointing.resume=/nowhere/step_3",
        ]
    )
    assert {subject.partition("=")[0] for subject in problems} == {
        "policy.model.path",
        "data.train_path",
        "data.val_path",
        "run_dir",
        "checkpointing.resume",
    }


def test_folders_that_no_run_can_have(given: list[str], tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to("nowhere")
    ((_, dangling),) = problems_of([*given, f"run_dir={tmp_path}/latest"]).items()
    assert "leads nowhere" in dangling
    assert problems_of([*given, "run_dir=''"]) == {"run_dir=": "is empty; give a folder"}


def test_an_environment_without_prompts(given: list[str], rows: Path) -> None:
    extra = [*given, "env.code.type=math"]
    ((subject, text),) = problems_of(extra).items()
    assert subject == "env.code"
    assert "no row has task_name code" in text
    with rows.open("a") as file:
        file.write('{"prompt": "1?", "answer": "1", "task_name": "code"}')
    load_config(extra)


def test_a_tracker_that_is_not_installed(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install wandb" in problems_of([*given, "logger.wandb.enabled=true"])["logger.wandb.enabled=True"]


def test_too_few_rows(given: list[str], rows: Path) -> None:
    ((subject, text),) = problems_of([*given, "grpo.num_prompts_per_step=41"]).items()
    assert subject == f"data.train_path={rows}"
    assert "has 40 rows" in text


def test_incomplete_model_folders(given: list[str], model: Path) -> None:
    (model / "tokenizer.json").unlink()
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as caught:
        load_config(given)
    assert ["safetensors" in p.text or "tokenizer" in p.text for p in caught.value.problems] == [True, True]
    (model / "config.json").write_text(json.dumps({**SMALL, "architectures": ["GPT2LMHeadModel"]}))
    (text,) = problems_of(given).values()
    assert "architecture GPT2LMHeadModel is not supported" in text


def test_a_hub_name_in_the_cache_is_found(
    rows: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(SMALL))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    given = ["policy.model.path=org/name", f"data.train_path={rows}", f"run_dir={tmp_path / 'run'}"]
    ((subject, _),) = problems_of([*given, "policy.parallel.tensor=3"]).items()
    assert subject == "policy.parallel.tensor=3"
    assert machine_problems(load_config(given)) == []


def test_a_driver_without_a_gpu_cannot_estimate_advantages_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cluster has GPUs, and may be elsewhere."""
    monkeypatch.setattr("megatron_grpo.preflight.machine.visible_gpus", lambda: 0)
    config = compose_config(["+exp=quickstart_ppo", "cluster.gpus_per_node=8", "cluster.ray_address=10.0.0.1:6379"])
    assert machine_problems(config) == []
    config.ppo.calculate_advantages_on_gpu = True
    (problem,) = machine_problems(config)
    assert problem.subject == "ppo.calculate_advantages_on_gpu=True"
