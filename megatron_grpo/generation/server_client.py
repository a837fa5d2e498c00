"""A vLLM server over HTTP: questions and answers as JSON, and what is said when there is none."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp

CONNECT_S = 10.0
PROBE_S = 1.0
"""Seconds between two looks for a server that does not answer."""


class ServerGoneError(Exception):
    """The connection could not be made, or ended before the answer."""


class ServerClient:
    """One server. To be made inside an event loop.

    Args:
        url: "http://HOST:PORT".
        bearer: token that the server wants of whoever asks; None: it wants none.
    """

    def __init__(self, url: str, bearer: str | None) -> None:
        self.url = url.rstrip("/")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # vLLM's scheduler decides what waits
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers={} if bearer is None else {"Authorization": f"Bearer {bearer}"},
        )

    async def post(self, path: str, body: Any = None, **query: str) -> Any:
        """The answer to a POST, as JSON.

        Raises:
            ServerGoneError: the server went away, or is not there.
            RuntimeError: it refuses; says what it said.
        """
        return await self._ask("POST", path, json={} if body is None else body, params=query)

    async def get(self, path: str) -> Any:
        """The answer to a GET, as JSON; raises as `post` does."""
        return await self._ask("GET", path)

    async def on_workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of refit.worker.RefitWorker on every worker of the server; their answers. Raises as `post`."""
        answer = await self.post("/collective_rpc", {"method": method, "args": list(arguments)})
        results: list[Any] = answer["results"]
        return results

    async def wait_until_up(self, timeout_s: float) -> None:
        """Return when the server answers.

        Raises:
            RuntimeError: it does not within the time; says why.
        """
        end, reason = time.monotonic() + timeout_s, "it says nothing"
        while time.monotonic() < end:
            try:
                async with asyncio.timeout(max(end - time.monotonic(), 0.0)):
                    await self.get("/health")
                return
            except (ServerGoneError, RuntimeError) as error:
                reason = str(error)
            except TimeoutError:
                break
            await asyncio.sleep(min(PROBE_S, max(end - time.monotonic(), 0.0)))
        raise RuntimeError(f"no vLLM server answers within generation.server.timeout_s={timeout_s:g} s: {reason}")

    async def close(self) -> None:
        """End all connections."""
        await self._session.close()

    async def _ask(self, method: str, path: str, **given: Any) -> Any:
        try:
            async with self._session.request(method, self.url + path, **given) as answer:
                if answer.status == 401:
                    raise RuntimeError(f"{self.url} wants another token than that of MEGATRON_GRPO_TOKEN, or any")
                if answer.status >= 400:
                    raise RuntimeError(f"{self.url}{path} answers {answer.status}: {_said(await answer.text())}")
                return await answer.json() if answer.content_type == "application/json" else None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerGoneError(f"{self.url}: {error}") from error


def _said(text: str) -> str:
    """The beginning of an answer that refuses."""
    return text if len(text) <= 500 else f"{text[:500]}…"
