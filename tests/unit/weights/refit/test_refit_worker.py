"""What a generation worker says of the version that it holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from megatron_grpo.weights.refit.worker import RefitWorker


class Worker(RefitWorker):
    """As mixed into vLLM's worker, whose model takes every version but those named here."""

    rank = 3
    refused: int | None = None
    weight_transfer_engine: Any = SimpleNamespace(abandon=lambda: None)

    def start_weight_update(self) -> None: ...

    def update_weights(self, update: dict[str, Any]) -> None:
        if update["version"] == self.refused:
            raise ValueError("a checksum is broken")

    def finish_weight_update(self) -> None: ...


def test_a_version_is_confirmed_by_who_received_it_whole() -> None:
    worker = Worker()
    assert worker.confirm_refit(1) == "worker 3 holds version None of the weights, and not 1"
    assert worker.receive_refit(1) is None
    assert worker.confirm_refit(1) is None
    assert worker.confirm_refit(2) == "worker 3 holds version 1 of the weights, and not 2"
    worker.refused = 2
    assert worker.receive_refit(2) == "worker 3: a checksum is broken"
    assert worker.confirm_refit(1) == "worker 3 holds version None of the weights, and not 1"
    worker.refused = None
    assert worker.receive_refit(2) is None
    assert worker.confirm_refit(2) is None
