"""States of checkpoints from elsewhere: what a run cannot continue is refused before the weights are loaded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.algorithms.context import make_save_state
from megatron_grpo.algorithms.setup import _read_progress
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.checkpoint_files import CheckpointError
from tests.support.trajectories import make_trajectory, plain_groups

ROW = make_trajectory(2, reward=0.5).to_saved_row()
CONFIG = compose_config(
    ["+exp=quickstart", "grpo.use_dynamic_sampling=true", "grpo.num_generations_per_prompt=2", "run_dir=out"]
)


def read(folder: Path, save_state: dict[str, Any], groups: Any) -> Any:
    state = {"save_state": {"total_steps": 3, **save_state}, "metrics": {}, "batch_cache": groups}
    (folder / "state.json").write_text(json.dumps(state))
    return _read_progress(CONFIG, folder)


def test_the_groups_that_wait_are_read(tmp_path: Path) -> None:
    progress = read(tmp_path, {**make_save_state(), "total_steps": 3}, [[ROW, ROW], [ROW]])
    assert plain_groups(progress.batch_cache) == plain_groups([[make_trajectory(2, reward=0.5)] * 2])
    assert progress.state["total_steps"] == 3


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([[ROW | {"logprobs": [-1.0, math.nan]}] * 2], "a log-probability in batch_cache is not finite"),
        ([[ROW | {"logprobs": ["x", 1.0]}] * 2], "ValueError: could not convert"),
        ([[ROW | {"token_ids": [2**40]}] * 2], "OverflowError"),
        ([[ROW | {"spans": [[1]]}] * 2], "TypeError"),
        ([[ROW | {"routed": [2, "\x00"]}] * 2], "ValueError"),
        ([[{"prompt_idx": 1}] * 2], "KeyError: 'token_ids'"),
        ([["row"]], "AttributeError"),
        ([3], "TypeError"),
        (None, "TypeError"),
    ],
)
def test_groups_that_no_run_writes_are_refused(groups: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/state.json is damaged: .* \(.*{text}"):
        read(tmp_path, dict(make_save_state()), groups)


@pytest.mark.parametrize("name", ["generation_batches", "early_stop", "consumed_samples"])
def test_a_state_that_lacks_a_count_is_refused(name: str, tmp_path: Path) -> None:
    counts = {key: value for key, value in make_save_state().items() if key != name}
    with pytest.raises(CheckpointError, match=f"save_state has no {name}"):
        read(tmp_path, counts, [])
