"""What stands beside a server, against a server that is made up: whose weights it takes, and what it says of others."""

import base64
import gzip
import json
import math
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from aiohttp import web
from numpy.typing import NDArray
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.config.errors import CanaryError, RunError
from megatron_grpo.config.generation_schema import ServerConfig
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.engine_canary import CanaryPrompt
from megatron_grpo.generation.server import ServerEngine
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.routed_experts import RoutedForm
from tests.support.tiny_models import TinyModel

SETTINGS = SamplingSettings(max_new_tokens=4)
REQUESTS = [GenerationRequest(prompt_ids=np.array([1, 2], dtype=np.int32), seed=n, max_new_tokens=4) for n in range(3)]
FILES = {"folder": "/shared", "session": "s"}


class MadeUpServer:
    """Answers as vLLM's server does; its tokens are the seed of a request, twice."""

    def __init__(self, model: Path) -> None:
        shape = json.loads(json.dumps(asdict(read_model_shape(model))))
        self.worker: dict[str, Any] = {"shape": shape, "tensor": 1, "pipeline": 1, "expert": 1, "longest": 64}
        self.worker["records_experts"] = True
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.served = "default"
        self.calls: list[str] = []
        self.hidden: set[str] = set()
        """Paths that it has not."""
        self.logprob = -0.5
        self.cache_is_free = True
        self.restarts_before: int | None = None
        """After so many responses it is another process; None: it is not."""
        self.bodies: list[dict[str, Any]] = []
        self.answer: web.Response | None = None
        """In place of each response."""
        self.changes: dict[str, Any] = {}
        """Of the fields of each response."""
        self.experts: NDArray[Any] | None = None
        """Of a response: [tokens of prompt and response but the last, layers, experts of a token]."""

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        if path in self.hidden:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json() if request.can_read_body else {}
        self.calls.append(body.get("method", path) if path == "/collective_rpc" else path)
        if path == "/inference/v1/generate":
            return self._generate(body)
        if path in ("/tokenize", "/detokenize"):
            return web.json_response(self._tokenized(body))
        if path == "/update_weight_version":
            self.served = body["new_version"]
        answers: dict[str, Any] = {
            "/collective_rpc": {"results": [self.worker if body.get("method") == "describe" else None]},
            "/weight_info": {"weight_version": self.served},
            "/reset_prefix_cache": {"success": self.cache_is_free},
        }
        return web.json_response(answers.get(path, {}))

    def _tokenized(self, body: dict[str, Any]) -> dict[str, Any]:
        if "tokens" in body:
            return {"prompt": self.tokenizer.decode(body["tokens"])}
        encoded = self.tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])
        return {"tokens": encoded.ids}

    def _generate(self, body: dict[str, Any]) -> web.Response:
        if "prompt_logprobs" in body["sampling_params"]:
            scored = [None, *({str(token): {"logprob": self.logprob}} for token in body["token_ids"][1:])]
            return web.json_response({"choices": [], "prompt_logprobs": scored})
        self.bodies.append(body)
        if self.answer is not None:
            return self.answer
        if self.restarts_before == len(self.bodies):
            self.served, self.restarts_before = "default", None
        tokens = [body["sampling_params"]["seed"]] * 2
        choice = {
            "finish_reason": "stop",
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": token, "logprob": self.logprob} for token in tokens]},
            "weight_versions": [{"version": self.served, "start": 0, "end": 2}],
        }
        if self.experts is not None:
            np.save(buffer := BytesIO(), self.experts)
            choice["routed_experts"] = base64.b64encode(buffer.getvalue()).decode()
        return web.json_response({"choices": [choice | self.changes]})


