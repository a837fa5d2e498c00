"""Evaluations: command lines, what is checked as for training, and what is written."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from datasets import Dataset, DatasetDict

from megatron_grpo.batch.special_tokens import StopConditions
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.keys import build_values
from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.evaluate import main
from megatron_grpo.evaluation import checkpoint_scores as module
from megatron_grpo.evaluation.checkpoint_scores import evaluate
from megatron_grpo.evaluation.request import EvaluatedSet, EvaluationRequest, read_request
from megatron_grpo.models.source import PREPARED_MODELS
from megatron_grpo.preflight.load import compose_config
from tests.support.fake_rollouts import FakeRollouts
from tests.support.message_table import read_rows
from tests.support.trajectories import make_trajectory

PROMPTS = {"easy.jsonl": 5, "hard.jsonl": 3}


def datum(idx: int, file: str) -> DatumSpec:
    rest: dict[str, Any] = {"message_log": [], "length": 1, "loss_multiplier": 1.0, "task_name": "addition"}
    return {"extra_env_info": {REFERENCE: "7"}, "idx": idx, "prompt": f"{file} {idx}", **rest}


def answers(prompts: Sequence[DatumSpec], samples: int) -> list[list[Trajectory]]:
    """Sample 0 of every prompt is right, and everything that is easy."""
    right = [["easy" in str(prompt["prompt"]) or number == 0 for number in range(samples)] for prompt in prompts]
    return [
        [
            make_trajectory(2, prompt_idx=prompt["idx"], sample=n, correct=is_right, reward=float(is_right))
            for n, is_right in enumerate(marks)
        ]
        for prompt, marks in zip(prompts, right, strict=True)
    ]


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> FakeRollouts:
    """In place of processes; the prompts of a file are as many as PROMPTS says."""
    fake = FakeRollouts(answers)

    @contextmanager
    def rollout_pool(config: object, model: Path, output: Path) -> Iterator[FakeRollouts]:
        assert model.is_dir()
        yield fake

    class Reader:
        def __init__(self, config: object, model: Path, image_store: Path) -> None:
            self.stops, self.notes = StopConditions((2,)), list[str]()

        def read_held_out(self, key: str, dataset: DatasetConfig) -> list[DatumSpec]:
            return [datum(idx, dataset.path) for idx in range(PROMPTS[dataset.path])]

    monkeypatch.setattr(module, "rollout_pool", rollout_pool)
    monkeypatch.setattr(module, "PromptReader", Reader)
    return fake


def request(folder: Path, name: str, **changes: Any) -> EvaluationRequest:
    config = compose_config(["+exp=quickstart", "grpo.val_batch_size=8", "generation.top_k=5"])
    values: dict[str, Any] = {
        "checkpoint": folder,
        "is_run": False,
        "output": folder / name,
        "sets": {
            file.removesuffix(".jsonl"): EvaluatedSet("data.val_path", DatasetConfig(path=file)) for file in PROMPTS
        },
        "k": (1, 4),
        "samples": 4,
        "temperature": 0.6,
        "compare": None,
        "config": config,
    }
    return EvaluationRequest(**(values | changes))


def test_every_set_is_answered_and_written(rollouts: FakeRollouts, tmp_path: Path) -> None:
    results = evaluate(request(tmp_path, "out"))
    assert [call["rows"] for call in rollouts.asked] == [[0, 1], [2, 3], [4], [0, 1], [2]], "8 responses a batch"
    settings = {(call["sampling"].temperature, call["sampling"].top_k) for call in rollouts.asked}
    assert settings == {(0.6, 5)}
    assert {call["sampling"].stop_token_ids for call in rollouts.asked} == {(2,)}
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == results
    rows = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert [(row["set"], row["prompt_idx"], row["sample"]) for row in rows] == [
        (name.removesuffix(".jsonl"), idx, sample)
        for name in PROMPTS
        for idx in range(PROMPTS[name])
        for sample in range(4)
    ]
    easy, hard = results["sets"]["easy"], results["sets"]["hard"]
    assert (easy["accuracy"]["mean"], hard["accuracy"]["mean"]) == (1.0, 0.25)
    assert (hard["pass@1"]["mean"], hard["pass@4"]["mean"]) == (pytest.approx(0.25), 1.0)
    assert {"generation", "prompts", "total"} <= results["timing"].keys()


def test_a_second_evaluation_is_compared_with_the_first(rollouts: FakeRollouts, tmp_path: Path) -> None:
    evaluate(request(tmp_path, "first", samples=1, k=(1,)))
    rollouts.answers = lambda prompts, samples: [
        [make_trajectory(2, prompt_idx=prompt["idx"], correct=False, reward=0.0)] for prompt in prompts
    ]
    results = evaluate(request(tmp_path, "second", samples=1, k=(1,), compare=tmp_path / "first"))
    compared = results["compared"]["sets"]["easy"]
    assert (compared["only_before"], compared["only_now"], compared["mcnemar_p"]) == (5, 0, pytest.approx(2 / 32))


def test_a_checkpoint_that_cannot_be_exported_is_told(rollouts: FakeRollouts, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"checkpoint=.* is not a checkpoint"):
        evaluate(request(tmp_path, "out", is_run=True))
    assert not list((tmp_path / "out").iterdir()), "nothing half made is left"


def needs_hint(prompts: list[str], completions: list[str], hint: list[str]) -> list[float]:
    """A reward function that wants a column which no set has."""
    return [0.0 for _ in hint]


def test_reward_functions_are_given_the_columns_of_the_sets(rollouts: FakeRollouts, tmp_path: Path) -> None:
    file = tmp_path / "easy.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    evaluation_request = request(
        tmp_path, "out", sets={"easy": EvaluatedSet("data.val_path", DatasetConfig(path=str(file)))}, is_run=True
    )
    evaluation_request.config.env["addition"].type = "reward_functions"
    evaluation_request.config.env["addition"].reward_funcs = [f"{__name__}.needs_hint"]
    with pytest.raises(ConfigError, match=r"env\.addition\.reward_funcs=.*needs_hint +.*hint"):
        evaluate(evaluation_request)
    assert not (tmp_path / "out").exists(), "nothing is exported before"


def write_row(file: Path) -> None:
    file.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")


def paths(request: EvaluationRequest) -> dict[str, str]:
    """The paths of the sets, by name."""
    return {name: evaluated_set.rows.path for name, evaluated_set in request.sets.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder in Hugging Face format, as far as a command line looks at it."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PREPARED_MODELS["addition"]))
    return folder


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of a run of the quickstart, as far as a command line looks at it."""
    config = compose_config(["+exp=quickstart", "generation.temperature=0.7"])
    config.data.val_path = str(tmp_path / "val.jsonl")
    write_row(tmp_path / "val.jsonl")
    folder = tmp_path / "run" / "checkpoints" / "step_3"
    (folder / "megatron").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(yaml.safe_dump(build_values(config)))
    return folder


