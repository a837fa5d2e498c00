"""NaN and infinite values stop the step: the message names the prompts, the file has the responses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from megatron_grpo.algorithms.non_finite import require_finite_samples, require_finite_tokens
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.sequences import SequenceBatch
from megatron_grpo.rollouts.trajectory import Span, Trajectory


def trajectory(prompt: int, reward: float = 1.0, logprob: float = -0.5, **parts: float) -> Trajectory:
    return Trajectory(
        prompt_idx=prompt,
        group=0,
        sample=0,
        token_ids=[1, 2, 3],
        spans=[Span(1, 3, 4)],
        logprobs=[-1.0, logprob],
        response="ab",
        stop_reason="stop",
        reward=reward,
        reward_parts=parts,
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("reward", "the reward is not finite"),
        ("logprob", "a sampling log-probability is not finite"),
        ("style", "a reward function's reward is not finite"),
    ],
)
def test_bad_samples(tmp_path: Path, field: str, what: str, value: float) -> None:
    samples = [trajectory(7), trajectory(9, **{field: value}), trajectory(3, **{field: value}), trajectory(9)]
    with pytest.raises(RunError, match=rf"step 5: {what} for 2 response\(s\) to prompt\(s\) 3, 9"):
        require_finite_samples(samples, tmp_path, step=5)
    written = json.loads((tmp_path / "non_finite_step_5.json").read_text())
    assert written["prompt_ids"] == [3, 9]
    assert [row["prompt_idx"] for row in written["trajectories"]] == [9, 3]
    assert written["trajectories"][0]["token_ids"] == [1, 2, 3]


def test_only_what_the_loss_sees_has_to_be_finite(tmp_path: Path) -> None:
    samples = [trajectory(0), trajectory(1)]
    mask = torch.tensor([0.0, 1, 1, 0, 1, 0])
    logprobs = torch.tensor([math.nan, -1, -1, -math.inf, -1, math.nan])
    batch = SequenceBatch([3, 3], torch.zeros(6, dtype=torch.int64), {"loss_mask": mask, "prev_logprobs": logprobs})
    require_finite_tokens(batch, "prev_logprobs", samples, tmp_path, step=1)
    assert list(tmp_path.iterdir()) == []
    batch.tokens["prev_logprobs"][4] = -math.inf
    with pytest.raises(RunError, match=r"an entry of prev_logprobs is not finite for 1 response\(s\) to prompt\(s\) 1"):
        require_finite_tokens(batch, "prev_logprobs", samples, tmp_path, step=1)


def test_fine_samples_pass(tmp_path: Path) -> None:
    require_finite_samples([trajectory(1, style=0.5)], tmp_path, step=1)
    assert list(tmp_path.iterdir()) == []
