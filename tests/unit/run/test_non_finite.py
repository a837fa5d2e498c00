"""NaN and infinite values stop the step: the message names the prompts, the file has the responses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.data.responses import SamplingSettings
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.context import GRPORun
from megatron_grpo.run.non_finite import require_finite_samples, require_finite_tokens
from megatron_grpo.run.validation import validate
from tests.support.trajectories import make_trajectory


def trajectory(prompt: int, reward: float | None = 1.0, logprob: float = -0.5, **parts: float) -> Trajectory:
    return make_trajectory(prompt_idx=prompt, logprobs=[-1.0, logprob], reward=reward, reward_parts=parts)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39])
@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("reward", "the reward is not finite"),
        ("style", "a reward function's reward is not finite"),
    ],
)
def test_bad_samples(tmp_path: Path, field: str, what: str, value: float) -> None:
    samples = [trajectory(7), trajectory(9, **{field: value}), trajectory(3, **{field: value}), trajectory(9)]
    with pytest.raises(SamplingError, match=rf"step 5: {what} for 2 response\(s\) to prompt\(s\) 3, 9"):
        require_finite_samples(samples, tmp_path, step=5)
    written = json.loads((tmp_path / "non_finite_step_5.json").read_text())
    assert written["prompt_ids"] == [3, 9]
    assert [row["prompt_idx"] for row in written["trajectories"]] == [9, 3]
    assert written["trajectories"][0]["token_ids"] == [0, 1, 2]
    row = written["trajectories"][0]
    bad = row["reward"] if field == "reward" else row["reward_parts"]["style"]
    assert bad == {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(str(value), value)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_bad_sampling_logprobs(tmp_path: Path, value: float) -> None:
    """Not a matter of sampling alone, whatever the rewards are: the weights may be broken, and are not to be saved."""
    with pytest.raises(
        RunError, match=r"step 5: a sampling log-probability is not finite for 1 .* prompt\(s\) 9"
    ) as bad:
        require_finite_samples([trajectory(7, reward=math.nan), trajectory(9, logprob=value)], tmp_path, step=5)
    assert not isinstance(bad.value, SamplingError)


def test_a_bad_validation_ends_the_run_too(tmp_path: Path) -> None:
    run = SimpleNamespace(
        config=compose_config(["+exp=quickstart"]),
        state={"total_steps": 4},
        sampling=SamplingSettings(
            max_new_tokens=1, temperature=1.0, top_p=1.0, top_k=None, stop_token_ids=(), stop_strings=()
        ),
        val_prompts=["some prompt"],
        collector=SimpleNamespace(collect=lambda *_, **__: [trajectory(2, reward=math.nan)]),
        logger=SimpleNamespace(run_dir=tmp_path),
    )
    with pytest.raises(RunError, match=r"step 4: the reward is not finite for 1 response\(s\) to prompt\(s\) 2"):
        validate(cast(GRPORun, run))


def test_only_what_is_looked_at_has_to_be_finite(tmp_path: Path) -> None:
    samples = [trajectory(0), trajectory(1)]
    looked_at = torch.tensor([False, True, True, False, True, False])
    logprobs = torch.tensor([math.nan, -1, -1, -math.inf, -1, math.nan])
    batch = SequenceBatch([3, 3], torch.zeros(6, dtype=torch.int64), {"prev_logprobs": logprobs})
    require_finite_tokens(batch, "prev_logprobs", looked_at, samples, tmp_path, step=1)
    assert list(tmp_path.iterdir()) == []
    batch.tokens["prev_logprobs"][4] = -math.inf
    with pytest.raises(RunError, match=r"an entry of prev_logprobs is not finite for 1 response\(s\) to prompt\(s\) 1"):
        require_finite_tokens(batch, "prev_logprobs", looked_at, samples, tmp_path, step=1)
    written = json.loads((tmp_path / "non_finite_step_1.json").read_text())
    assert written["prev_logprobs"] == [["-Infinity", "-Infinity", "NaN"]]


def test_fine_samples_pass(tmp_path: Path) -> None:
    require_finite_samples([trajectory(1, style=0.5), trajectory(2, reward=None)], tmp_path, step=1)
    assert list(tmp_path.iterdir()) == []
