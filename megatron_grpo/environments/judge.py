"""Rewards from another model, the judge, over an OpenAI-compatible endpoint."""

from __future__ import annotations

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.section import Positive, Seconds
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import Environment

QUESTION = """Judge the response to a task. The task:
{prompt}

The response:
{response}

The reference answer: {answer}

Explain briefly, then end with a line "Score: N", N from {lowest} (useless) to {highest} (perfect)."""

_SCORE = re.compile(r"score\s*:\s*\**\s*(-?\d+(?:\.\d+)?)", re.IGNORECASE)
_LARGEST_ANSWER = 2**20
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses of transient failures."""


@dataclass(eq=False)
class JudgeEnvironment(Environment):
    """Reward from 0 to 1: the last "Score: N" in a judge's answer; no reward without one, or outside its range."""

    model: str
    """Name of the judge at its endpoint."""
    url: str = "http://127.0.0.1:8000/v1"
    """The judge's OpenAI-compatible endpoint, up to the version: /chat/completions is appended."""
    question: str = QUESTION
    """Text of the request; {prompt}, {response}, {answer}, {lowest} and {highest} are filled in."""
    lowest: float = 0.0
    """Score that becomes reward 0."""
    highest: float = 10.0
    """Score that becomes reward 1."""
    correct_from: float | None = None
    """Reward from which a response counts as correct; None: unknown."""
    max_tokens: Positive = 512
    """Most tokens of the judge's answer."""
    request_timeout_s: Seconds = 60.0
    """Deadline of one request, in seconds."""
    attempts: Positive = 3
    """Most attempts of a request, with growing pauses in between."""
    requests_at_once: Positive = 8
    """Concurrent requests of one environment process."""
    api_key_variable: str | None = None
    """Environment variable with the endpoint's API key; None: the endpoint needs none."""

    def __post_init__(self) -> None:
        if self.highest <= self.lowest:
            raise ValueError(f"options.highest={self.highest:g} must be above options.lowest={self.lowest:g}")
        self._headers = {"Content-Type": "application/json"}
        if self.api_key_variable is not None:
            key = os.environ.get(self.api_key_variable, "").strip()
            if not key:
                text = "the environment has no such variable; export it where the run is started"
                raise ValueError(f"options.api_key_variable={self.api_key_variable}: {text}")
            self._headers["Authorization"] = f"Bearer {key}"
        self._address = f"{self.url.rstrip('/')}/chat/completions"
        self._pool = ThreadPoolExecutor(self.requests_at_once)
        # A proxy cannot reach the loopback of this machine.
        local = urlsplit(self.url).hostname in ("127.0.0.1", "localhost", "::1")
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Ask the judge for scores in concurrent requests; RunError: the endpoint did not answer, and why."""
        return list(self._pool.map(self._judged, requests))

    def _judged(self, request: EnvironmentRequest) -> EnvironmentReturn:
        found = _SCORE.findall(self._ask(self._asked(request)))
        score = float(found[-1]) if found else None
        if score is None or not self.lowest <= score <= self.highest:
            return EnvironmentReturn(reward=None, correct=None)
        reward = (score - self.lowest) / (self.highest - self.lowest)
        correct = None if self.correct_from is None else reward >= self.correct_from
        return EnvironmentReturn(reward=reward, correct=correct)

    def _asked(self, request: EnvironmentRequest) -> str:
        """Fill in the question about a response; braces in the inserted texts are not replaced."""
        prompt = request.prompt
        if not isinstance(prompt, str):
            prompt = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
        filled = {
            "prompt": prompt,
            "response": request.response,
            "answer": str(request.extra_env_info.get(REFERENCE, "none is known")),
            "lowest": f"{self.lowest:g}",
            "highest": f"{self.highest:g}",
        }
        return re.sub(r"\{(" + "|".join(filled) + r")\}", lambda found: filled[found[1]], self.question)

    def _ask(self, question: str) -> str:
        """Ask the judge and return its answer; "" when the reply is malformed."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
        }
        reason, attempts = "", 0
        for attempts in range(1, self.attempts + 1):
            if attempts > 1:
                time.sleep(min(2.0**attempts / 8, 10.0))
            try:
                sent = urllib.request.Request(self._address, json.dumps(body).encode(), self._headers)
                with self._opener.open(sent, timeout=self.request_timeout_s) as reply:
                    return _content(reply.read(_LARGEST_ANSWER))
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code} {error.reason}"
                if error.code not in _TRANSIENT:
                    break
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
        raise RunError(
            f"the judge at {self._address} gave no answer in {attempts} of {self.attempts} attempts: {reason}"
        )


def _content(reply: bytes) -> str:
    """The text of the first choice of a reply; "" when the reply is malformed."""
    try:
        content: Any = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return ""
    return content if isinstance(content, str) else ""
