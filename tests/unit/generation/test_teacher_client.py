"""A teacher on a server: requests, likeliest tokens and their tail, refusals."""

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megatron_grpo.algorithms.token_functions import merge_teacher_outputs
from megatron_grpo.config.errors import RunError
from megatron_grpo.generation.teacher_client import LEAST_TAIL, TeacherServer, fetch_teacher_outputs, pack_row

LENGTHS = np.array([3, 2])
ARRAYS = {
    "token_ids": np.array([4, 5, 6, 7, 8], dtype=np.int32),
    "sampled": np.array([False, True, True, False, True]),
}


def entry(probability: float, rank: int) -> dict[str, Any]:
    return {"logprob": math.log(probability), "rank": rank, "decoded_token": "x"}


def make_rows(tokens: list[int]) -> list[Any]:
    """Rows with token t - 1 as the likeliest before t, then t itself, then a third."""
    likeliest = ({str(t): entry(0.25, 2), str(t - 1): entry(0.5, 1), "0": entry(0.1, 3)} for t in tokens[1:])
    return [None, *likeliest]


def write_rows(rows: list[Any]) -> str:
    return json.dumps({"choices": [{"prompt_logprobs": rows}]})


@contextmanager
def serving(
    status: int = 200,
    write: Callable[[list[int]], str] = lambda tokens: write_rows(make_rows(tokens)),
    headers: dict[str, str] | None = None,
) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers what `write` makes of a prompt's tokens; bodies of its requests have their headers."""
    requests: list[Any] = []

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        requests.append(body | {"headers": request.headers})
        return web.Response(text=write(body["prompt"]), status=status, headers=headers)

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
        outputs, _ = fetch_teacher_outputs(LENGTHS, ARRAYS, np.array([0, 1]), server(url), 16)
    assert not first["teacher_outputs"][:3].any()
    parts = {f"teacher_outputs_{number}": part["teacher_outputs"] for number, part in enumerate((first, second))}
    merged, _ = merge_teacher_outputs(LENGTHS, parts)
    assert (merged["teacher_outputs"] == outputs["teacher_outputs"]).all()


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


LIKELY = {"logprob": -0.5, "rank": 1}
SECOND = {"logprob": -1.5, "rank": 2}


def refuse(write: Callable[[list[int]], str], match: str, **options: Any) -> None:
    """Require a RunError with the server's address, in which nothing was accepted."""
    with serving(write=write, **options) as (url, _), pytest.raises(RunError, match=match) as caught:
        fetch_teacher_outputs(LENGTHS, ARRAYS, np.array([0, 1]), server(url), 16)
    assert str(caught.value).startswith(f"teacher.server_url={url}")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda rows: rows[:-1], "gives log-probabilities of . tokens, not of the . sent"),
        (lambda rows: [*rows, rows[-1]], "gives log-probabilities of . tokens, not of the . sent"),
        (lambda rows: rows[1:], "gives log-probabilities of . tokens, not of the . sent"),
        (lambda rows: [], "gives log-probabilities of 0 tokens"),
        (lambda rows: [None] * len(rows), "its rows belong to other tokens"),
        (lambda rows: [rows[-1], *rows[:-1]], "its rows belong to other tokens"),
        (lambda rows: [None, *([[1]] * (len(rows) - 1))], "its rows belong to other tokens"),
    ],
)
def test_every_row_belongs_to_its_token(change: Callable[[list[Any]], list[Any]], match: str) -> None:
    refuse(lambda tokens: write_rows(change(make_rows(tokens))), match)


def test_rows_of_other_tokens_are_refused_where_nothing_was_sampled() -> None:
    """Row 1 of the second sequence is none of the loss; it still shows that the rows are shifted."""
    arrays = {**ARRAYS, "sampled": np.zeros(5, dtype=bool)}
    with (
        serving(write=lambda tokens: write_rows(make_rows([token + 7 for token in tokens]))) as (url, _),
        pytest.raises(RunError, match="its rows belong to other tokens"),
    ):
        fetch_teacher_outputs(LENGTHS, arrays, np.array([0, 1]), server(url), 16)


