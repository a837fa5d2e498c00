"""Serves the page of runs that are followed, on this machine alone and to who has the token.

A text of a run may be any text of a model: it leaves here as JSON, and the page shows it as text only.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any

from aiohttp import web

from megatron_grpo.observability.live import lanes
from megatron_grpo.observability.live.followed_run import SOURCES, FollowedRun, format_json
from megatron_grpo.observability.page.write import SCRIPTS, make_runs_element, read_assets, render_page

HOST = "127.0.0.1"
OWN_NAMES = ("127.0.0.1", "localhost", "[::1]")  # in the header Host: also at the near end of an SSH tunnel
MOST_WINDOW_S = 30 * 86400.0
_LIVE_SCRIPTS = ("processes.js", "live.js")  # before the last of SCRIPTS, which starts the page
_COOKIE = "megatron_grpo_watch_{}".format  # by port: browsers send cookies to all ports of a host
_REFUSED = {"Content-Type": "text/plain; charset=utf-8", "X-Content-Type-Options": "nosniff"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageServer:
    """The page of some runs, and the data that it asks for."""

    def __init__(self, runs: Sequence[FollowedRun], token: str) -> None:
        self.runs, self._token = list(runs), token
        self.port = 0  # set by `start`
        self._runner: web.AppRunner | None = None
        self._reading = asyncio.Lock()  # one reader at a time: two pages would do the same work

    async def start(self, port: int) -> None:
        """Listen at a port, 0 for a free one; OSError: it is in use."""
        app = web.Application(middlewares=[self._check_access])
        app.add_routes(
            [
                web.get("/", self._send_page),
                web.get("/api/state", self._send_state),
                web.get("/api/lanes", self._send_lanes),
                web.get("/api/table", self._send_table),
                web.get("/api/prompt", self._send_prompt),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def address(self) -> str:
        """The address that a person opens."""
        return f"http://{HOST}:{self.port}/?token={self._token}"

    @web.middleware
    async def _check_access(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        host, _, _ = request.headers.get("Host", "").rpartition(":")
        if (host or request.headers.get("Host", "")) not in OWN_NAMES:  # else a page elsewhere could name this machine
            return web.Response(status=421, text="this name is not of the machine itself", headers=_REFUSED)
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return web.Response(status=403, text="requests of other web pages are not answered", headers=_REFUSED)
        sent_token = request.query.get("token") or request.cookies.get(_COOKIE(self.port), "")
        if not secrets.compare_digest(sent_token.encode(), self._token.encode()):
            text = "wrong or missing token: open the address that the command has printed"
            return web.Response(status=401, text=text, headers=_REFUSED)
        try:
            response = await handler(request)
        except (LookupError, OSError, ValueError) as error:
            response = web.Response(status=404, text=str(error), headers=_REFUSED)
        response.headers.update({"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"})
        response.headers.update({"Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"})
        return response

    async def _send_page(self, request: web.Request) -> web.StreamResponse:
        if "token" in request.query:  # out of the address bar and the browser's history
            response = web.HTTPSeeOther("/")
            response.set_cookie(_COOKIE(self.port), self._token, httponly=True, samesite="Strict", path="/")
            return response
        state = await self._read(self._make_state, [{} for _ in self.runs])
        first = [
            news["description"]
            | news["figures"]
            | {f"{source}_tables": table for source, table in news["tables"].items()}
            | {"live": news["known"]}
            for news in state["runs"]
        ]
        style, script, body = read_assets((*SCRIPTS[:-1], *_LIVE_SCRIPTS, SCRIPTS[-1]))
        title = "Run, followed" if len(self.runs) == 1 else "Runs, followed"
        text = render_page(style, script, body, [make_runs_element(first)], title, asks=True)
        return web.Response(text=text, content_type="text/html")

    async def _send_state(self, request: web.Request) -> web.StreamResponse:
        earlier = json.loads(request.query.get("known", "[]"))
        if not isinstance(earlier, list) or not all(isinstance(entry, dict) for entry in earlier):
            raise ValueError("known is not a list of objects")
        return await self._send_json(self._make_state, (earlier + [{}] * len(self.runs))[: len(self.runs)])

    async def _send_lanes(self, request: web.Request) -> web.StreamResponse:
        run, seconds = self._choose_run(request), float(request.query.get("seconds", "60"))
        end = float(request.query["end"]) if "end" in request.query else None
        return await self._send_json(make_lanes_answer, run, min(max(seconds, 0.1), MOST_WINDOW_S), end)

    async def _send_table(self, request: web.Request) -> web.StreamResponse:
        run, source = self._choose_run(request), _choose_source(request)
        return await self._send_json(run.make_table, source, int(request.query["step"]))

    async def _send_prompt(self, request: web.Request) -> web.StreamResponse:
        run, source = self._choose_run(request), _choose_source(request)
        return await self._send_json(run.find_prompt, source, int(request.query["prompt"]))

    def _choose_run(self, request: web.Request) -> FollowedRun:
        number = int(request.query.get("run", "0"))
        if not 0 <= number < len(self.runs):
            raise LookupError(f"there is no run {number}")
        return self.runs[number]

    def _make_state(self, earlier: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Make the part of each run that is new.

        `earlier`: `known` of the last answers, which the page sends back.
        """
        answers = [run.select_news(answer) for run, answer in zip(self.runs, earlier, strict=True)]
        return {"runs": answers, "time": datetime.now().strftime("%H:%M:%S")}

    async def _read(self, work: Callable[..., Any], *arguments: Any) -> Any:
        async with self._reading:
            return await asyncio.to_thread(work, *arguments)

    async def _send_json(self, work: Callable[..., Any], *arguments: Any) -> web.Response:
        text = await self._read(lambda: format_json(work(*arguments)))
        response = web.Response(text=text, content_type="application/json")
        response.enable_compression()
        return response


def _choose_source(request: web.Request) -> str:
    source = request.query.get("source", "training")
    if source not in SOURCES:
        raise LookupError("source is training or validation")
    return source


def make_lanes_answer(run: FollowedRun, seconds: float, end: float | None) -> dict[str, Any]:
    """Make the lanes of `seconds` until `end`.

    `end`: seconds since the epoch; None: the last sign of the run.
    """
    end = lanes.find_last_time(run.folder) if end is None else min(end, time.time())
    begin = end - seconds
    return lanes.make_lanes(lanes.read_spans(run.folder, begin, end), begin, end)
