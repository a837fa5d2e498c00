"""Sampling with vLLM, pipeline-parallel on a CPU, against transformers; repeatable, and gone when its driver is."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.generation.cpu_engine import CPU_BATCH_TOKENS, assign_cores
from megatron_grpo.generation.vllm_generation import VllmGeneration
from tests.integration import generation_driver
from tests.integration.vllm_helpers import (
    EOS,
    LETTERS,
    MAX_LENGTH,
    Oracle,
    engines,
    generate,
    kill_a_worker,
    make_model,
    request,
    start_ray,
)
from tests.support.programs import read_programs

PROMPT = [2, 5, 9, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "base", seed=0)


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="module")
def killed_driver(model: Path) -> dict[str, Any]:
    """What a driver of its own sampled before it was killed, and when."""
    command = [sys.executable, "-m", "tests.integration.generation_driver", str(model)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as driver:
        assert driver.stdout is not None
        line = next((line for line in driver.stdout if line.startswith("RESULT")), "")
        driver.send_signal(signal.SIGKILL)
    assert line, "the driver ended without a result"
    return {**json.loads(line.removeprefix("RESULT")), "killed_at": time.monotonic()}


@pytest.fixture(scope="module")
def generation(model: Path) -> Iterator[VllmGeneration]:
    start_ray()
    with engines(model, pipeline=2) as started:
        yield started
    ray.shutdown()


@pytest.mark.slow  # test_run.py looks for what a killed run leaves in every `.ci/run`
def test_a_killed_driver_leaves_no_vllm_process_behind(killed_driver: dict[str, Any]) -> None:
    assert len(killed_driver["processes"]) >= 4, "the engine's actor, its core and two workers"
    remaining = set(killed_driver["processes"])
    while remaining and time.monotonic() < killed_driver["killed_at"] + 20:
        remaining = {pid for pid in remaining if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"}
        time.sleep(0.2)
    assert not remaining


@pytest.mark.slow
def test_another_process_samples_the_same_bits(generation: VllmGeneration, killed_driver: dict[str, Any]) -> None:
    for _ in range(2):
        outputs = generate(generation, generation_driver.requests(), generation_driver.SETTINGS)
        assert [[output.token_ids.tolist(), output.logprobs.tolist()] for output in outputs] == killed_driver["samples"]


def test_logprobs_are_those_of_the_tempered_distribution(generation: VllmGeneration, oracle: Oracle) -> None:
    requests = [request(PROMPT, seed=seed, max_new_tokens=8) for seed in range(16)]
    outputs = generate(generation, requests, SamplingSettings(max_new_tokens=8, temperature=0.7))
    for output in outputs:
        expected = oracle.logprobs(PROMPT, output.token_ids, temperature=0.7)
        assert output.logprobs == pytest.approx(expected, abs=1e-4)
    assert len({tuple(output.token_ids) for output in outputs}) > 8, "seeds differ, so do the samples"


def test_a_sample_does_not_depend_on_its_neighbours(generation: VllmGeneration) -> None:
    sample = request(PROMPT, seed=5, max_new_tokens=10)
    settings = SamplingSettings(max_new_tokens=10)
    (alone,) = generate(generation, [sample], settings)
    neighbours = [request([3] * (1 + i), seed=i, max_new_tokens=10) for i in range(20)]
    among_others = generate(generation, [*neighbours, sample], settings)[-1]
    assert among_others.token_ids.tolist() == alone.token_ids.tolist()
    assert among_others.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_a_call_that_fails_leaves_nothing_to_sample(generation: VllmGeneration) -> None:
    fine = [request(PROMPT, seed=seed, max_new_tokens=10) for seed in range(3)]
    settings = SamplingSettings(max_new_tokens=10)
    expected = generate(generation, fine, settings)
    ray.get(generation.engines[0].take_counts.remote())
    with pytest.raises(Exception, match="out of vocabulary"):
        _ask_at_once(generation, [*fine, request([10**6], seed=3, max_new_tokens=10)], settings)
    (output,) = generate(generation, fine[:1], settings)
    assert (output.token_ids.tolist(), output.logprobs.tolist()) == (
        expected[0].token_ids.tolist(),
        pytest.approx(expected[0].logprobs.tolist(), abs=1e-5),
    )
    assert ray.get(generation.engines[0].take_counts.remote()).running == 1


def test_more_prompt_tokens_than_one_pass_takes(generation: VllmGeneration, oracle: Oracle) -> None:
    """Prompts that do not fit the pass wait for the next one; they are not cut in two."""
    prompts = [[2 + (i + j) % 30 for j in range(48)] for i in range(CPU_BATCH_TOKENS // 48 + 20)]
    requests = [request(ids, seed=i, max_new_tokens=4) for i, ids in enumerate(prompts)]
    outputs = generate(generation, requests, SamplingSettings(max_new_tokens=4))
    for ids, output in list(zip(prompts, outputs, strict=True))[::15]:
        assert output.logprobs == pytest.approx(oracle.logprobs(ids, output.token_ids), abs=1e-4)


def test_filters_renormalise(generation: VllmGeneration, oracle: Oracle) -> None:
    requests = [request(PROMPT, seed=seed, max_new_tokens=6) for seed in range(16)]
    for output in generate(generation, requests, SamplingSettings(max_new_tokens=6, top_k=3)):
        table = oracle.distributions(PROMPT, output.token_ids)
        best, ids = table.topk(3)
        expected = [
            float(row.log_softmax(dim=-1)[allowed.tolist().index(token)])
            for row, allowed, token in zip(best, ids, output.token_ids, strict=True)
        ]
        assert output.logprobs == pytest.approx(expected, abs=1e-4)
    for output in generate(generation, requests, SamplingSettings(max_new_tokens=6, top_p=1e-6)):
        assert output.token_ids.tolist() == oracle.greedy(PROMPT, 6)


def test_greedy(generation: VllmGeneration, oracle: Oracle) -> None:
    (output,) = _greedy(generation, SamplingSettings(max_new_tokens=12, temperature=0.0))
    assert output.token_ids.tolist() == oracle.greedy(PROMPT, 12)
    assert output.logprobs == pytest.approx(oracle.logprobs(PROMPT, output.token_ids), abs=1e-4)
    assert output.spans == [Span(0, len(output.token_ids), 0)]
    assert (output.token_ids.dtype, output.logprobs.dtype) == (np.int32, np.float32)


def test_stop_reasons(generation: VllmGeneration, oracle: Oracle) -> None:
    free = oracle.greedy(PROMPT, 12)
    (output,) = _greedy(generation, SamplingSettings(max_new_tokens=4, temperature=0.0))
    assert (output.token_ids.tolist(), output.stop_reason) == (free[:4], "length")

    token = free[3]
    cut = free[: free.index(token) + 1]
    (output,) = _greedy(generation, SamplingSettings(max_new_tokens=12, temperature=0.0, stop_token_ids=(token,)))
    assert (output.token_ids.tolist(), output.stop_reason) == (cut, "stop")
    assert len(output.logprobs) == len(cut)

    text = LETTERS[token - 2]
    (output,) = _greedy(generation, SamplingSettings(max_new_tokens=12, temperature=0.0, stop_strings=(text,)))
    assert (output.token_ids.tolist(), output.stop_reason) == (cut, "stop")
    assert output.text == "".join(LETTERS[token_id - 2] for token_id in cut)


def test_end_of_text_ends_a_response(generation: VllmGeneration) -> None:
    requests = [request(PROMPT, seed=seed, max_new_tokens=50) for seed in range(32)]
    outputs = generate(generation, requests, SamplingSettings(max_new_tokens=50, temperature=2.0))
    ended = [output for output in outputs if output.stop_reason == "stop"]
    assert ended
    for output in ended:
        assert output.token_ids.tolist().index(EOS) == len(output.token_ids) - 1
        letters = [LETTERS[token - 2] if token else "<pad>" for token in output.token_ids[:-1]]
        assert output.text == "".join(letters), "without the token that ended it"


def test_length_limit_of_the_model(generation: VllmGeneration) -> None:
    settings = SamplingSettings(max_new_tokens=100, stop_token_ids=())
    prompt = [3] * (MAX_LENGTH - 2)
    (output,) = generate(generation, [request(prompt, seed=0, max_new_tokens=100)], settings)
    assert len(output.token_ids) <= 2
    full = request([3] * MAX_LENGTH, seed=0, max_new_tokens=1)
    with pytest.raises(RuntimeError, match=r"generation engine 0 .*64 tokens leaves no room"):
        generate(generation, [full], settings)
    assert len(_greedy(generation, settings)) == 1, "the engine works on"


def test_short_responses_come_before_long_ones_and_others_may_join(generation: VllmGeneration, oracle: Oracle) -> None:
    """A response does not wait for the others of its call, nor a call for the one before it."""
    (engine,) = generation.engines.values()
    greedy = SamplingSettings(max_new_tokens=50, temperature=0.0)
    free = unending(oracle)
    requests = [request(free, seed=0, max_new_tokens=tokens) for tokens in (50, 1)]

    async def ask(call: str) -> dict[int, GenerationOutput]:
        answers = {}
        async for reference in engine.generate.options(num_returns="streaming").remote(requests, greedy, call):
            answers |= dict(await reference)
            if call == "first" and len(answers) == 1:
                answers |= {2 + index: output for index, output in (await ask("second")).items()}
        return answers

    answers = asyncio.run(ask("first"))
    assert list(answers) == [1, 3, 2, 0], "in the order in which they came"
    assert [answers[index].token_ids.tolist() for index in range(4)] == [oracle.greedy(free, n) for n in (50, 1) * 2]


def unending(oracle: Oracle) -> list[int]:
    """A prompt whose likeliest continuation goes on for 50 tokens."""
    return next(ids for ids in ([2 + n, 7, 9] for n in range(30)) if EOS not in oracle.greedy(ids, 50))


def test_a_request_that_is_aborted_ends_with_the_reason(generation: VllmGeneration, oracle: Oracle) -> None:
    (engine,) = generation.engines.values()
    settings = SamplingSettings(max_new_tokens=50, temperature=0.0)
    free = unending(oracle)
    requests = [request(free, seed=0, max_new_tokens=tokens) for tokens in (50, 1, 50)]

    async def scene() -> dict[int, Any]:
        answers = {}
        async for reference in engine.generate.options(num_returns="streaming").remote(requests, settings, "call"):
            answers |= dict(await reference)
            if len(answers) == 1:
                await engine.abort.remote("call", [0])
        return answers

    answers = asyncio.run(scene())
    assert answers[0] == "vLLM ended a request early: abort"
    assert answers[2].token_ids.tolist() == oracle.greedy(free, 50)
    assert len(_greedy(generation, settings)) == 1, "the engine works on"


def test_a_killed_process_is_one_clear_error(generation: VllmGeneration) -> None:
    """Last of the module: the engine is gone afterwards."""
    kill_a_worker(generation)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"generation engine 0 .*vLLM process"):
        _greedy(generation, SamplingSettings(max_new_tokens=4))
    assert time.monotonic() - began < 20


LATE_CONNECTION = read_programs("generation")["late_connection"]
"""A module for Python's start that delays the thread in which vLLM's engine core connects to the actor to answer it."""


@pytest.mark.slow
@pytest.mark.usefixtures("generation")  # it has started Ray
def test_an_engine_core_that_connects_late_is_waited_for(model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(LATE_CONNECTION)
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    with engines(model, environment={"PYTHONPATH": path}, startup_s=400.0) as started:
        assert started.startup_s[0]["processes"] > 3, "the delay took place"
        assert _greedy(started, SamplingSettings(max_new_tokens=4))


@pytest.mark.parametrize(
    ("cores", "first", "ranks", "total", "expected"),
    [
        ([0, 1], 0, 1, 1, "0,1"),
        ([0, 1], 0, 2, 2, "0|1"),
        ([4, 6], 0, 4, 4, "4|6|4|6"),
        ([0, 1, 2, 3, 4], 1, 1, 2, "2,3"),
        ([0, 1], 2, 2, 4, "0|1"),
    ],
)
def test_cores_are_shared_out(cores: list[int], first: int, ranks: int, total: int, expected: str) -> None:
    assert assign_cores(cores, first=first, ranks=ranks, total=total) == expected


def _ask_at_once(generation: VllmGeneration, requests: list[GenerationRequest], settings: SamplingSettings) -> None:
    """All requests in one call of the first engine."""
    for answer in generation.engines[0].generate.options(num_returns="streaming").remote(requests, settings, "call"):
        ray.get(answer)


def _greedy(generation: VllmGeneration, settings: SamplingSettings) -> list[GenerationOutput]:
    return generate(generation, [request(PROMPT, seed=0, max_new_tokens=settings.max_new_tokens)], settings)
