"""Command lines of an evaluation: what is understood, and every mistake before a process starts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.evaluate import main
from megatron_grpo.evaluation.request import read_request
from megatron_grpo.preflight.load import compose_config


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a run of the quickstart, as far as a command line looks at it."""
    config = compose_config(["+exp=quickstart", "generation.temperature=0.7"])
    config.data.val_path = str(tmp_path / "val.jsonl")
    (tmp_path / "val.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    folder = tmp_path / "run" / "checkpoints" / "step_3"
    (folder / "megatron").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(asdict(config)))
    return folder


def test_a_checkpoint_brings_its_configuration(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    request = read_request(
        [f"checkpoint={checkpoint}", f"output={output}", "samples=8", "k=[1, 4]", "generation.max_new_tokens=3"]
    )
    assert (request.is_run, request.samples, request.k, request.temperature) == (True, 8, (1, 4), 0.7)
    assert request.config.generation.max_new_tokens == 3
    assert request.sets == {"val": str(tmp_path / "val.jsonl")}
    assert not output.exists(), "nothing is made before the checks are through"


def test_keys_of_the_loop_have_two_names(checkpoint: Path, tmp_path: Path) -> None:
    words = [f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}"]
    assert read_request([*words, "ppo.seed=7"]).config.loop.seed == 7


def test_one_sample_is_greedy_unless_told(checkpoint: Path, tmp_path: Path) -> None:
    words = [f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}"]
    assert read_request(words).temperature == 0.0
    assert read_request([*words, "temperature=0.3"]).temperature == 0.3


def test_sets_are_named_by_their_files(checkpoint: Path, tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "run" / "a.jsonl"]
    for file in files:
        file.touch()
    words = [f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}"]
    request = read_request([*words, f"data.val_path=[{','.join(map(str, files))}]"])
    assert request.sets == {str(files[0]): str(files[0]), "b": str(files[1]), str(files[2]): str(files[2])}


def test_a_folder_takes_its_configuration_from_the_command_line(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    words = [f"checkpoint={folder}", f"output={tmp_path / 'out'}", f"data.val_path={tmp_path / 'val.jsonl'}"]
    request = read_request([*words, "+exp=quickstart"])
    assert (request.is_run, request.config.policy.model.path) == (False, str(folder))
    assert request.config.env.keys() == {"addition"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["k=[1,4]", "samples=2"], r"k=\[1,4\] +needs samples=4 or more; samples=2"),
        (["k=two"], r"k=two +is no list of whole numbers; write k=\[1,4\]"),
        (["samples=0"], r"samples=0 +is not a whole number from 1 on"),
        (["temperature=0", "samples=4"], r"temperature=0 +makes all samples=4 of a prompt equal"),
        (["temperature=hot"], r"temperature=hot +is not a number"),
        (["sample=4"], r"sample=4 +is not an argument; did you mean samples="),
        (["data.val_path=nowhere.jsonl"], r"data\.val_path=nowhere\.jsonl +no such file"),
        (["compare=nowhere"], r"compare=nowhere +has no samples\.jsonl"),
        (["generation.max_new_token=4"], r"generation\.max_new_token.* +unknown key; did you mean"),
        (["generation.max_new_tokens=many"], r"generation\.max_new_tokens=many +must be"),
        (
            ["generation.server.urls=[http://a:1]"],
            r"generation\.server\.urls=\['http://a:1'\] +serve .* engines of its own .*; add generation\.server\.urls=",
        ),
        (
            ["env.addition.type=reward_functions", "env.addition.agent_func=m.agent"],
            r"env\.addition\.agent_func=m\.agent +asks .*; give generation\.endpoint\.enabled=true",
        ),
        (["generation.temperature.high=1"], r"generation\.temperature\.high +unknown key"),
        (["run_dir.folder=x"], r"run_dir\.folder +unknown key"),
        (["generation.stop_strings=['a"], r"generation\.stop_strings=\['a +not understood; lists are written \[a,b\]"),
        (["+exp=quickstart"], r"\+exp=quickstart +recipes are for folders"),
    ],
)
def test_mistakes_are_named(words: list[str], told: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=told):
        read_request([f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}", *words])


def test_places_that_are_wrong(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (
        ([], "checkpoint=PATH is missing"),
        ([f"checkpoint={checkpoint}"], "output=PATH is missing"),
        ([f"checkpoint={tmp_path}", "output=x"], "is neither a checkpoint"),
        ([f"checkpoint={checkpoint}", f"output={tmp_path}"], "already exists"),
    ):
        assert main(words) == 2
        assert told in " ".join(capsys.readouterr().err.split())
    (checkpoint.parent.parent / "config.yaml").unlink()
    assert main([f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}"]) == 2
    assert "has to stay in its run directory" in capsys.readouterr().err
