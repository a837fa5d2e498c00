"""Servers of megatron_grpo.serve: engines elsewhere, and requests that are late, huge or foreign."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.generation_schema import RefitMode, ServerConfig
from megatron_grpo.config.paths import TOKEN_VARIABLE
from megatron_grpo.config.schema import GenerationConfig, ParallelConfig, RefitConfig
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.http_access import BODY_BYTES, HEAD_BYTES, REQUEST_S
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.server_process import ServerProcess, serving
from tests.integration.test_refit import assert_serves, ray_cluster, start_policy
from tests.integration.vllm_helpers import MAX_LENGTH, START_S, Oracle, generate, make_model, request

__all__ = ["ray_cluster"]  # a fixture of every test here

REFIT = RefitConfig(bucket_mib=0.05, timeout_s=60.0, retries=1)
PROMPT = [2, 3, 5, 7]


@pytest.mark.slow  # tests/unit/generation/test_server_engine.py asks a made-up server with every `make test`
def test_a_server_serves_what_the_policy_is_however_weights_come_and_after_it_was_killed(
    server: ServerProcess, models: tuple[Path, Path], tmp_path: Path
) -> None:
    base, trained = models
    oracle = Oracle(trained)
    policy = start_policy(trained, ParallelConfig(tensor=2))
    generation = _generation(server, base)
    try:
        generation.start()
        generation.wait_ready()
        policy.wait_ready()
        with pytest.raises(RuntimeError, match="the weights are incomplete: a refit was not committed"):
            _sample(generation)
        modes: tuple[RefitMode, ...] = ("broadcast", "reshard", "files")
        for version, mode in enumerate(modes, start=1):
            transport = make_transport(policy, generation, replace(REFIT, mode=mode), tmp_path / "run")
            transport.connect()
            assert transport.publish(version).version == version
            assert_serves(generation, oracle, version)
        _check_sampled(generation, oracle, version=3)
        # Another process in its place, with the weights that it was started with.
        server.kill()
        server.start()
        server.wait_until_up()
        assert_serves(generation, oracle, version=3)
        assert transport.publish(4).retries == 0
        assert_serves(generation, oracle, version=4)
        # It may also go while nobody asks it anything, just before a refit.
        server.kill()
        server.start()
        server.wait_until_up()
        assert transport.publish(5).retries <= 1
        assert_serves(generation, oracle, version=5)
    finally:
        generation.shutdown()
        policy.shutdown()


@pytest.mark.slow
def test_a_server_of_another_model_is_told_at_the_start(server: ServerProcess, tmp_path: Path) -> None:
    from transformers import Qwen3Config

    def wider(**sizes: Any) -> Qwen3Config:
        return Qwen3Config(**{**sizes, "hidden_size": 96})

    generation = _generation(server, make_model(tmp_path / "wider", seed=0, family=wider))
    generation.start()
    try:
        with pytest.raises(
            RunError, match=r"generation engine 0 .*serves another model than policy.model.path=.*: hidden 64, not 96"
        ):
            generation.wait_ready()
    finally:
        generation.shutdown()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    return make_model(folder / "base", seed=0), make_model(folder / "trained", seed=1)


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(models[0], tmp_path_factory.mktemp("server") / "log") as started:
        yield started


def _generation(server: ServerProcess, model: Path) -> VllmGeneration:
    config = GenerationConfig(server=ServerConfig(urls=[server.url], timeout_s=120.0), timeout_s=120.0)
    return VllmGeneration(
        VllmSettings(model_path=str(model), config=config, precision="float32", max_total_sequence_length=MAX_LENGTH),
        actor_options=lambda engine: {"num_cpus": 0},
        startup_timeout_s=START_S,
    )


def _sample(generation: VllmGeneration) -> list[Any]:
    requests = [request(PROMPT, seed=seed, max_new_tokens=12) for seed in range(12)]
    return generate(generation, requests, SamplingSettings(max_new_tokens=12, temperature=0.7, top_k=None))


def _check_sampled(generation: VllmGeneration, oracle: Oracle, version: int) -> None:
    """What is drawn depends on the seeds alone, and comes with the log-probabilities that it was drawn with."""
    first, again = _sample(generation), _sample(generation)
    assert len({tuple(output.token_ids.tolist()) for output in first}) > 6
    for output, repeated in zip(first, again, strict=True):
        token_ids = output.token_ids.tolist()
        assert token_ids == repeated.token_ids.tolist()
        assert output.logprobs.tolist() == pytest.approx(oracle.logprobs(PROMPT, token_ids, 0.7), abs=1e-4)
        assert output.spans == [Span(0, len(token_ids), version)]


HOST, JSON = "Host: 127.0.0.1", "Content-Type: application/json"
HUGE = [f"X-{number}: {'x' * 4000}" for number in range(HEAD_BYTES // 4000 + 5)]


@pytest.mark.slow  # tests/unit/generation/test_http_access.py sends as many to a small application each time
def test_requests_that_are_late_huge_or_foreign_are_refused(tmp_path: Path) -> None:
    with serving(make_model(tmp_path / "model", seed=0), tmp_path / "log") as server:
        key = f"Authorization: Bearer {os.environ[TOKEN_VARIABLE]}"
        statuses = {
            401: [HOST, JSON],
            403: [HOST, key, JSON, "Origin: https://evil.example"],
            413: [HOST, key, JSON, f"Content-Length: {BODY_BYTES + 1}"],
            415: [HOST, key, "Content-Type: text/plain"],
            421: ["Host: evil.example", key, JSON],
            431: [HOST, key, JSON, *HUGE],
        }
        answers = {
            status: _status(server.port, lines, (BODY_BYTES + 1) * (status == 413))
            for status, lines in statuses.items()
        }
        assert answers == {status: status for status in statuses}
        begun = time.monotonic()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as late:
            late.sendall(b"POST /pause HTTP/1.1\r\n")
            assert _status(server.port, [HOST, key, JSON, "Content-Length: 9"], body=1) == 408
            with suppress(ConnectionResetError):
                assert late.recv(100) == b"", "a late head is closed without an answer"
        assert REQUEST_S / 2 < time.monotonic() - begun < 2 * REQUEST_S


def _status(port: int, lines: Sequence[str], body: int = 0) -> int:
    """Status of a POST with these headers and as many bytes of a body."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with suppress(ConnectionError):  # it may be answered before all is sent
            connection.sendall("\r\n".join(["POST /pause HTTP/1.1", *lines, "", ""]).encode())
            connection.sendall(b" " * body)
        return int(connection.recv(100).split()[1])
