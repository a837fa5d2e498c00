"""A teacher on a server: requests, likeliest tokens and their tail, refusals."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megatron_grpo.algorithms.token_functions import merge_teacher_outputs
from megatron_grpo.config.errors import RunError
from megatron_grpo.generation.teacher_server import LEAST_TAIL, TeacherServer, fetch_teacher_outputs, pack_row

LENGTHS = np.array([3, 2])
ARRAYS = {
    "token_ids": np.array([4, 5, 6, 7, 8], dtype=np.int32),
    "sampled": np.array([False, True, True, False, True]),
}


def entry(probability: float, rank: int) -> dict[str, Any]:
    return {"logprob": math.log(probability), "rank": rank, "decoded_token": "x"}


@contextmanager
def serving(status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """A server that gives token t - 1 as the likeliest before t, then t itself, then a third."""
    requests: list[Any] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        requests.append(body)
        rows = [
            None,
            *({str(t): entry(0.25, 2), str(t - 1): entry(0.5, 1), "0": entry(0.1, 3)} for t in body["prompt"][1:]),
        ]
        return web.json_response({"choices": [{"prompt_logprobs": rows}]}, status=status)

    application, loop, ready = web.Application(), asyncio.new_event_loop(), threading.Event()
    application.router.add_post("/v1/completions", complete)
    runner, ports = web.AppRunner(application), []

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(site._server.sockets[0].getsockname()[1])
        ready.set()

    def serve() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://127.0.0.1:{ports[0]}", requests
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


def server(url: str, top_k: int = 2) -> TeacherServer:
    return TeacherServer("teacher.server_url", url, top_k, timeout_s=10.0, policy_folder="")


def test_the_likeliest_tokens_of_sampled_tokens_are_packed() -> None:
    with serving() as (url, requests):
        arrays, is_finite = fetch_teacher_outputs(LENGTHS, ARRAYS, np.array([0, 1]), server(url), 16)
    assert sorted(request["prompt"] for request in requests) == [[4, 5, 6], [7, 8]]
    assert all(request["prompt_logprobs"] == 2 and request["max_tokens"] == 1 for request in requests)
    half, quarter = math.log(0.5), math.log(0.25)
    expected = [[0] * 5, [4, 5, half, quarter, quarter], [5, 6, half, quarter, quarter], [0] * 5]
    expected.append([7, 8, half, quarter, quarter])
    np.testing.assert_allclose(arrays["teacher_outputs"], expected, rtol=1e-6)
    assert is_finite.tolist() == [True, True]


def test_sequences_of_other_teachers_are_left_out_and_merged() -> None:
    with serving() as (url, _):
        first, _ = fetch_teacher_outputs(LENGTHS, ARRAYS, np.array([1]), server(url), 16)
        second, _ = fetch_teacher_outputs(LENGTHS, ARRAYS, np.array([0]), server(url), 16)
        whole, _ = fetch_teacher_outputs(LENGTHS, ARRAYS, np.array([0, 1]), server(url), 16)
    assert not first["teacher_outputs"][:3].any()
    parts = {f"teacher_outputs_{number}": part["teacher_outputs"] for number, part in enumerate((first, second))}
    merged, _ = merge_teacher_outputs(LENGTHS, parts)
    assert (merged["teacher_outputs"] == whole["teacher_outputs"]).all()


def test_the_bits_of_hidden_states_of_different_widths_merge() -> None:
    wide, narrow = np.array([[0, 0, 0], [7, -8, 9]], dtype=np.int16), np.array([[-5, 6], [0, 0]], dtype=np.int16)
    merged, _ = merge_teacher_outputs(np.array([1, 1]), {"one": wide, "two": narrow})
    assert merged["teacher_outputs"].tolist() == [[-5, 6, 0], [7, -8, 9]]


def test_a_server_that_gives_too_few_tokens_is_named() -> None:
    with serving() as (url, _), pytest.raises(RunError, match=r"gives 3 tokens.*--max-logprobs=9"):
        fetch_teacher_outputs(LENGTHS, ARRAYS, np.array([0]), server(url, 9), 16)


def test_a_failure_names_the_server() -> None:
    with serving(status=500) as (url, _), pytest.raises(RunError, match=r"teacher.server_url=http.*answers 500"):
        fetch_teacher_outputs(LENGTHS, ARRAYS, np.array([0]), server(url), 16)
    with pytest.raises(RunError, match=r"teacher.server_url=http://127\.0\.0\.1:1"):
        fetch_teacher_outputs(LENGTHS, ARRAYS, np.array([0]), server("http://127.0.0.1:1"), 16)


def test_a_tail_is_never_less_than_the_rounding_of_a_sum() -> None:
    row = {"1": entry(0.7, 1), "2": entry(0.3000001, 2)}
    assert float(pack_row(row, server(""), 16)[-1]) == pytest.approx(math.log(LEAST_TAIL))
    with pytest.raises(RunError, match="gives token 20, and the policy has 16"):
        pack_row({"20": entry(0.7, 1), "2": entry(0.3, 2)}, server(""), 16)
