"""NaN and infinite values stop the step: the message names the prompts, the file has the responses."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from megatron_grpo.algorithms.records import StepCheck
from megatron_grpo.algorithms.validation import validate
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.preflight.load import compose_config
from tests.support.fake_rollouts import FakeRay, FakeRollouts, add_entry
from tests.support.fake_run import make_sampling_run
from tests.support.trajectories import failed_trajectory, make_trajectory


def trajectory(prompt: int, reward: float | None = 1.0, logprob: float = -0.5, **parts: float) -> Trajectory:
    return make_trajectory(prompt_idx=prompt, logprobs=[-1.0, logprob], reward=reward, reward_parts=parts)


def check(samples: Sequence[Trajectory], folder: Path) -> None:
    """Have a generation batch of step 5 looked at, one sample to a prompt."""
    rollouts = FakeRollouts()
    groups = rollouts.put([[sample] for sample in samples])
    StepCheck(folder, rollouts.fetch, groups, 5).require_finite_samples()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("reward", "the reward is not finite"),
        ("style", "the reward of style is not finite"),
    ],
)
def test_bad_samples(tmp_path: Path, field: str, text: str, value: float) -> None:
    samples = [trajectory(7), trajectory(9, **{field: value}), trajectory(3, **{field: value}), trajectory(9)]
    with pytest.raises(SamplingError, match=rf"step 5: {text} for 2 response\(s\) to prompt\(s\) 3, 9"):
        check(samples, tmp_path)
    written = json.loads((tmp_path / "non_finite_step_5.json").read_text())
    assert written["prompt_ids"] == [3, 9]
    assert [row["prompt_idx"] for row in written["trajectories"]] == [9, 3]
    assert written["trajectories"][0]["token_ids"] == [0, 1, 2]
    row = written["trajectories"][0]
    bad = row["reward"] if field == "reward" else row["reward_parts"]["style"]
    assert bad == {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(str(value), value)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_bad_sampling_logprobs(tmp_path: Path, value: float) -> None:
    """Whatever the rewards are, the weights may be broken, and are not to be saved."""
    with pytest.raises(
        RunError, match=r"step 5: a sampling log-probability is not finite for 1 .* prompt\(s\) 9"
    ) as bad:
        check([trajectory(7, reward=math.nan), trajectory(9, logprob=value)], tmp_path)
    assert not isinstance(bad.value, SamplingError)


def test_only_the_groups_it_is_about_come_to_the_driver(tmp_path: Path) -> None:
    """And of these, only the bad samples are in the file."""
    samples = [trajectory(i // 2, reward=math.nan if i in (2, 7) else float(i)) for i in range(8)]
    rollouts = FakeRollouts()
    groups = rollouts.put([samples[start : start + 2] for start in range(0, 8, 2)])
    with pytest.raises(SamplingError, match=r"for 2 response\(s\) to prompt\(s\) 1, 3 of the training data"):
        StepCheck(tmp_path, rollouts.fetch, groups, 5).require_finite_samples()
    assert rollouts.fetched == [groups[1], groups[3]]
    written = json.loads((tmp_path / "non_finite_step_5.json").read_text())
    assert written["trajectories"] == [{**samples[i].to_row(), "reward": "NaN"} for i in (2, 7)]


def test_the_message_names_a_few_prompts_and_the_file_all(tmp_path: Path) -> None:
    rollouts = FakeRollouts()
    groups = rollouts.put([[trajectory(i, reward=math.nan)] for i in range(20, 0, -1)])
    with pytest.raises(SamplingError, match=r"prompt\(s\) 1, 2, 3, 4, 5, 6, 7, 8, \.\.\. of the training data"):
        StepCheck(tmp_path, rollouts.fetch, groups, 5).require_finite_samples()
    assert json.loads((tmp_path / "non_finite_step_5.json").read_text())["prompt_ids"] == list(range(1, 21))


def test_a_bad_validation_ends_the_run_too(tmp_path: Path) -> None:
    rollouts = FakeRollouts(lambda *_: [[trajectory(2, reward=math.nan)]])
    run = make_sampling_run(compose_config(["+exp=quickstart"]), tmp_path, rollouts)
    run.state["total_steps"], run.val_prompts = 4, cast(Any, [{"idx": 2}])
    with pytest.raises(
        RunError, match=r"step 4: the reward is not finite for 1 response\(s\) to prompt\(s\) 2 of the validation data"
    ):
        validate(run, StepTimer())


@pytest.mark.parametrize("shards", [[[0, 1, 2]], [[0, 2], [1]], [[1], [0, 2]]], ids=str)
def test_only_what_is_looked_at_has_to_be_finite(shards: list[list[int]], tmp_path: Path, fake_ray: FakeRay) -> None:
    """Whoever computes an entry says of which sequences it is finite where it matters; the file has all of theirs."""
    rollouts: Any = FakeRollouts()
    groups = rollouts.put([[trajectory(0)], [trajectory(1)], [trajectory(2)]])
    numbers = [np.array(shard) for shard in shards]
    batch = StepBatch(lengths=np.full(3, 3), response_tokens=np.full(3, 2), in_loss=np.ones(3, dtype=np.bool_))
    batch.partitions = numbers
    batch.fields = rollouts.build_partitions(groups, numbers)
    add_entry(batch, "prev_logprobs", np.array([math.nan, -1, -1, -math.inf, -math.inf, math.nan, 0, -2, -3]))
    check = StepCheck(tmp_path, rollouts.fetch, groups, step=1)
    check.require_finite("prev_logprobs", np.array([True, True, True]), batch)
    assert list(tmp_path.iterdir()) == []
    assert (rollouts.fetched, fake_ray.gets) == ([], 0)
    with pytest.raises(RunError, match=r"a value of prev_logprobs is not finite for 1 response\(s\) to prompt\(s\) 1"):
        check.require_finite("prev_logprobs", np.array([True, False, True]), batch)
    written = json.loads((tmp_path / "non_finite_step_1.json").read_text())
    assert written["prev_logprobs"] == [["-Infinity", "-Infinity", "NaN"]]
    assert (rollouts.fetched, fake_ray.gets) == ([groups[1]], 1)
    with pytest.raises(RunError, match=r"for 2 response\(s\) to prompt\(s\) 0, 2"):
        check.require_finite("prev_logprobs", np.array([False, True, False]), batch)
    written = json.loads((tmp_path / "non_finite_step_1.json").read_text())
    assert written["prev_logprobs"] == [["NaN", -1, -1], [0, -2, -3]], "in the order of the responses"
    assert [row["prompt_idx"] for row in written["trajectories"]] == [0, 2]


def test_fine_samples_pass(tmp_path: Path) -> None:
    check([trajectory(1, style=0.5), trajectory(2, reward=None), failed_trajectory(prompt_idx=3)], tmp_path)
    assert list(tmp_path.iterdir()) == []
