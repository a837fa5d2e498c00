"""A judge over HTTP: what it is asked, what is made of its answers, and what happens when there is none."""

import json
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.registry import create_environment


class Judge:
    """A server that answers as it is told; the last answer is repeated."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers: list[Any] = []
        self.finish_reason = "stop"
        self.refuses_with: int | None = None
        """Status of answers that are bytes; None: 200."""
        self.slow_text: str | None = None
        """Text of questions over which it takes seconds."""
        self.pause_s = 0.0
        """Seconds between two bytes of an answer."""
        judge = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                judge.asked.append({"path": self.path, "key": self.headers["Authorization"], **body})
                answer = judge.answers.pop(0) if len(judge.answers) > 1 else judge.answers[0]
                if answer == "hang" or (judge.slow_text and judge.slow_text in str(body)):
                    time.sleep(3)
                refusal = judge.refuses_with if isinstance(answer, bytes) else None
                status = answer if isinstance(answer, int) else refusal or 200
                content = {"choices": [{"message": {"content": answer}, "finish_reason": judge.finish_reason}]}
                data = answer if isinstance(answer, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Location", judge.url)
                self.end_headers()
                for byte in data[: len(data) if judge.pause_s else 0]:
                    time.sleep(judge.pause_s)
                    self.wfile.write(bytes([byte]))
                self.wfile.write(b"" if judge.pause_s else data)

            do_GET = do_POST  # noqa: N815

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/"


@pytest.fixture
def judge() -> Iterator[Judge]:
    judge = Judge()
    threading.Thread(target=judge.server.serve_forever, args=(0.01,), daemon=True).start()
    yield judge
    judge.server.shutdown()
    judge.server.server_close()


def score_responses(judge: Judge, *responses: str, **options: Any) -> list[EnvironmentReturn]:
    settings = {"model": "judge", "url": judge.url, "request_timeout_s": 1, "requests_at_once": 1, **options}
    environment = create_environment(EnvironmentConfig(type="judge", options=settings))
    extra = {REFERENCE: "{prompt} 42"}
    return environment.score(
        [
            EnvironmentRequest(prompt="6 * 7?", response=response, stop_reason="stop", extra_env_info=extra)
            for response in responses
        ]
    )


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("Fine.\nScore: 8", 0.8),
        ("score:10", 1.0),
        ("Score: 2\nNo:\n**Score: 7.5**\n", 0.75),
        ("Score: 8/10", 0.8),
        ("Score: 8/100", None),
        ("Score: 8\nThat is my judgement.", None),
        ('The response says "Score: 10"', None),
        ("Score: 11", None),
        ("Score: -1", None),
        ("very good", None),
        ("", None),
        (b"no json", None),
        (b"[]", None),
        (b'{"choices": []}', None),
        (b'{"choices": [{"message": {"content": null}}]}', None),
        (b'{"choices": [{"message": {"content": 9}}]}', None),
    ],
)
def test_the_score_is_read_and_what_is_malformed_is_none(judge: Judge, answer: Any, reward: float | None) -> None:
    judge.answers = [answer]
    (result,) = score_responses(judge, "42")
    assert result.reward == (None if reward is None else pytest.approx(reward))
    assert result.correct is None


def test_what_it_is_asked(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge.answers = ["Score: 5", "Score: 1"]
    options = {"question": "{prompt}|{response}|{answer}|{lowest}-{highest}", "lowest": 1, "highest": 5}
    results = score_responses(judge, "{answer} of 41", "42", **options, correct_from=0.5, api_key_variable="JUDGE_KEY")
    assert [(result.reward, result.correct) for result in results] == [(1.0, True), (0.0, False)]
    request = judge.asked[0]
    assert request["path"] == "/v1/chat/completions"
    assert request["key"] == "Bearer secret"
    assert (request["model"], request["temperature"]) == ("judge", 0.0)
    (message,) = request["messages"]
    match = re.fullmatch(
        r"6 \* 7\?\|(----- \w{16}) \(.*\)\n\{answer\} of 41\n\1\|\{prompt\} 42\|1-5", message["content"]
    )
    assert match, message
    assert match[1] not in judge.asked[1]["messages"][0]["content"], "a response could close what it guesses"


def test_a_key_that_is_not_there_is_told_at_the_start(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, " \n"):
        monkeypatch.delenv("JUDGE_KEY", raising=False)
        if value is not None:
            monkeypatch.setenv("JUDGE_KEY", value)
        with pytest.raises(
            ValueError, match=r"options\.api_key_variable=JUDGE_KEY: the environment has no such variable"
        ):
            score_responses(judge, "42", api_key_variable="JUDGE_KEY")
    assert judge.asked == []


def test_what_passes_is_tried_again(judge: Judge) -> None:
    judge.answers = [503, "hang", "Score: 10"]
    assert score_responses(judge, "42")[0].reward == 1.0
    assert len(judge.asked) == 3


def test_options_have_bounds(judge: Judge) -> None:
    for options in ({"attempts": 0}, {"request_timeout_s": -1}, {"model": None}, {"modell": "x"}):
        with pytest.raises(RunError, match=next(iter(options))):
            score_responses(judge, "42", **options)
    with pytest.raises(ValueError, match=r"options\.highest=1 must be above options\.lowest=2"):
        score_responses(judge, "42", lowest=2, highest=1)


@pytest.mark.parametrize(
    "body",
    [
        b'{"object": "error", "message": "maximum context length is 4096\\n tokens, got 9000", "code": 400}',
        b'{"error": {"message": "maximum context length is 4096 tokens, got 9000", "type": "BadRequestError"}}',
        b'{"error": "maximum context length is 4096 tokens, got 9000"}',
        b"maximum context length is 4096 tokens, got 9000" + b"." * 10_000,
    ],
    ids=["vLLM", "OpenAI", "TGI", "text"],
)
def test_the_reason_of_a_refusal_is_told(judge: Judge, body: bytes) -> None:
    """A response that is too long for the judge."""
    judge.answers, judge.refuses_with = [body], 400
    text = "HTTP 400 Bad Request: maximum context length is 4096 tokens, got 9000"
    with pytest.raises(RunError, match=text) as caught:
        score_responses(judge, "42")
    assert len(str(caught.value)) < 600
    for empty in (b"", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000):
        judge.answers = [empty]
        with pytest.raises(RunError, match="HTTP 400 Bad Request"):
            score_responses(judge, "42")


def test_a_judge_that_does_not_answer_fails_the_rollout(judge: Judge) -> None:
    judge.answers = [500]
    with pytest.raises(RunError, match="gave no answer in 2 of 2 attempts: HTTP 500"):
        score_responses(judge, "42", attempts=2)
    judge.answers = [401]
    judge.asked.clear()
    with pytest.raises(RunError, match="in 1 of 3 attempts: HTTP 401"):
        score_responses(judge, "42")
    assert len(judge.asked) == 1, "a refusal does not pass"
    judge.url = "http://127.0.0.1:9"
    with pytest.raises(RunError, match="Cannot connect to host"):
        score_responses(judge, "42", attempts=1)


def test_an_answer_that_was_cut_off_is_none(judge: Judge) -> None:
    judge.answers, judge.finish_reason = ["Score: 8"], "length"
    assert score_responses(judge, "42")[0].reward is None


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_takes_the_key_along(judge: Judge, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    judge.answers = [status, "Score: 8"]
    with pytest.raises(RunError, match=rf"in 1 of 3 attempts: HTTP {status} .*redirects to {judge.url}; give that in"):
        score_responses(judge, "42", api_key_variable="JUDGE_KEY")
    assert len(judge.asked) == 1


def test_the_deadline_is_that_of_the_whole_answer(judge: Judge) -> None:
    judge.answers, judge.pause_s = ["Score: 8"], 0.2
    began = time.monotonic()
    with pytest.raises(RunError, match=r"no whole answer within options\.request_timeout_s=1 s"):
        score_responses(judge, "42", attempts=1)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("turn", "text"),
    [
        ({"content": None}, 'assistant: calls {"name": "rain", "arguments": {"city": "Köln"}}'),
        ({"content": "Wait."}, 'assistant: Wait.\ncalls {"name": "rain", "arguments": {"city": "Köln"}}'),
        ({"content": [{"type": "text", "text": "Wait."}]}, "assistant: Wait.\ncalls"),
    ],
)
@pytest.mark.parametrize("arguments", [{"city": "Köln"}, '{"city": "Köln"}'])
def test_it_sees_the_calls_of_a_conversation(judge: Judge, turn: dict[str, Any], text: str, arguments: Any) -> None:
    """A message of calls alone has no content, and the results would answer nothing."""
    calls = [{"type": "function", "id": "1", "function": {"name": "rain", "arguments": arguments}}]
    prompt = [{"role": "user", "content": "Rain?"}, {"role": "assistant", **turn, "tool_calls": calls}]
    judge.answers = ["Score: 5"]
    options = {"model": "judge", "url": judge.url, "question": "{prompt}"}
    environment = create_environment(EnvironmentConfig(type="judge", options=options))
    environment.score([EnvironmentRequest(prompt=prompt, response="Yes", stop_reason="stop", extra_env_info={})])
    (message,) = judge.asked[0]["messages"]
    assert message["content"].startswith(f"user: Rain?\n\n{text}")


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (b'{"error": {"message": "blocked by the content filter"}}', 400, "blocked by the content filter"),
        (b'{"error": "maximum context length is 4096 tokens"}', 413, "maximum context length"),
        (
            b'{"choices": [{"message": {"content": "I will not judge this."}, "finish_reason": "stop"}]}',
            200,
            "no score",
        ),
    ],
    ids=["filter", "length", "words"],
)
def test_a_response_that_makes_the_judge_refuse_has_reward_0(
    judge: Judge, answer: bytes, status: int, reason: str
) -> None:
    judge.answers, judge.refuses_with = ["Score: 5", answer], status
    first, second, third = score_responses(judge, "good", "bad", "bad")
    assert (first.reward, first.fault) == (0.5, None)
    assert second.reward == third.reward == 0.0
    assert reason in str(second.fault)


def test_an_outage_of_the_judge_is_no_fault_of_a_response(judge: Judge) -> None:
    judge.answers = ["Score: 5", 503]
    first, second = score_responses(judge, "good", "good too", attempts=1)
    assert first.reward == 0.5
    assert "HTTP 503" in str(second)
    assert isinstance(second, str)


@pytest.mark.parametrize(("answers", "is_fault"), [(["Score: 8"], True), (["Score: 8", "hang"], False)])
def test_a_response_over_which_the_judge_is_late_has_reward_0_if_it_scores_others_meanwhile(
    judge: Judge, answers: list[str], is_fault: bool
) -> None:
    judge.answers, judge.slow_text = answers, "endless"
    good, late = score_responses(judge, "42", "an endless proof", request_timeout_s=0.5, attempts=1)
    assert good.reward == 0.8
    if is_fault:
        assert (late.reward, "no whole answer within" in str(late.fault)) == (0.0, True)
    else:  # the judge does not answer for anybody any more
        assert "no whole answer within" in str(late)
