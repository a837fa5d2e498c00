"""A whole evaluation with fake rollouts: which prompts are asked, in which batches, and what is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.batch.special_tokens import StopConditions
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.evaluation import checkpoint_scores as module
from megatron_grpo.evaluation.checkpoint_scores import evaluate
from megatron_grpo.evaluation.request import EvaluatedSet, EvaluationRequest
from megatron_grpo.preflight.load import compose_config
from tests.support.fake_rollouts import FakeRollouts
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
            make_trajectory(2, prompt_idx=prompt["idx"], sample=n, correct=one, reward=float(one))
            for n, one in enumerate(ones)
        ]
        for prompt, ones in zip(prompts, right, strict=True)
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
        def __init__(self, config: object, model: Path) -> None:
            self.stops, self.notes = StopConditions((2,)), list[str]()

        def read_held_out(self, key: str, one: DatasetConfig) -> list[DatumSpec]:
            return [datum(idx, one.path) for idx in range(PROMPTS[one.path])]

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
    assert [asked["rows"] for asked in rollouts.asked] == [[0, 1], [2, 3], [4], [0, 1], [2]], "8 responses a batch"
    settings = {(asked["sampling"].temperature, asked["sampling"].top_k) for asked in rollouts.asked}
    assert settings == {(0.6, 5)}
    assert {asked["sampling"].stop_token_ids for asked in rollouts.asked} == {(2,)}
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
    asked = request(
        tmp_path, "out", sets={"easy": EvaluatedSet("data.val_path", DatasetConfig(path=str(file)))}, is_run=True
    )
    asked.config.env["addition"].type = "reward_functions"
    asked.config.env["addition"].reward_funcs = [f"{__name__}.needs_hint"]
    with pytest.raises(ConfigError, match=r"env\.addition\.reward_funcs=.*needs_hint +.*hint"):
        evaluate(asked)
    assert not (tmp_path / "out").exists(), "nothing is exported before"