def test_a_checkpoint_brings_its_configuration(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    request = read_request(
        [f"checkpoint={checkpoint}", f"output={output}", "samples=8", "k=[1, 4]", "generation.max_new_tokens=3"]
    )
    assert (request.is_run, request.samples, request.k, request.temperature) == (True, 8, (1, 4), 0.7)
    assert request.config.generation.max_new_tokens == 3
    assert paths(request) == {"val": str(tmp_path / "val.jsonl")}
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
        write_row(file)
    words = [f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}"]
    request = read_request([*words, f"data.val_path=[{','.join(map(str, files))}]"])
    assert paths(request) == {str(files[0]): str(files[0]), "b": str(files[1]), str(files[2]): str(files[2])}


def test_sets_of_the_configuration_have_their_names(checkpoint: Path, tmp_path: Path) -> None:
    other_file = tmp_path / "other.jsonl"
    write_row(other_file)
    words = [f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}", f"data.val_sets.hard.path={other_file}"]
    assert paths(read_request(words)) == {"val": str(tmp_path / "val.jsonl"), "hard": str(other_file)}
    assert paths(read_request([*words, f"data.val_path={other_file}"])) == {"other": str(other_file)}, (
        "the command line alone"
    )


def test_a_folder_takes_its_configuration_from_the_command_line(model: Path, tmp_path: Path) -> None:
    write_row(tmp_path / "val.jsonl")
    words = [f"checkpoint={model}", f"output={tmp_path / 'out'}", f"data.val_path={tmp_path / 'val.jsonl'}"]
    request = read_request([*words, "+exp=quickstart"])
    assert (request.is_run, request.config.policy.model.path) == (False, str(model))
    assert request.config.env.keys() == {"addition"}
    for training_only in ("policy.parallel.tensor=3", "policy.microbatch_tokens=1", "grpo.num_prompts_per_step=7"):
        read_request([*words, "+exp=quickstart", training_only])


def test_a_folder_needs_no_rows_to_train_on(model: Path, tmp_path: Path) -> None:
    write_row(tmp_path / "val.jsonl")
    words = [f"checkpoint={model}", f"output={tmp_path / 'out'}", f"data.val_sets.easy.path={tmp_path / 'val.jsonl'}"]
    lengths = ["generation.max_new_tokens=4", "data.max_input_seq_length=8", "policy.max_total_sequence_length=12"]
    assert paths(read_request([*words, *lengths, "env=addition", "data.task_name=addition"])).keys() == {"easy"}


def test_groups_and_folders_of_options_are_composed(model: Path, tmp_path: Path) -> None:
    write_row(tmp_path / "val.jsonl")
    options = tmp_path / "mine" / "env"
    options.mkdir(parents=True)
    (options / "short.yaml").write_text("addition:\n  type: addition\n")
    words = [f"checkpoint={model}", f"output={tmp_path / 'out'}", f"data.val_path={tmp_path / 'val.jsonl'}"]
    for folder in ([f"--config-dir={tmp_path / 'mine'}"], ["--config-dir", str(tmp_path / "mine")]):
        groups = ["data=addition", "generation=addition", "policy=addition", "algorithm=ppo", "env=short"]
        config = read_request([*words, *folder, *groups]).config
        assert (config.algorithm, list(config.env)) == ("ppo", ["addition"])


def test_a_folder_that_datasets_saved_is_a_set(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved.rows"
    DatasetDict({"test": Dataset.from_list([{"prompt": "1+1=", "answer": "2"}])}).save_to_disk(str(folder))
    words = [f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}", f"data.val_path={folder}"]
    assert paths(read_request(words)) == {"saved.rows": str(folder)}
    with pytest.raises(ConfigError, match=r"data\.val_path=.*saved\.rows +has no split 'dev'"):
        read_request([*words, "data.val_split=dev"])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("env.addition.type=reward_functions", r"env\.addition\.reward_funcs +is empty"),
        (
            "policy.max_total_sequence_length=9999",
            r"policy\.max_total_sequence_length=9999 +the model has \d+ positions",
        ),
        ("generation.max_new_tokens=500", r"policy\.max_total_sequence_length=\d+ +.* do not fit"),
        ("generation.parallel.tensor=3", r"generation\.parallel\.tensor=3 +does not divide the model's"),
        pytest.param(  # slow: imports vLLM in a process of its own
            "generation.engine_args.nope=1",
            r"generation\.engine_args\.nope=1 +(is not an argument|cannot be checked)",
            marks=pytest.mark.slow,
        ),
        (
            "generation.stop_token_ids=[-1]",
            r"generation\.stop_token_ids\.0=-1 +is an element of what must be list of int >= 0",
        ),
        ("data.prompt_file=nope", r"data\.prompt_file=nope +cannot be read: No such file"),
        ("data.tools=nope", r"data\.tools=nope +cannot be read: No such file"),
        ("data.chat_template=nope", r"data\.chat_template=nope +cannot be read: No such file"),
        ("data.prompt_key=question", r"val\.jsonl:1 .*question"),
        ("data.val_sets.b.path=nope.jsonl", r"data\.val_sets\.b\.path=nope\.jsonl +no such file"),
        ("temperature=0.001", r"temperature=0\.001 must be 0 \(greedy\) or float >= 0\.01"),
    ],
)
def test_the_configuration_is_checked_as_for_training(word: str, message: str, model: Path, tmp_path: Path) -> None:
    write_row(tmp_path / "val.jsonl")
    words = [f"checkpoint={model}", f"output={tmp_path / 'out'}", f"+data.val_path={tmp_path / 'val.jsonl'}"]
    with pytest.raises(ValueError, match=message):
        read_request([*words, "+exp=quickstart", word])


@pytest.mark.parametrize(("words", "message"), read_rows("evaluate", "mistakes_are_named"))
def test_mistakes_are_named(words: list[str], message: str, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_request([f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}", *words])


def test_places_that_are_wrong(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ([], "checkpoint=PATH is missing"),
        ([f"checkpoint={checkpoint}"], "output=PATH is missing"),
        ([f"checkpoint={tmp_path}", "output=x"], "is neither a checkpoint"),
        ([f"checkpoint={checkpoint}", f"output={tmp_path}"], "already exists"),
    ):
        assert main(words) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    (checkpoint.parent.parent / "config.yaml").unlink()
    assert main([f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}"]) == 2
    assert "has to stay in its run directory" in capsys.readouterr().err
