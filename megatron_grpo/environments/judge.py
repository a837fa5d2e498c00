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


class JudgeEnvironment(Environment):
    """The last "Score: N" in a judge's answer, between 0 and 1. Without one, or beyond its range, there is no reward.

    Args:
        model: name of the judge at its endpoint.
        url: the judge's OpenAI-compatible endpoint, up to the version: /chat/completions is appended.
        question: text of the request; {prompt}, {response}, {answer}, {lowest} and {highest} are filled in.
        lowest: score that becomes reward 0.
        highest: score that becomes reward 1.
        correct_from: reward from which a response counts as correct; None: unknown.
        max_tokens: longest answer of the judge.
        request_timeout_s: deadline of one request.
        attempts: how often a request is made before its response fails, with growing pauses.
        requests_at_once: concurrent requests of one process of the environment.
        api_key_variable: environment variable with the key of the endpoint; None: it needs none.
    """

    def __init__(
        self,
        model: str,
        url: str = "http://127.0.0.1:8000/v1",
        question: str = QUESTION,
        lowest: float = 0.0,
        highest: float = 10.0,
        correct_from: float | None = None,
        max_tokens: Positive = 512,
        request_timeout_s: Seconds = 60.0,
        attempts: Positive = 3,
        requests_at_once: Positive = 8,
        api_key_variable: str | None = None,
    ) -> None:
        if highest <= lowest:
            raise ValueError(f"options.highest={highest:g} must be above options.lowest={lowest:g}")
        self._model, self._url, self._question = model, f"{url.rstrip('/')}/chat/completions", question
        self._lowest, self._highest, self._correct_from = lowest, highest, correct_from
        self._max_tokens, self._timeout_s, self._attempts = max_tokens, request_timeout_s, attempts
        self._key = None if api_key_variable is None else os.environ.get(api_key_variable, "").strip()
        if self._key == "":
            text = "the environment has no such variable; export it where the run is started"
            raise ValueError(f"options.api_key_variable={api_key_variable}: {text}")
        self._pool = ThreadPoolExecutor(requests_at_once)
        # A proxy cannot reach the loopback of this machine.
        local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
        self._opener = urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if local else []))

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """The judge's scores, from concurrent requests.

        Raises:
            RunError: the endpoint did not answer, or refused.
        """
        return list(self._pool.map(self._judged, requests))

    def _judged(self, request: EnvironmentRequest) -> EnvironmentReturn:
        score = self._score_in(self._ask(self._asked(request)))
        if score is None:
            return EnvironmentReturn(reward=None, correct=None)
        reward = (score - self._lowest) / (self._highest - self._lowest)
        return EnvironmentReturn(
            reward=reward, correct=None if self._correct_from is None else reward >= self._correct_from
        )

    def _asked(self, request: EnvironmentRequest) -> str:
        """The question about a response; braces in the filled-in texts stay as they are."""
        prompt = request.prompt
        if not isinstance(prompt, str):
            prompt = "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in prompt)
        filled = {
            "prompt": prompt,
            "response": request.response,
            "answer": str(request.extra_env_info.get(REFERENCE, "none is known")),
            "lowest": f"{self._lowest:g}",
            "highest": f"{self._highest:g}",
        }
        return re.sub(r"\{(" + "|".join(filled) + r")\}", lambda found: filled[found[1]], self._question)

    def _score_in(self, answer: str) -> float | None:
        """The last score in an answer; None: there is none, or it is out of range."""
        found = _SCORE.findall(answer)
        score = float(found[-1]) if found else None
        return score if score is not None and self._lowest <= score <= self._highest else None

    def _ask(self, question: str) -> str:
        """The judge's answer; "" when the reply is malformed."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._max_tokens,
            "temperature": 0.0,
        }
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        reason, attempts = "", 0
        for attempts in range(1, self._attempts + 1):
            if attempts > 1:
                time.sleep(min(2.0**attempts / 8, 10.0))
            try:
                sent = urllib.request.Request(self._url, json.dumps(body).encode(), headers)
                with self._opener.open(sent, timeout=self._timeout_s) as reply:
                    return _content(reply.read(_LARGEST_ANSWER))
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code} {error.reason}"
                if error.code not in _TRANSIENT:
                    break
            except (OSError, http.client.HTTPException) as error:
                reason = f"{type(error).__name__}: {error}"
        raise RunError(f"the judge at {self._url} gave no answer in {attempts} of {self._attempts} attempts: {reason}")


def _content(reply: bytes) -> str:
    """The text of the first choice of a reply; "" when the reply is malformed."""
    try:
        content: Any = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return ""
    return content if isinstance(content, str) else ""
