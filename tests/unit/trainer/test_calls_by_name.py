"""Methods that the driver calls by name on every rank exist and take the driver's arguments."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from megatron_grpo.trainer.checkpoint import RankCheckpoint
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.trainer.offload import DeviceMemory
from megatron_grpo.trainer.rank import PolicyRank

PARTS = {"checkpoint": RankCheckpoint, "memory": DeviceMemory, "": PolicyRank}


def test_ranks_have_the_methods_that_the_driver_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = MegatronPolicy.__new__(MegatronPolicy)
    called = []

    def submit(name: str, *arguments: Any) -> list[Any]:
        part, _, method = name.rpartition(".")
        inspect.signature(getattr(PARTS[part], method)).bind(None, *arguments)
        called.append(method)
        return []

    monkeypatch.setattr(policy, "submit", submit)
    monkeypatch.setattr(policy, "_gather", lambda *_: [])
    policy.save_checkpoint("folder", background=True)
    policy.checkpoint_is_written()
    policy.finish_checkpoint()
    policy.load_checkpoint("folder")
    policy.offload(weights=True)
    policy.onload()
    policy.sync_reference(0.5)
    assert called == ["save", "is_written", "finish", "load", "offload", "onload", "sync_reference"]