@pytest.fixture
def serve(tiny_models: dict[str, TinyModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    model = Path(shutil.copytree(tiny_models["qwen3_tied"].path, tmp_path / "model"))
    tokenizer = Tokenizer(models.WordLevel({letter: n for n, letter in enumerate("abcdef")}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)

    @asynccontextmanager
    async def serve_engine(
        *, started: bool = True, timeout_s: float = 5.0, routed: RoutedForm | None = None, **changes: Any
    ) -> AsyncIterator[tuple[ServerEngine, MadeUpServer, web.AppRunner]]:
        server = MadeUpServer(model)
        for name, value in changes.items():
            setattr(server, name, value)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", server.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        settings = VllmSettings(
            index=0,
            model_path=str(model),
            config=GenerationConfig(server=ServerConfig(urls=[url], timeout_s=timeout_s)),
            precision="float32",
            max_total_sequence_length=32,
            token="secret",
            routed=routed,
        )
        engine = ServerEngine(settings)
        try:
            if started:
                await engine.start()
            yield engine, server, runner
        finally:
            await engine._session.close()
            await runner.cleanup()

    return serve_engine


async def sample_all(engine: ServerEngine) -> list[GenerationOutput]:
    outputs = {index: output async for part in engine.generate(REQUESTS, SETTINGS, "c") for index, output in part.value}
    return [outputs[index] for index in range(len(REQUESTS))]


async def publish(engine: ServerEngine, version: int, mode: Any = "files") -> None:
    await engine.connect_weights(mode, FILES, 0)
    await engine.receive_weights(version)
    await engine.commit_weights(version)


async def test_a_version_is_received_while_paused_and_served_under_a_name_of_its_own(serve: Any) -> None:
    async with serve() as (engine, server, _):
        with pytest.raises(RuntimeError, match="the weights are incomplete"):
            await sample_all(engine)
        server.calls.clear()
        await publish(engine, 4)
        calls = list(server.calls)
        assert calls.index("/pause") < calls.index("receive_refit") < calls.index("/update_weight_version")
        assert calls[-2:] == ["/reset_prefix_cache", "/resume"]
        assert server.served.endswith(":4")
        assert len(server.served) > 10
        outputs = await sample_all(engine)
        assert [output.token_ids.tolist() for output in outputs] == [[0, 0], [1, 1], [2, 2]]
        assert all(output.spans[0].version == 4 and output.logprobs.tolist() == [-0.5, -0.5] for output in outputs)
        assert server.bodies[0]["token_ids"] == [1, 2]
        counts = engine.take_counts()
        assert counts.tokens == 6
        assert counts.busy_s > 0


async def test_a_server_serves_a_guarded_version_only_if_the_canary_is_right(serve: Any) -> None:
    async with serve() as (engine, server, _):
        await engine.connect_weights("files", FILES, 0)
        for version, expected in ((4, -0.5), (5, -0.7)):
            await engine.receive_weights(version)
            server.calls.clear()
            await engine.commit_weights(version, True)
            assert "/resume" not in server.calls
            with pytest.raises(RuntimeError, match="the weights are incomplete"):
                await sample_all(engine)
            prompt = CanaryPrompt(version, ((3, 4, 5), (4, 3)), ((expected, expected), (expected,)), limit=0.1)
            if version == 4:
                assert (await engine.check_canary(prompt)).error == 0
                assert len(await sample_all(engine)) == 3
        with pytest.raises(CanaryError, match=r"http://.*: with version 5 of the weights .* by 0.2 "):
            await engine.check_canary(prompt)
        assert server.calls[-1] == "/pause"
        with pytest.raises(RuntimeError, match="the weights are incomplete"):
            await sample_all(engine)


async def test_a_server_that_has_lost_its_weights_is_given_them_again_and_asked_again(serve: Any) -> None:
    async with serve() as (engine, server, _):
        await publish(engine, 4)
        server.served = "default"  # between two calls
        assert all(output.spans[0].version == 4 for output in await sample_all(engine))
        server.restarts_before = len(server.bodies) + 2  # in the middle of one
        server.calls.clear()
        assert all(output.spans[0].version == 4 for output in await sample_all(engine))
        assert "receive_refit" in server.calls
        assert "connect_refit" in server.calls


async def test_a_server_that_was_started_anew_before_the_commit_has_not_the_version(serve: Any) -> None:
    async with serve() as (engine, server, _):
        await engine.connect_weights("files", FILES, 0)
        await engine.receive_weights(4)
        server.served = "default"  # while other engines still receive
        with pytest.raises(RuntimeError, match="was restarted since it received version 4"):
            await engine.commit_weights(4)
        assert server.served == "default"
        with pytest.raises(RuntimeError, match="the weights are incomplete"):
            await sample_all(engine)
        await publish(engine, 4)
        assert all(output.spans[0].version == 4 for output in await sample_all(engine))


async def test_weights_that_only_a_step_brings_cannot_be_given_again(serve: Any) -> None:
    async with serve() as (engine, server, _):
        await publish(engine, 4, mode="broadcast")
        server.served = "default"
        with pytest.raises(
            RuntimeError, match=r"has lost version 4, which refit.mode=broadcast sends .* refit.mode=files"
        ):
            await sample_all(engine)


async def test_another_run_at_the_same_server_is_found_out(serve: Any) -> None:
    async with serve() as (engine, server, _):
        await publish(engine, 4)
        server.served = "0123456789abcdef:4"
        with pytest.raises(RuntimeError, match="was given weights by another run"):
            await sample_all(engine)


async def test_a_server_that_stays_away_is_told(serve: Any) -> None:
    async with serve(timeout_s=0.5) as (engine, _, runner):
        await publish(engine, 4)
        await runner.cleanup()
        with pytest.raises(
            RuntimeError, match=r"no vLLM server answers within generation.server.timeout_s=0.5 s: http"
        ):
            await sample_all(engine)


async def test_a_cache_of_other_weights_is_not_served_from(serve: Any) -> None:
    async with serve(cache_is_free=False) as (engine, _, _):
        with pytest.raises(RuntimeError, match="could not empty its prefix cache, which is of other weights"):
            await publish(engine, 1)
        with pytest.raises(RuntimeError, match="the weights are incomplete"):
            await sample_all(engine)


async def test_a_probability_that_is_no_number_stays_none(serve: Any) -> None:
    async with serve(logprob=-9999.0) as (engine, _, _):
        await publish(engine, 1)
        assert math.isnan((await sample_all(engine))[0].logprobs[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"hidden": {"/collective_rpc"}},
            r"cannot be refitted: .* answers 404: .*; start it with python -m ",
        ),
        ({"hidden": {"/health"}}, r"no vLLM server answers within generation.server.timeout_s=1 s: .* answers 404"),
        ({"worker": {"problem": "it is odd"}}, "it is odd"),
        ({"tensor": 2}, "runs with tensor 2; give generation.parallel.tensor=2"),
        ({"longest": 16}, r"takes sequences of 16 tokens; start it with --max-model-len=32"),
        ({"shape": {"vocab": 7}}, "serves another model than policy.model.path=.*vocab 7, not"),
    ],
)
async def test_a_server_that_does_not_fit_is_told_at_the_start(serve: Any, change: dict[str, Any], text: str) -> None:
    async with serve(started=False, timeout_s=1.0) as (engine, server, _):
        for name, value in change.items():
            if name in ("hidden", "worker"):
                setattr(server, name, value)
            else:
                server.worker[name] = value
        with pytest.raises(RuntimeError, match=text):
            await engine.start()


