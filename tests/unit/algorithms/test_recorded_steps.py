"""A recording in the place of the loader, and engines that nothing but the model folder gives weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.algorithms.records import RecordedSteps
from megatron_grpo.batch.rollout_files import locate_rollouts_file
from megatron_grpo.config.errors import ConfigError, RunError, SamplingError
from megatron_grpo.data.loader import iterate_batches
from megatron_grpo.run.launch import restore_from_folder


def make(folder: Path, *steps: int) -> RecordedSteps:
    for step in steps:
        locate_rollouts_file(folder, step).parent.mkdir(exist_ok=True)
        locate_rollouts_file(folder, step).touch()
    return RecordedSteps(str(folder), prompts_per_batch=2)


def test_its_position_is_that_of_the_recorded_run(tmp_path: Path) -> None:
    recorded = make(tmp_path, 1)
    assert recorded.state_dict()["epoch"] == recorded.epoch == 0
    recorded.load_state_dict({"epoch": 3, "rows": 7})
    assert (recorded.epoch, recorded.state_dict()) == (3, {"epoch": 3, "rows": 7})
    assert list(iterate_batches(recorded, max_num_epochs=3)) == []


def test_a_recording_that_begins_later_is_refused(tmp_path: Path) -> None:
    recorded = make(tmp_path, 4, 5)
    recorded.require_start(4)
    recorded.require_start(9)
    with pytest.raises(ConfigError, match=r"debug\.rollouts_from=.* begins with step 4, and this run with step 3"):
        recorded.require_start(3)


def test_an_engine_is_replaced_by_one_with_the_weights_of_the_folder() -> None:
    replaced: list[Any] = []
    restore_from_folder(SimpleNamespace(replace=replaced.append), {1: "it died"})  # type: ignore[arg-type]
    assert replaced == [{1: "it died"}]


def test_an_engine_that_is_not_replaced_ends_the_sampling() -> None:
    def refuse(error: Any) -> None:
        raise RunError("as often as generation.engine_restarts=1 allows")

    with pytest.raises(SamplingError, match="as often as"):
        restore_from_folder(SimpleNamespace(replace=refuse), {0: "it died"})  # type: ignore[arg-type]
