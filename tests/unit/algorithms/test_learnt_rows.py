"""Rows and pairs that a step learns from, in the run's folder: texts, learnt tokens, and what the step computed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_grpo.algorithms.records import RolloutDumps
from megatron_grpo.algorithms.supervised import SupervisedRun
from megatron_grpo.batch.rollout_files import read_rollouts
from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.schema import LoggerConfig
from tests.support.fake_rollouts import FakeRay, FakeRollouts
from tests.support.fake_run import make_run
from tests.support.grpo_run import SHAPE
from tests.support.recorded_run import RUN

CHOSEN, REJECTED = [7, 1], [8, 8, 1]


@pytest.fixture(autouse=True)
def without_ray(fake_ray: FakeRay) -> FakeRay:
    return fake_ray


def make_messages(response: list[int]) -> list[dict[str, Any]]:
    prompt = {"role": "user", "content": "", "token_ids": [4, 5]}
    return [prompt, {"role": "assistant", "content": f"text of {response}", "token_ids": response}]


def make_row(number: int) -> Any:
    return {
        "message_log": make_messages(CHOSEN),
        "rejected": make_messages(REJECTED),
        "length": 5,
        "extra_env_info": {"level": number},
        "loss_multiplier": 1.0,
        "idx": 100 + number,
        "task_name": "addition",
        "prompt": f"prompt {number}",
    }


def take_step(folder: Path, algorithm: str, rows: list[Any], **logger: Any) -> SupervisedRun:
    config = compose_typed([f"+exp=quickstart_{algorithm}"]).require()
    rollouts: Any = FakeRollouts()
    run: SupervisedRun = make_run(config, folder, rollouts, SHAPE, [])
    run.dumps = RolloutDumps(rollouts, LoggerConfig(**logger), folder, RUN)
    policy: Any = run.policy
    if algorithm == "dpo":
        from megatron_grpo.algorithms.dpo import PreferenceRun, dpo_step

        policy.logprobs = dict.fromkeys(range(0, 2 * len(rows), 2), -0.5)
        assert isinstance(run, PreferenceRun)
        dpo_step(run, iter([rows]))
    else:
        from megatron_grpo.algorithms.sft import sft_step

        sft_step(run, iter([[{name: row[name] for name in row if name != "rejected"} for row in rows]]))
    return run


def test_pairs_have_their_rewards_and_log_probabilities(tmp_path: Path) -> None:
    """The fake policy gives -0.5 to the tokens of chosen responses, also under its reference, and 0 to the others."""
    take_step(tmp_path, "dpo", [make_row(number) for number in range(3)])
    rows = list(read_rollouts(tmp_path, 1, kind="rows"))
    assert [(row["group"], row["sample"], row["prompt_idx"]) for row in rows] == [
        (pair, sample, 100 + pair) for pair in range(3) for sample in (0, 1)
    ]
    chosen, rejected = rows[2], rows[3]
    assert (chosen["prompt"], chosen["columns"], chosen["answer"]) == ("prompt 1", {"level": "1"}, None)
    assert (chosen["response"], rejected["response"]) == (f"text of {CHOSEN}", f"text of {REJECTED}")
    assert rejected["token_ids"].tolist() == [4, 5, *REJECTED]
    assert (chosen["spans"], rejected["spans"]) == ([[2, 4, -1]], [[2, 5, -1]])
    np.testing.assert_allclose(chosen["prev_logprobs"], [-0.5] * 2)
    np.testing.assert_allclose(rejected["prev_logprobs"], [0.0] * 3)
    assert (chosen["reward"], rejected["reward"]) == (0.0, 0.0), "policy and reference agree"
    assert chosen["correct"] is None


def test_rows_without_log_probabilities(tmp_path: Path) -> None:
    take_step(tmp_path, "sft", [make_row(number) for number in range(3)])
    rows = list(read_rollouts(tmp_path, 1, kind="rows"))
    assert [row["group"] for row in rows] == [0, 1, 2]
    assert {(row["reward"], row["prev_logprobs"], row["correct"]) for row in rows} == {(None, None, None)}
    assert rows[2]["columns"] == {"level": "2"}


def test_a_large_step_is_sampled_and_off_writes_nothing(tmp_path: Path) -> None:
    take_step(tmp_path / "large", "sft", [make_row(number) for number in range(1000)])
    rows = list(read_rollouts(tmp_path / "large", 1, kind="rows"))
    assert [row["group"] for row in rows] == [number * 1000 // 64 for number in range(64)]
    take_step(tmp_path / "off", "sft", [make_row(0)], rollouts="off")
    assert not (tmp_path / "off").exists()
