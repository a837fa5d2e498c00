"""The driver's calls of the ranks' actors reach the parts of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, call, create_autospec

import pytest

from megatron_grpo.trainer.actor import RankActor
from megatron_grpo.trainer.checkpoint import RankCheckpoint
from megatron_grpo.trainer.messages import RankReport
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.trainer.offload import DeviceMemory
from megatron_grpo.trainer.step_record import StepRecorder


class LocalActor:
    """A handle whose calls run at once in this process, and return results in place of references."""

    def __init__(self, model: Any) -> None:
        self._actor = RankActor.__new__(RankActor)
        self._actor.model = model

    def __getattr__(self, name: str) -> Any:
        class Method:
            remote: Callable[..., Any] = getattr(self._actor, name)

        return Method


@pytest.fixture
def model() -> Any:
    """A model whose parts take the calls that the real ones take."""
    model = Mock(spec=["checkpoint", "memory", "recorder", "sync_reference"])
    model.checkpoint = create_autospec(RankCheckpoint, instance=True)
    model.memory = create_autospec(DeviceMemory, instance=True)
    model.recorder = create_autospec(StepRecorder, instance=True)
    model.recorder.end.return_value = model.recorder.end_states.return_value = []
    return model


def test_calls_reach_the_model(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = MegatronPolicy.__new__(MegatronPolicy)
    policy.actors = [LocalActor(model)]
    policy._reports = [RankReport(data_rank=0, device_name="cpu", startup_s={})]
    monkeypatch.setattr(policy, "_gather", lambda results, _: results)
    policy.save_checkpoint("folder", background=True)
    model.checkpoint.is_written.return_value = False
    assert not policy.is_checkpoint_written()
    policy.finish_checkpoint()
    policy.load_checkpoint("folder")
    assert model.checkpoint.method_calls == [
        call.save("folder", True),
        call.is_written(),
        call.finish(),
        call.load("folder"),
    ]
    policy.offload(weights=True)
    policy.onload()
    assert model.memory.method_calls == [call.offload(True), call.onload()]
    policy.begin_record()
    assert policy.end_record() == []
    assert model.recorder.method_calls == [call.begin(), call.end()]
    policy.sync_reference(0.5)
    assert model.sync_reference.call_args == call(0.5)
    assert policy.submit(lambda rank, number: (rank, number), 3) == [(model, 3)]
