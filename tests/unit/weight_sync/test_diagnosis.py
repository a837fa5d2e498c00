"""After an attempt that failed: which engines are to be replaced, and when nothing helps. Ray is played."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from megatron_grpo.cluster import futures
from megatron_grpo.config.errors import EngineLostError
from megatron_grpo.weight_sync import refit_calls as diagnosis
from megatron_grpo.weight_sync.refit_calls import PolicyLostError

NEVER, FINE = object(), object()
TOLD = RayTaskError("receive_weights", "", RuntimeError("worker 0: message 3 did not come"))
LOST = RayTaskError("receive_weights", "", EngineLostError("a vLLM process of this engine has ended"))
DEAD = ActorDiedError()


def diagnosed(monkeypatch: pytest.MonkeyPatch, ranks: Sequence[Any], engines: Sequence[Any]) -> dict[int, str]:
    """What is said of calls of ranks and engines: FINE, an error, or NEVER over."""
    answers = {f"rank {number}": answer for number, answer in enumerate(ranks)}
    answers |= {f"engine {number}": answer for number, answer in enumerate(engines)}

    def wait(refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert refs, "Ray's own refuses to wait for nothing"
        over = [ref for ref in refs if answers[ref] is not NEVER]
        if len(over) < num_returns:
            time.sleep(timeout)
        return over, [ref for ref in refs if ref not in over]

    def get(ref: str) -> Any:
        if isinstance(answers[ref], Exception):
            raise answers[ref]
        return answers[ref]

    played: Any = SimpleNamespace(wait=wait, get=get, ObjectRef=str)
    monkeypatch.setattr(diagnosis, "ray", played)
    monkeypatch.setattr(futures, "ray", played)
    monkeypatch.setattr(diagnosis, "SETTLE_S", 0.1)
    sends: Any = [f"rank {number}" for number in range(len(ranks))]
    receives: Any = {number: f"engine {number}" for number in range(len(engines))}
    return diagnosis.find_lost_engines(sends, receives, "refit of version 3: late")


@pytest.mark.parametrize("engines", [[TOLD, FINE], [TOLD, TOLD]])
def test_who_can_say_what_went_wrong_is_not_lost(engines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert diagnosed(monkeypatch, [FINE, TOLD], engines) == {}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (LOST, "generation engine 1 is lost: a vLLM process of this engine has ended"),
        (DEAD, "generation engine 1 died (its process is gone)"),
        (NEVER, "generation engine 1 does not come back"),
    ],
)
@pytest.mark.parametrize("ranks", [[FINE, TOLD], []])
def test_engines_that_are_dead_or_silent_are_lost(
    ranks: list[Any], answer: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert diagnosed(monkeypatch, ranks, [TOLD, answer]) == {1: f"refit of version 3: late; {reason}"}


def test_a_rank_may_be_waiting_for_an_engine_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(diagnosed(monkeypatch, [NEVER, FINE], [NEVER, TOLD])) == [0]


@pytest.mark.parametrize(("ranks", "engines"), [([FINE, DEAD], [TOLD, TOLD]), ([TOLD, DEAD], [LOST, NEVER])])
def test_a_dead_rank_is_the_end_whatever_the_engines_are(
    ranks: list[Any], engines: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PolicyLostError, match=r"^refit of version 3: late; policy rank 1 is gone, and no rank of"):
        diagnosed(monkeypatch, ranks, engines)


def test_a_rank_that_nobody_keeps_waiting_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PolicyLostError, match=r"^refit of version 3: late; policy rank 0 is stuck, and no rank of"):
        diagnosed(monkeypatch, [NEVER, TOLD], [TOLD, TOLD])
