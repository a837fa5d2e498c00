"""What an engine leaves in vLLM when a call fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.data.responses import GenerationRequest, SamplingSettings
from megatron_grpo.generation import vllm_engine
from megatron_grpo.generation.vllm_arguments import VllmSettings
from megatron_grpo.generation.vllm_engine import VllmEngine
from megatron_grpo.generation.vllm_pauses import Pauses


class PickyLLM:
    """vLLM as far as requests come and go; it refuses one of them."""

    errored = False

    def __init__(self, refused: str) -> None:
        self.refused = refused
        self.requests: set[str] = set()

    async def pause_generation(self, **_: Any) -> None: ...

    async def add_request(self, name: str, *_: Any) -> None:
        if name == self.refused:
            raise ValueError("this prompt cannot be sampled")
        self.requests.add(name)

    async def abort(self, names: list[str]) -> None:
        self.requests -= set(names)


def test_a_call_that_fails_leaves_no_request_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vllm_engine, "begin_process_log", lambda _: None)
    settings = VllmSettings(
        index=0,
        model_path=str(tmp_path),
        config=GenerationConfig(),
        precision="float32",
        max_total_sequence_length=8,
    )
    request = GenerationRequest(prompt_ids=np.array([2, 3], dtype=np.int32), seed=0, max_new_tokens=2)

    async def scene() -> None:
        engine = VllmEngine(settings)
        llm: Any = PickyLLM(refused="call.1")
        engine._llm, engine._pauses = llm, Pauses(llm, keeps_cache=False, tell=lambda _: None)
        with pytest.raises(ValueError, match="cannot be sampled"):
            async for _ in engine.generate([request] * 3, SamplingSettings(max_new_tokens=2), "call"):
                pass
        assert not llm.requests
        await engine.sleep()

    asyncio.run(scene())
