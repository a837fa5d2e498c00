"""benchmarks/scale.py: the decoder of a simulated engine, logical actors, and a small run with a lost engine."""

import asyncio
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_grpo.batch.trajectory import Span

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GPUS, RANKS, ENGINES, WORKERS = 64, 32, 8, 1
"""Half of the GPUs train, in ranks of one GPU; the others sample, in engines of four. Eight engines share a worker."""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The modules of the simulation, which import each other by their plain names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import simulated_cluster
    import simulated_engine
    import simulated_parts

    return SimpleNamespace(cluster=simulated_cluster, engine=simulated_engine, parts=simulated_parts)


def times(parts: SimpleNamespace, **changed: float) -> Any:
    """A decoding step takes 10 ms with one response and 20 ms with two."""
    defaults = {"token_s": 0.01, "response_s": 0.01, "train_tokens_per_s": 1000.0, "refit_gb_per_s": 25.0}
    defaults |= {"message_s": 0.0, "move_s": 0.0, "median_tokens": 100.0, "sigma": 0.5, "right": 0.5, "speed_up": 1.0}
    return parts.parts.Times(**{**defaults, **changed})


def decode_requests(parts: SimpleNamespace, tokens: list[int], limit: int = 8) -> list[tuple[int, float]]:
    """Numbers of responses with their seconds, in the order in which they end."""

    async def run() -> list[tuple[int, float]]:
        decoder = parts.engine.Decoder(times(parts), limit)
        loop, ends = asyncio.get_running_loop(), []
        began = loop.time()

        async def decode(number: int, count: int) -> None:
            await decoder.decoded(count)
            ends.append((number, loop.time() - began))

        await asyncio.gather(*(decode(number, count) for number, count in enumerate(tokens)))
        assert decoder.counts.tokens == sum(tokens)
        return ends

    return asyncio.run(run())


def test_responses_share_the_steps_of_a_decoder(parts: SimpleNamespace) -> None:
    """10 steps of two responses take 0.2 s, then 20 steps of the longer take 0.2 s more."""
    (first, first_s), (second, second_s) = decode_requests(parts, [30, 10])
    assert (first, second) == (1, 0)
    assert first_s >= 0.2
    assert second_s >= 0.4


def test_a_full_decoder_lets_responses_wait(parts: SimpleNamespace) -> None:
    """One after the other: 20 steps of one response each."""
    (first, _), (second, second_s) = decode_requests(parts, [10, 10], limit=1)
    assert (first, second) == (0, 1)
    assert second_s >= 0.2


async def test_spans_of_a_response_over_a_refit(parts: SimpleNamespace) -> None:
    decoder = parts.engine.Decoder(times(parts), 8)
    task = asyncio.create_task(decoder.decoded(150))
    await asyncio.sleep(0.2)
    decoder.pause()
    await asyncio.sleep(0.05)
    decoder.resume(1)
    spans: list[Span] = await task
    before, after = spans
    assert (before.start, before.version, after.end, after.version) == (0, 0, 150, 1)
    assert before.end == after.start
    assert 10 <= before.end < 150


def test_lengths_and_rewards_follow_from_the_seed(parts: SimpleNamespace) -> None:
    from megatron_grpo.batch.generation_requests import GenerationRequest, SamplingSettings

    model, settings = times(parts), SamplingSettings(max_new_tokens=150)
    requests = [GenerationRequest(prompt_ids=None, seed=seed, max_new_tokens=1000) for seed in range(2000)]  # type: ignore[arg-type]
    drawn = [model.drawn(request, settings) for request in requests]
    assert drawn == [model.drawn(request, settings) for request in requests]
    lengths = sorted(tokens for tokens, _, _ in drawn)
    assert 95 < lengths[1000] < 105, "the median"
    assert lengths[-1] == 150
    assert all(is_cut_off == (tokens == 150) for tokens, is_cut_off, _ in drawn)
    assert 0.45 < sum(right for *_, right in drawn) / len(drawn) < 0.55


def test_handles_of_logical_actors_can_be_sent(parts: SimpleNamespace) -> None:
    handle = pickle.loads(pickle.dumps(parts.cluster.LogicalActor("host", 7)))
    method = handle.generate.options(num_returns="streaming")
    assert (method.host, method.number, method.name, method.results) == ("host", 7, "generate", "streaming")
    with pytest.raises(AttributeError):
        _ = handle._private


@pytest.mark.slow
def test_a_small_run_in_which_an_engine_is_lost() -> None:
    options = ["--gpus", str(GPUS), "--faults", "none", "lost_engine", "--speed-up", "100", "--lost-after-s", "2"]
    command = [sys.executable, str(BENCHMARKS / "scale.py"), *options, "--steps", "1", "--median-tokens", "200"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == 0, ended.stderr
    healthy, broken = json.loads(ended.stdout)["results"]
    for result in (healthy, broken):
        assert (result["ranks"], result["engines"], result["rollout_workers"]) == (RANKS, ENGINES, WORKERS)
        assert result["samples"] == 2 * GPUS
        assert 0 < result["driver_cpu_s"] < 10
        assert 0 < result["driver_peak_gib"] < 2
    # Ranks: log-probabilities, two optimizer steps, weights. Engines: weights, commit, counts. Workers: two calls of
    # sampling and one that hands groups over, shards, advantages, the file of rollouts.
    assert healthy["calls"] == 4 * RANKS + 3 * ENGINES + 3 * WORKERS + 2 * WORKERS + 1
    assert (healthy["metrics"]["engine_restarts"], broken["metrics"]["engine_restarts"]) == (0.0, 1.0)