WRONG_ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "endless": ({"body": b'{"choices": "' + b"x" * 2**21}, r"gives an answer of more than \d+ bytes"),
    "endless, packed": (
        {"body": gzip.compress(b" " * 2**24), "headers": {"Content-Encoding": "gzip"}},
        r"gives an answer of more than \d+ bytes",
    ),
    "an endless error": ({"body": b"x" * 2**21, "status": 500}, r"gives an answer of more than \d+ bytes"),
    "an error": ({"text": "no \x1b[2J memory", "status": 500}, r"answers 500: no \\x1b\[2J memory"),
    "a page": ({"text": "<html>", "content_type": "text/html"}, r"gives no JSON \(.*\), but <html>"),
    "cut off": ({"text": '{"choices": ['}, r"gives no JSON \(.*\), but \{"),
    "deep": ({"text": "[" * 100_000}, "gives no JSON"),
    "no object": ({"text": "[1]"}, r"gives no response \(TypeError: .*\), but \[1\]"),
    "nothing": ({"text": ""}, r"gives no response \(TypeError: .*\), but null"),
    "no choices": ({"text": '{"choices": []}'}, "gives no response"),
    "elsewhere": (
        {"status": 307, "headers": {"Location": "http://192.0.2.1/"}},
        "answers 307: which redirects to http://192.0.2.1/; give that in generation.server.urls",
    ),
}


