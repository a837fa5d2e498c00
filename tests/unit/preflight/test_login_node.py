"""On a machine without the run's GPUs one message has all problems that do not depend on each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.config_problems import problems_of

GPUS = "cluster.gpus_per_node=8"


@pytest.fixture
def on_login_node(given: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    layout = ["policy.parallel.data=4", "generation.parallel.data=4", "generation.parallel.pipeline=1"]
    return [*given, GPUS, "policy.parallel.pipeline=1", *layout]


def test_rows_files_and_environments_are_checked_without_gpus(
    on_login_node: list[str], rows: Path, tmp_path: Path
) -> None:
    assert list(problems_of(on_login_node)) == [GPUS]
    rows.write_text('{"question": "1?", "answer": "1"}\n' * 40)
    missing = f"data.val_path={tmp_path}/val.jsonl"
    texts = problems_of([*on_login_node, missing, "+env.math.options.tolerance=3"])
    assert texts[GPUS].startswith("this machine has no CUDA GPU")
    assert "has no column 'prompt'" in texts[f"{rows}:1"]
    assert texts[missing].startswith("no such file")
    assert texts["env.math.options.tolerance=3"].startswith("is not an option of MathEnvironment")


def test_layouts_models_and_rewards_are_checked_without_gpus(
    on_login_node: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "login_node_scores.py").write_text(
        "def score(completions, difficulty):\n    return [0.0 for _ in completions]\n"
    )
    function = "login_node_scores.score"
    wrong = ["checkpointing.resume=/nowhere/step_3", "policy.parallel.tensor=3"]
    texts = problems_of(
        [*on_login_node, *wrong, "env.math.type=reward_functions", f"env.math.reward_funcs=[{function}]"]
    )
    keys = {subject.partition("=")[0] for subject in texts}
    assert {"cluster.gpus_per_node", "checkpointing.resume", "policy.parallel.tensor", "env.math.reward_funcs"} <= keys
    assert "difficulty" in texts[f"env.math.reward_funcs={function}"]


def test_a_wrong_name_is_named_alone(on_login_node: list[str]) -> None:
    """Another file or environment may have been meant by it."""
    (subject,) = problems_of([*on_login_node, "data.trian_path=rows.jsonl", "+env.math.options.tolerance=3"])
    assert subject.startswith("data.trian_path")
