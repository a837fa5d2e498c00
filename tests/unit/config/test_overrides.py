"""How single arguments of a command line are read: texts as they are written, and a message for each mistake."""

from __future__ import annotations

import time

import pytest

from megatron_grpo.config.overrides import read_overrides
from megatron_grpo.preflight.load import compose_config


def problem_of(*overrides: str) -> tuple[str, str]:
    (problem,) = read_overrides(overrides).problems
    return problem.subject, problem.text


@pytest.mark.parametrize(
    "text",
    [
        "/data/a=b.jsonl",
        "/data/run(1)/x",
        "/data/übung/数学.jsonl",
        "/data/it's;50%#1",
        "2026_01",
        "1e5",
        "true",
        "007",
        "/a\\b",
        "Think {step} by [step",
        "(" * 3000,
        "",
    ],
)
def test_a_text_is_taken_as_it_is_written(text: str) -> None:
    """Signs that Hydra's grammar has a meaning for need no quotes, and what looks like a number stays a text."""
    config = compose_config(["+exp=quickstart", f"logger.wandb.project={text}"])
    assert config.logger.wandb.project == text


def test_a_quoted_text_is_taken_without_its_quotes() -> None:
    config = compose_config(["+exp=quickstart", 'logger.wandb.project="Think, then answer."'])
    assert config.logger.wandb.project == "Think, then answer."


def test_a_leading_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for given in ("run_dir=~/runs/1", "run_dir='~/runs/1'"):
        assert compose_config(["+exp=quickstart", given]).run_dir == "/home/somebody/runs/1"
    assert compose_config(["+exp=quickstart", "data.val_path=~"]).data.val_path == "/home/somebody"


@pytest.mark.parametrize("key", ["grpo.seed", "policy.optimizer.lr", "nowhere"])
@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000, "{a:" * 3000, "[" * 3000 + "]" * 3000])
def test_endless_values_are_refused_at_once(key: str, value: str) -> None:
    begin = time.monotonic()
    read = read_overrides([f"{key}={value}"])
    assert read.accepted == []
    assert sum(len(problem.subject) + len(problem.text) for problem in read.problems) < 500
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "overrides",
    [("+variant=dapo", "+variant=gspo"), ("+exp=quickstart", "exp=quickstart_ppo"), ("env=math", "env=addition")],
)
def test_of_a_group_one_option_is_chosen(overrides: tuple[str, str]) -> None:
    """Hydra would take the last one, without a word."""
    subject, text = problem_of(*overrides)
    assert subject == " ".join(one.lstrip("+") for one in overrides)
    assert "a run takes one" in text
    assert read_overrides([overrides[0], overrides[0]]).problems == [], "twice the same is not a contradiction"