@pytest.mark.parametrize("kind", WRONG_ANSWERS)
async def test_a_server_that_answers_wrongly_is_named(serve: Any, kind: str) -> None:
    response, text = WRONG_ANSWERS[kind]
    async with serve() as (engine, server, _):
        await publish(engine, 1)
        server.answer = web.Response(**({"content_type": "application/json"} | response))
        with pytest.raises(RunError, match=rf"^http://127\.0\.0\.1:\d+/inference/v1/generate {text}"):
            await engine._sample("a", REQUESTS[0], SETTINGS)
        assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"token_ids": [0, 0, 0], "scored": [0, 0]}, "2 log-probabilities of other than 3 of 4 tokens"),
        ({"token_ids": [0, 1], "scored": [0, 0]}, "2 log-probabilities of other than 2 of 4 tokens"),
        ({"token_ids": [0, -1]}, "token ids that the model's 61 tokens have not"),
        ({"token_ids": [0, 10**30]}, "token ids that the model's 61 tokens have not"),
        ({"token_ids": [0, 1.5]}, "token ids that the model's 61 tokens have not"),
        ({"token_ids": [0] * 5}, "5 log-probabilities of other than 5 of 4 tokens"),
        ({"logprob": 0.5}, "log-probabilities above 0"),
        ({"logprob": "-1"}, "TypeError"),
        ({"spans": [(0, 1)]}, "weight versions of other tokens"),
        ({"spans": [(1, 3)]}, "weight versions of other tokens"),
        ({"spans": [(0, 1), (0, 2)]}, "weight versions of other tokens"),
        ({"finish_reason": None}, None),
    ],
)
async def test_a_server_is_not_believed_what_cannot_be(serve: Any, changes: dict[str, Any], text: str | None) -> None:
    async with serve() as (engine, server, _):
        await publish(engine, 1)
        tokens = changes.get("token_ids", [0, 0])
        scored = changes.get("scored", tokens)
        content = [{"token_id": token, "logprob": changes.get("logprob", -1.0)} for token in scored]
        spans = [{"version": server.served, "start": a, "end": b} for a, b in changes.get("spans", [(0, len(tokens))])]
        server.changes = {"token_ids": tokens, "logprobs": {"content": content}, "weight_versions": spans}
        server.changes["finish_reason"] = changes.get("finish_reason", "stop")
        if text is None:
            assert await engine._sample("a", REQUESTS[0], SETTINGS) == "the server ended a request early: None"
            return
        with pytest.raises(RunError, match=rf"/inference/v1/generate gives no response \(.*{text}.*\), but "):
            await engine._sample("a", REQUESTS[0], SETTINGS)


FORM = RoutedForm(layers=(1,), top_k=2, experts=100)


async def test_experts_come_with_the_tokens(serve: Any) -> None:
    chosen = np.arange(3 * 2 * 2, dtype=np.uint8).reshape(3, 2, 2)
    async with serve(routed=FORM, experts=chosen) as (engine, server, _):
        await publish(engine, 1)
        for output in await sample_all(engine):
            assert FORM.unpack(output.routed).tolist() == chosen[:, 1:].tolist()
        server.experts = chosen[1:]
        assert {*await sample_all(engine)} == {"vLLM recorded the experts of 2 tokens, and 3 were processed"}


async def test_a_server_that_returns_no_experts_is_told_at_the_start(serve: Any) -> None:
    async with serve(started=False, routed=FORM) as (engine, server, _):
        server.worker["records_experts"] = False
        with pytest.raises(RuntimeError, match=r"for policy.moe.replay_routing=true; start it with --enable-return-r"):
            await engine.start()


async def test_a_server_with_another_tokenizer_is_refused(serve: Any) -> None:
    words = {letter: n for n, letter in enumerate("bacdef")}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="b"))
    async with serve(started=False, tokenizer=tokenizer) as (engine, _, _):
        with pytest.raises(RuntimeError, match=r"has another tokenizer than policy\.model\.path=.*without --tokenizer"):
            await engine.start()


async def test_the_special_token_that_ended_a_response_is_not_in_its_text(serve: Any) -> None:
    async with serve() as (engine, _, _):
        engine._tokenizer.add_special_tokens({"eos_token": "f"})
        await publish(engine, 0)
        ended, cut = {"finish_reason": "stop"}, {"finish_reason": "length"}
        logprobs = {"content": [{"token_id": token, "logprob": -0.5} for token in (5, 2, 5)]}
        name = [{"version": f"{engine._prefix}0", "start": 0, "end": 3}]
        choice = {"token_ids": [5, 2, 5], "logprobs": logprobs, "weight_versions": name}
        texts = [
            engine._parse_response({"choices": [choice | end]}, prompt_tokens=1, most_tokens=4) for end in (ended, cut)
        ]
        assert [output.text for output in texts if isinstance(output, GenerationOutput)] == ["f c", "f c f"]
