"""When an engine counts as paused."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation import vllm_engine
from megatron_grpo.generation.vllm_arguments import VllmSettings
from megatron_grpo.generation.vllm_engine import VllmEngine


class PausableLLM:
    """vLLM as far as pausing goes."""

    errored = False

    async def pause_generation(self, **_: Any) -> None: ...


def engine_with_responses(count: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> VllmEngine:
    """An engine that samples so many responses."""
    monkeypatch.setattr(vllm_engine, "begin_process_log", lambda _: None)
    settings = VllmSettings(
        index=0,
        model_path=str(folder),
        config=GenerationConfig(),
        precision="float32",
        max_total_sequence_length=8,
    )
    engine = VllmEngine(settings)
    llm: Any = PausableLLM()
    engine._llm, engine._in_flight = llm, count
    return engine


def test_responses_that_were_given_up_may_still_be_on_their_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def scene() -> None:
        engine = engine_with_responses(2, monkeypatch, tmp_path)
        asyncio.get_running_loop().call_later(0.2, engine._left, 2)
        await engine.sleep()
        assert engine._asleep

    asyncio.run(scene())


def test_responses_that_stay_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def scene() -> None:
        engine = engine_with_responses(2, monkeypatch, tmp_path)
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="2 responses are in flight"):
            await engine.sleep()
        assert time.monotonic() - began >= 0.3
        assert not engine._asleep

    monkeypatch.setattr(vllm_engine, "LEAVE_S", 0.3)
    asyncio.run(scene())
