"""Early stopping: thresholds, patience, directions, and continuing from a saved state."""

from __future__ import annotations

import copy
import json

import pytest

from megatron_grpo.algorithms.context import make_save_state
from megatron_grpo.algorithms.validation import find_stop_reason, update_early_stop
from megatron_grpo.config.loop_schema import EarlyStopConfig


def stops_at(values: list[float], config: EarlyStopConfig) -> int | None:
    """After which validation, from 1."""
    state = make_save_state()["early_stop"]
    for number, value in enumerate(values, start=1):
        update_early_stop(state, {config.metric_name: value}, config)
        state = json.loads(json.dumps(state))  # as through a checkpoint
        if find_stop_reason(state, config):
            return number
    return None


@pytest.mark.parametrize(
    ("values", "settings", "expected"),
    [
        ([0.3, 0.5, 0.8, 0.9], {"threshold": 0.8}, 3),
        ([0.3, 0.5], {"threshold": 0.8}, None),
        ([3.0, 2.0, 1.0], {"threshold": 2.0, "higher_is_better": False}, 2),
        ([0.3, 0.5, 0.5, 0.4], {"patience": 2}, 4),
        ([0.3, 0.5, 0.4, 0.6, 0.5], {"patience": 2}, None),
        ([0.3, 0.35, 0.39], {"patience": 2, "min_delta": 0.1}, 3),
        ([0.3, 0.35, 0.41], {"patience": 2, "min_delta": 0.1}, None),
        ([1.0, 2.0], {"patience": 1, "higher_is_better": False}, 2),
        ([0.5, 0.5, 0.5], {"patience": 1, "enabled": False}, None),
    ],
)
def test_when_training_ends(values: list[float], settings: dict[str, float], expected: int | None) -> None:
    assert stops_at(values, EarlyStopConfig(**{"enabled": True, **settings})) == expected


def test_asking_for_the_reason_changes_nothing() -> None:
    state, config = make_save_state()["early_stop"], EarlyStopConfig(enabled=True, patience=1)
    update_early_stop(state, {"val_accuracy": 0.5}, config)
    update_early_stop(state, {"val_accuracy": 0.4}, config)
    before = copy.deepcopy(state)
    assert find_stop_reason(state, config) == "val_accuracy has not improved on 0.5 for 1 validations"
    assert find_stop_reason(state, config)
    assert state == before


def test_a_validation_that_does_not_know_the_metric_counts_for_nothing() -> None:
    state, config = make_save_state()["early_stop"], EarlyStopConfig(enabled=True, patience=1)
    update_early_stop(state, {"val_accuracy": 0.5}, config)
    before = copy.deepcopy(state)
    update_early_stop(state, {"val_response_length": 3.0}, config)
    assert state == before