@pytest.mark.parametrize(
    ("other_entries", "match"),
    [
        ({"-5": LIKELY, "3": SECOND}, "gives token '-5', which is no id"),
        ({"token_id:5": LIKELY, "3": SECOND}, "gives token 'token_id:5', which is no id"),
        ({"3": LIKELY, "03": SECOND}, "gives token '03', which is no id"),
        ({"\u0663": LIKELY, "1": SECOND}, "which is no id"),
        ({"16": LIKELY, "3": SECOND}, "gives token 16, and the policy has 16"),
        ({"3": LIKELY, "2": {"logprob": 3.0, "rank": 2}}, "gives token 2 the log-probability 3.0, which is impossible"),
        ({"3": LIKELY, "2": {"logprob": math.nan, "rank": 2}}, "gives token 2 the log-probability nan"),
        ({"3": LIKELY, "2": {"logprob": "-1", "rank": 2}}, "gives token 2 the log-probability -1, which is impossible"),
        ({"3": LIKELY, "2": {"logprob": True, "rank": 2}}, "gives token 2 the log-probability True"),
        ({"3": LIKELY, "2": {"logprob": None, "rank": 2}}, "gives token 2 the log-probability null"),
        ({"3": LIKELY, "2": {"logprob": -1.5}}, "gives token 2 the rank null"),
        ({"3": LIKELY, "2": -1.5}, "gives token 2 the rank null"),
        ({"3": LIKELY, "2": {"logprob": -1.5, "rank": 3}}, "gives the ranks 1, 3, not 1 to 2"),
        ({"3": LIKELY, "2": {"logprob": -1.5, "rank": 0}}, "gives the ranks 0, 1, not 1 to 2"),
        ({"3": LIKELY, "2": {"logprob": -0.1, "rank": 2}}, "gives a likelier token behind a less likely one"),
        ({"3": LIKELY, "2": {"logprob": -0.6, "rank": 2}}, "gives probabilities that add up to 1.15"),
        (
            {"3": {"logprob": -9999.0, "rank": 1}, "2": {"logprob": -9999.0, "rank": 2}},
            "gives likeliest tokens with a probability of 0 together",
        ),
    ],
)
def test_ids_and_probabilities_are_possible(other_entries: dict[str, Any], match: str) -> None:
    own_entry = {"logprob": -20.0, "rank": 9}
    refuse(lambda tokens: write_rows([None, *({str(t): own_entry, **other_entries} for t in tokens[1:])]), match)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("<html>", "gives no JSON .*<html>"),
        ("[" * 100_000, "gives no JSON"),
        ("[1]", r"gives no prompt_logprobs, but \[1\]"),
        ('{"choices": []}', "gives no prompt_logprobs"),
        ('{"choices": [{"prompt_logprobs": null}]}', "gives no prompt_logprobs"),
        (f'{{"choices": [{{"prompt_logprobs": {[1] * 3}}}, {{}}]}}', "gives no prompt_logprobs"),
        ("x" * 2**21, "gives an answer of more than .* bytes"),
    ],
    ids=["html", "deep", "list", "no choice", "null", "two choices", "too long"],
)
def test_an_answer_of_another_form_names_the_server(text: str, match: str) -> None:
    refuse(lambda _: text, match)


def test_a_redirection_is_not_followed() -> None:
    with serving() as (target, requests):
        refuse(lambda _: "", f"redirects to {target}", status=307, headers={"Location": f"{target}/v1/completions"})
    assert requests == []


def test_equally_likely_tokens_may_share_a_rank() -> None:
    tied = {"logprob": -2.0, "rank": 2}
    row = {"4": tied, "9": LIKELY, "2": tied}
    packed = pack_row(row, server(""), 16).tolist()
    assert packed[0] == 9
    assert packed[1] in (2, 4)
    assert packed[2:4] == [-0.5, -2.0]


def test_a_teacher_gets_its_own_key_and_never_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_GRPO_TOKEN", "of the run")
    monkeypatch.setenv("TEACHER_KEY", "its own")
    for variable, header in ((None, None), ("TEACHER_KEY", "Bearer its own")):
        with serving() as (url, requests):
            teacher = replace(server(url), api_key_variable=variable)
            fetch_teacher_outputs(LENGTHS, ARRAYS, np.array([0]), teacher, 16)
        assert [request["headers"].get("Authorization") for request in requests] == [header]
    assert "its own" not in repr(replace(server(""), api_key_variable="TEACHER_KEY"))
