"""What an engine leaves in vLLM when a call or a commit fails, and when it may sleep."""

import asyncio
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_grpo.batch.generation_requests import GenerationRequest, SamplingSettings
from megatron_grpo.config.loop_schema import AsyncGRPOConfig
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation import engine as vllm_engine
from megatron_grpo.generation import gate as engine_gate
from megatron_grpo.generation.engine import VllmEngine
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.engine_canary import CanaryPrompt
from megatron_grpo.generation.gate import Gate


class PickyLLM:
    """vLLM as far as requests come and go; it refuses one of them."""

    errored = False

    def __init__(self, refused: str) -> None:
        self.refused = refused
        self.requests: set[str] = set()
        self.version = ""

    async def pause_generation(self, **_: Any) -> None: ...

    async def resume_generation(self) -> None: ...

    async def add_request(self, name: str, *_: Any, **__: Any) -> None:
        if name == self.refused:
            raise ValueError("this prompt cannot be sampled")
        self.requests.add(name)

    async def collective_rpc(self, *_: Any, **__: Any) -> list[str]:
        return ["worker 0 holds version 3, not 4"]

    async def update_weight_version(self, version: str) -> None:
        await asyncio.sleep(0.2)
        self.version = version

    async def reset_prefix_cache(self) -> None: ...

    async def abort(self, names: list[str]) -> None:
        self.requests -= set(names)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> VllmEngine:
    monkeypatch.setattr(vllm_engine, "begin_process_log", lambda _: None)
    settings = VllmSettings(
        index=0,
        model_path=str(tmp_path),
        config=GenerationConfig(),
        precision="float32",
        max_total_sequence_length=8,
    )
    return VllmEngine(settings)


def start_llm(engine: VllmEngine) -> PickyLLM:
    """The vLLM that this engine has from now on."""
    llm: Any = PickyLLM(refused="call.1")
    engine._llm = llm
    in_flight = engine._settings.in_flight is not None
    change = engine._statistics.set_in_flight
    engine._gate = Gate(llm, updates_in_flight=in_flight, keeps_cache=False, on_change=change)
    return llm


async def test_a_call_that_fails_leaves_no_request_behind(engine: VllmEngine) -> None:
    request = GenerationRequest(prompt_ids=np.array([2, 3], dtype=np.int32), seed=0, max_new_tokens=2)
    llm = start_llm(engine)
    with pytest.raises(ValueError, match="cannot be sampled"):
        async for _ in engine.generate([request] * 3, SamplingSettings(max_new_tokens=2), "call"):
            pass
    assert not llm.requests
    await engine.sleep()
    assert engine._gate.is_closed("memory")


async def test_a_commit_that_fails_leaves_nothing_of_it_under_way(engine: VllmEngine) -> None:
    llm = start_llm(engine)
    await engine._gate.close("weights", "the weights are incomplete")
    with pytest.raises(RuntimeError, match="holds version 3, not 4"):
        await engine.commit_weights(4)
    assert llm.version == "4", "a call that cannot be taken back has ended"
    with pytest.raises(RuntimeError, match="the weights are incomplete"):
        engine._gate.require_open()


