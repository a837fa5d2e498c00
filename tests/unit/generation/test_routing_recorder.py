"""What a CPU engine's worker records of made-up forward passes: preemption, requests in any order."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatron_grpo.generation.cpu_worker import RoutingRecorder
from megatron_grpo.generation.vllm_requests import read_chosen_experts
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.platform import device

LAYERS = (0, 2)


@dataclass
class Pass:
    """A forward pass as vLLM's scheduler tells of it; tokens are numbers, and tell their experts."""

    tokens: dict[str, list[int]]
    """By request, in the order of the pass."""
    old: dict[str, int] = field(default_factory=dict)
    """Tokens of earlier requests that were computed."""

    @property
    def scheduled(self) -> Any:
        """As vLLM's SchedulerOutput."""
        cached = SimpleNamespace(req_ids=list(self.old), num_computed_tokens=list(self.old.values()))
        counts = {name: len(tokens) for name, tokens in self.tokens.items()}
        return SimpleNamespace(scheduled_cached_reqs=cached, num_scheduled_tokens=counts)


def experts_of(tokens: list[int], layer: int) -> list[list[int]]:
    """[tokens, 2]."""
    return [[token + layer, 100 + token + layer] for token in tokens]


def run(recorder: RoutingRecorder, one: Pass) -> None:
    """Let the layers capture a pass, padding behind its tokens, and end it."""
    flat = [token for tokens in one.tokens.values() for token in tokens]
    for layer in LAYERS:
        recorder._capture(layer, torch.tensor([*experts_of(flat, layer), [-7, -7]]))
    recorder.end_step(one.scheduled, ["gone", *one.tokens])


def expect(recorder: RoutingRecorder, name: str, tokens: list[int]) -> None:
    taken = recorder.take(name)
    assert {layer: rows.tolist() for layer, rows in taken.items()} == {
        layer: experts_of(tokens, layer) for layer in LAYERS
    }
    assert recorder.take(name) == {}, "forgotten"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> RoutingRecorder:
    pytest.importorskip("vllm")
    return RoutingRecorder(nn.Identity())


def test_passes_are_shared_out_over_requests(recorder: RoutingRecorder) -> None:
    run(recorder, Pass({"x.1-ab": [1, 2, 3], "x.11-cd": [9]}))
    run(recorder, Pass({"x.11-cd": [8], "x.1-ab": [4]}, old={"x.1-ab": 3, "x.11-cd": 1}))
    run(recorder, Pass({"x.11-cd": [7]}, old={"x.11-cd": 2}))
    expect(recorder, "x.1", [1, 2, 3, 4])
    expect(recorder, "x.11", [9, 8, 7])
    assert recorder.take("never ran") == {}


def test_a_preempted_request_begins_anew(recorder: RoutingRecorder) -> None:
    run(recorder, Pass({"a-0": [1, 2, 3, 4]}))
    run(recorder, Pass({"a-0": [5]}, old={"a-0": 4}))
    run(recorder, Pass({"a-0": [1, 2, 3, 4, 15]}, old={"a-0": 0}))
    expect(recorder, "a", [1, 2, 3, 4, 15])


FORM = RoutedForm(layers=(1, 3), top_k=2, experts=8)


def final(name: str, prompt: int, response: int, routed: Any = None) -> Any:
    """As vLLM's RequestOutput."""
    completion = SimpleNamespace(token_ids=[0] * response, routed_experts=routed)
    return SimpleNamespace(request_id=name, prompt_token_ids=[0] * prompt, outputs=[completion])


def on_platform(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(device, "detect_platform", lambda: SimpleNamespace(name=name))


def test_stages_of_a_cpu_engine_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that only splits matrices tells nothing; after a stop string the engine has gone further."""
    on_platform(monkeypatch, "cpu")
    first, second = np.arange(10, dtype=np.int16).reshape(5, 2), np.arange(10, 20, dtype=np.int16).reshape(5, 2)

    class Engine:
        async def collective_rpc(self, method: str, args: tuple[list[str]]) -> list[Any]:
            assert (method, args) == ("take_routing", (["a", "b"],))
            return [{"a": {1: first.tobytes()}}, {}, {"a": {3: second.tobytes()}}, {}]

    finals = [final("a", prompt=2, response=2), final("b", prompt=1, response=0)]
    found, nothing = asyncio.run(read_chosen_experts(Engine(), finals, FORM))  # type: ignore[arg-type]  # a made-up engine
    assert found.tolist() == np.concatenate([first, second], axis=1)[:3].tolist()
    assert nothing.shape == (0, 4)


def test_vllm_returns_them_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    on_platform(monkeypatch, "cuda")
    chosen = np.arange(3 * 4 * 2, dtype=np.uint8).reshape(3, 4, 2)
    finals = [final("a", prompt=2, response=2, routed=chosen), final("b", prompt=1, response=0)]
    found, nothing = asyncio.run(read_chosen_experts(None, finals, FORM))  # type: ignore[arg-type]  # nobody asks it
    assert found.dtype == np.int8
    assert found.tolist() == [[*row[1], *row[3]] for row in chosen.tolist()]
    assert nothing.shape == (0, 4)
