"""Parts of the soak: its agent, environment, engine and tokenizer; as a program, an MCP server whose tools lie."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from megatron_grpo.batch.generation_requests import EngineCounts, GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.cluster.futures import wrap_for_pickling
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, ModelAccess, Turn
from megatron_grpo.environments.interface import Environment

KINDS = (
    *("agent retries", "agent cancels", "agent floods", "agent sends garbage") * 2,
    *("tool hangs", "tool dies", "tool lies", "step hangs", "step dies", "server lost"),
    *("agent plain", "agent raises", "tool plain", "step plain", "step raises", "score raises"),
)
"""Kind of the row with that number, in turn: of each ten rollouts one retries, cancels, floods, sends garbage, and has
a tool that hangs, dies or lies."""
GOOD, BAD = "good.", "bad."
CALLS = {
    "tool plain": '{"name": "multiply", "arguments": {"first": 6, "second": 7}}',
    "tool hangs": '{"name": "hang", "arguments": {}}',
    "tool dies": '{"name": "die", "arguments": {}}',
    "tool lies": '{"name": "lie", "arguments": {}}',
}
ENGINE_S = 0.02  # of a response
FLOOD = 150
TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}:{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<e>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Write a tokenizer of single characters, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        token: number for number, token in enumerate(["<e>", "<s>", "<unk>", *map(chr, range(32, 127)), "\n"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    names = {"eos_token": "<e>", "pad_token": "<e>", "unk_token": "<unk>", "additional_special_tokens": ["<s>"]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **names).save_pretrained(folder)


def find_kind(text: str) -> str:
    """Find the kind of a row in its prompt, which ends with its number."""
    return KINDS[int(text.partition("row ")[2][:6]) % len(KINDS)]


def write_answer(seed: int) -> str:
    return BAD if seed % 2 else GOOD


class ScriptedEngine:
    """Ray actor in the place of a vLLM engine: calls the row's tool, then answers by its seed."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str
    ) -> AsyncIterator[Any]:
        """As `VllmEngine.generate`."""
        await asyncio.sleep(ENGINE_S)
        yield wrap_for_pickling([(number, self._respond(request)) for number, request in enumerate(requests)])

    def _respond(self, request: GenerationRequest) -> GenerationOutput:
        prompt = self._tokenizer.decode(request.prompt_ids)
        kind, has_called = find_kind(prompt), "tool:" in prompt
        calls = kind in CALLS and not has_called
        text = f"<tool_call>{CALLS[kind]}</tool_call>" if calls else write_answer(request.seed)
        ids = np.array([*self._tokenizer.encode(text), 0], np.int32)
        logprobs = np.full(len(ids), -1.0, np.float32)
        return GenerationOutput(
            token_ids=ids, logprobs=logprobs, text=text, stop_reason="stop", spans=[Span(0, len(ids), 1)]
        )

    def take_counts(self) -> EngineCounts:
        """As `VllmEngine.take_counts`."""
        return EngineCounts(running=1)

    async def abort(self, call: str, indices: list[int]) -> None:
        """As `VllmEngine.abort`."""


GARBAGE: Sequence[Any] = (
    b"",
    b"{",
    b"\xff\xfe",
    b'"\\ud800"',
    b"[" * 100_000,
    {},
    {"messages": "x"},
    {"messages": [{"role": 3, "content": "x"}]},
    {"messages": [{"role": "user", "content": {"a": [None]}}]},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"},
    {"messages": [{"role": "user", "content": "x"}], "n": 10**9},
    {"messages": [{"role": "user", "content": "x"}], "stop": [1, 2]},
    {"messages": [{"role": "user", "content": "x" * 300_000}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"function": 7}]}]},
    {"messages": [{"role": "user", "content": "x"}], "tools": [[]]},
)


async def ask_model(prompt: str, access: ModelAccess, **columns: Any) -> dict[str, Any]:
    """Agent of all its kinds; returns its last answer, and the number of answers that it got."""
    kind = find_kind(prompt)
    call = {"model": access.model, "messages": [{"role": "user", "content": prompt}]}
    headers = {"Authorization": f"Bearer {access.token}"}
    answered = 0
    limits = httpx.Limits(max_connections=FLOOD)
    async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False, limits=limits) as client:
        url = f"{access.base_url}/chat/completions"

        async def ask(timeout_s: float = 60.0) -> str | None:
            nonlocal answered
            reply = await client.post(url, json=call, timeout=timeout_s)
            if reply.status_code == httpx.codes.TOO_MANY_REQUESTS:
                return None
            assert reply.is_success, f"HTTP {reply.status_code}: {reply.text[:200]}"
            answered += 1
            return str(reply.json()["choices"][0]["message"]["content"])

        if kind == "agent retries":
            for _ in range(3):
                try:
                    await ask(ENGINE_S / 4)
                except httpx.TimeoutException:
                    continue
        if kind == "agent cancels":
            tasks = [asyncio.create_task(ask()) for _ in range(8)]
            for task in tasks:
                await asyncio.sleep(ENGINE_S / 8)
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if kind == "agent floods":
            await asyncio.gather(*(ask() for _ in range(FLOOD)))
        if kind == "agent sends garbage":
            for body in GARBAGE:
                content = {"content": body} if isinstance(body, bytes) else {"json": body}
                reply = await client.post(url, **content)
                assert 400 <= reply.status_code < 500, f"HTTP {reply.status_code} for {body!r:.80}"
        text = await ask()
        if kind == "agent raises" and text == BAD:
            raise ValueError(f"cannot use {text}")
        return {"text": text, "answered": answered, "end": time.monotonic()}


def grade(completions: Sequence[Any], agent_result: Sequence[dict[str, Any]], log_extra: Any, **_: Any) -> list[float]:
    """1 for an agent whose last answer is good."""
    log_extra("answered", [str(result["answered"]) for result in agent_result])
    return [float(result["text"] == GOOD) for result in agent_result]


class StepEnvironment(Environment):
    """Hangs, dies or raises over a bad answer, by the row's kind; a lost server is lost for both."""

    multi_turn = True

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> str:
        return find_kind(str(prompt))

    def step(self, state: str, response: str) -> Turn:
        if state == "server lost":
            raise ConnectionResetError("the server of this row is gone")
        if response == BAD:
            while state == "step hangs":
                time.sleep(1)
            if state == "step dies":
                os._exit(1)
            if state == "step raises":
                raise KeyError(response)
        return Turn(state=state)

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        for request in requests:
            if request.state == "score raises" and request.response == BAD:
                raise ValueError("cannot score this")
        return [
            EnvironmentReturn(reward=float(request.response == GOOD), correct=request.response == GOOD)
            for request in requests
        ]
