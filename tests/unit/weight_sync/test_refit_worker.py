"""What a generation worker says of the version that it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_grpo.weight_sync.engine_worker import RefitWorker


class Receiver:
    """Takes every version but the one that is refused."""

    refused: int | None = None

    def receive(self, version: int) -> None:
        if version == self.refused:
            raise ValueError("a checksum is broken")

    def abandon(self) -> None: ...


class Worker(RefitWorker):
    """As mixed into vLLM's worker."""

    rank, device = 3, torch.device("cpu")
    vllm_config: Any = None
    model_runner: Any = SimpleNamespace(reset_lora_state=lambda: None)


def test_a_version_is_confirmed_by_who_received_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)  # vLLM replaces it on CPUs
    worker, receiver = Worker(), Receiver()
    assert worker.receive_refit(1) == "worker 3: connect_refit() comes first"
    worker.receiver = receiver
    assert worker.confirm_refit(1) == "worker 3 holds version None of the weights, and not 1"
    assert worker.receive_refit(1) is None
    assert worker.confirm_refit(1) is None
    assert worker.confirm_refit(2) == "worker 3 holds version 1 of the weights, and not 2"
    receiver.refused = 2
    assert worker.receive_refit(2) == "worker 3: a checksum is broken"
    assert worker.confirm_refit(1) == "worker 3 holds version None of the weights, and not 1"
    receiver.refused = None
    assert worker.receive_refit(2) is None
    assert worker.confirm_refit(2) is None