async def test_prompts_cached_under_earlier_weights_are_not_used(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that outlasts refits is kept apart by the version of the weights."""
    async_settings = AsyncGRPOConfig(enabled=True, recompute_kv_cache_after_weight_updates=False)
    engine._settings = replace(engine._settings, in_flight=async_settings)
    contents: list[dict[str, str]] = []

    def record(tokens: list[int]) -> dict[str, str]:
        contents.append({})
        return contents[-1]

    monkeypatch.setattr("vllm.inputs.engine.tokens_input", record)
    request = GenerationRequest(prompt_ids=np.array([2, 3], dtype=np.int32), seed=0, max_new_tokens=2)
    llm: Any = start_llm(engine)
    monkeypatch.setattr(engine, "_call_workers", _confirm)
    for version in (1, 2, 3):
        await engine._gate.close("weights", "the weights are incomplete")
        await engine.commit_weights(version)
        llm.refused = f"{version}.0"
        with pytest.raises(ValueError, match="cannot be sampled"):
            await engine._add(str(version), [request], SamplingSettings(max_new_tokens=2))
    assert len({content["cache_salt"] for content in contents}) == 3


async def _confirm(*_: Any) -> list[None]:
    return [None]


async def test_a_canary_that_vllm_refuses_is_skipped(engine: VllmEngine, caplog: pytest.LogCaptureFixture) -> None:
    """A difference ends the run, but not an error in what only the canary uses."""
    llm = start_llm(engine)
    llm.refused = "canary.1"
    await engine._gate.close("weights", "version 3 has not passed the canary")
    prompt = CanaryPrompt(3, ((5, 6), (7, 8, 9)), expected=((-1.0,), (-1.0, -2.0)), limit=0.1)
    assert math.isnan((await engine.check_canary(prompt)).error)
    assert not llm.requests
    assert not engine._gate.is_closed("weights")
    assert "version 3 was not compared: ValueError: this prompt cannot be sampled" in caplog.text


async def test_an_engine_sleeps_under_responses_in_flight_if_weights_may_change_under_them(engine: VllmEngine) -> None:
    engine._settings = replace(engine._settings, in_flight=AsyncGRPOConfig(enabled=True))
    start_llm(engine)
    async with engine._gate.admission(1):
        pass
    await engine.sleep()
    assert engine._gate.is_closed("memory")
    late = GenerationRequest(prompt_ids=np.array([2, 3], dtype=np.int32), seed=0, max_new_tokens=2)
    calls = engine.generate([late], SamplingSettings(max_new_tokens=2), "late")
    future: asyncio.Future[Any] = asyncio.ensure_future(anext(calls))
    await asyncio.sleep(0.05)
    assert not future.done(), "it waits"
    future.cancel()
    await engine.wake("weights")
    assert engine._gate.is_closed("memory")
    await engine.wake("kv_cache")
    assert not engine._gate.is_closed("memory")
    assert engine.take_counts().busy_s < 0.05, "it was not busy while it slept"


async def test_responses_in_flight_do_not_go_on_between_waking_and_the_canary(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmSettings, "sleeps", property(lambda _: True))
    engine._settings = replace(engine._settings, in_flight=AsyncGRPOConfig(enabled=True))
    llm: Any = start_llm(engine)
    calls: list[str] = []

    async def record(name: str, *arguments: Any, **_: Any) -> None:
        calls.append(" ".join([name, *map(str, arguments)]))

    llm.engine_core = SimpleNamespace(call_utility_async=record)
    llm.sleep = partial(record, "sleep")
    llm.resume_generation = partial(record, "resume")
    async with engine._gate.admission(1):
        pass
    await engine.sleep()
    calls.clear()
    await engine.wake("weights")
    await engine._gate.close("weights", "version 4 of the weights has not passed the canary")
    await engine.wake("kv_cache")
    assert calls == ["wake_paused ['weights']", "wake_paused ['kv_cache']"]
    await engine._gate.open("weights")
    assert calls[2:] == ["resume"]


@pytest.mark.parametrize(
    ("keep_weights", "awaits_refit", "level"), [(False, True, 2), (True, True, 1), (False, False, 1)]
)
async def test_a_sleeping_engine_keeps_weights_that_no_refit_brings(
    keep_weights: bool, awaits_refit: bool, level: int, engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine without a version of the weights refuses requests until one is committed."""
    engine._settings = replace(engine._settings, awaits_refit=awaits_refit)
    monkeypatch.setattr(VllmSettings, "sleeps", True)
    llm: Any = start_llm(engine)
    calls: list[Any] = []

    async def sleep(level: int, mode: str) -> None:
        calls.append((level, mode))

    async def call_workers(method: Any, *_: Any) -> None:
        calls.append(method.__name__)

    monkeypatch.setattr(llm, "sleep", sleep, raising=False)
    monkeypatch.setattr(engine, "_call_workers", call_workers)
    await engine.sleep(keep_weights)
    assert calls == [*(["keep_unsent"] if level == 2 else []), (level, "keep")]
    assert engine._gate.is_closed("weights") == (level == 2)


async def test_an_engine_sleeps_only_when_nothing_is_in_flight(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_gate, "DRAIN_S", 0.1)
    start_llm(engine)
    async with engine._gate.admission(1):
        pass
    with pytest.raises(RuntimeError, match="1 responses are in flight"):
        await engine.sleep()
    assert not engine._gate.is_closed("memory")
    engine._gate.leave(1)
    await engine.sleep()
    assert engine._gate.is_closed("memory")
