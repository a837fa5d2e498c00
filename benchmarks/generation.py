"""Compares the sampling phase of a step with vLLM's own `LLM.generate` on the same requests; prints JSON.

    python benchmarks/generation.py [--prompts 16] [--samples 8] [--tokens 128] [--pairs 6] [--compiled]

A model of 21 million parameters with random weights answers prompts of 16 tokens. Ours is what a step waits for: from
prompts at the driver to scored groups, through rollout workers, Ray, an engine and an environment. The other side is a
process that calls `LLM.generate` with the very requests (token ids, seeds, log-probabilities of the sampled tokens),
the same arguments of vLLM and the same cores. Both are started first. Then they take turns, and a pair of turns lasts
half a minute: a machine whose speed changes over minutes is as fast for either. `ratio` is the median over pairs of
ours over the other, in tokens per second, `pairs` each of them; `same_tokens` says whether both sampled the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from header import header
from small_model import PROMPT_WORDS, make_model, prompts

if TYPE_CHECKING:
    from megatron_grpo.rollouts.pool import RolloutPool

Sampled = tuple[float, list[list[int]]]
"""Seconds, and the token ids of each response."""

SIDES = ("ours", "plain")
SEED, STEP = 7, 1
KV_CACHE_GIB = 1.0
MAX_BATCH_TOKENS = 4096
SETTLE_S = 2.0
"""Pause between turns: for a second after a message vLLM's processes look for the next one without a break."""


def sample_ours(folder: str, options: argparse.Namespace) -> Generator[Sampled]:
    """All requests, sampled anew each time."""
    from megatron_grpo.batch.generation_requests import SamplingSettings
    from megatron_grpo.observability.timing import StepTimer

    settings = SamplingSettings(max_new_tokens=options.tokens, stop_token_ids=(1,))
    rows = data(options.prompts)
    with rollout_workers(folder, options) as pool:
        while True:
            began = time.perf_counter()
            groups = pool.collect(rows, pool.make_settings(options.samples, settings, SEED, STEP), StepTimer())
            seconds = time.perf_counter() - began
            yield (
                seconds,
                [trajectory.token_ids[PROMPT_WORDS:].tolist() for group in pool.fetch(groups) for trajectory in group],
            )


@contextmanager
def rollout_workers(folder: str, options: argparse.Namespace) -> Iterator[RolloutPool]:
    """Rollout workers over one engine of a model, on a Ray of their own; all end with the body."""
    from megatron_grpo.cluster.ray_cluster import RayCluster
    from megatron_grpo.config.generation_schema import EngineConfig, GenerationConfig
    from megatron_grpo.config.schema import ClusterConfig, EnvironmentConfig, RolloutsConfig
    from megatron_grpo.environments.environment_processes import build_environments
    from megatron_grpo.generation.engine_arguments import VllmSettings
    from megatron_grpo.generation.vllm_generation import VllmGeneration
    from megatron_grpo.rollouts.pool import RolloutPool

    longest = PROMPT_WORDS + options.tokens
    with ExitStack() as stack:
        cluster = RayCluster(ClusterConfig())
        stack.callback(cluster.shutdown)
        cluster.start()
        engine = EngineConfig(enforce_eager=not options.compiled, kv_cache_gib=KV_CACHE_GIB)
        generation = VllmGeneration(
            VllmSettings(
                model_path=folder,
                config=GenerationConfig(engine=engine),
                precision="float32",
                max_total_sequence_length=longest,
            ),
            actor_options=lambda index: {"num_cpus": 0},
            startup_timeout_s=300.0,
        )
        stack.callback(generation.shutdown)
        generation.start()
        generation.wait_ready()
        environments = build_environments({"task": EnvironmentConfig(type="addition")})
        pool = RolloutPool(
            RolloutsConfig(),
            generation.engines,
            environments,
            generation_timeout_s=300.0,
            max_total_sequence_length=longest,
        )
        stack.callback(pool.shutdown)
        pool.start()
        pool.wait_ready()
        yield pool


def data(count: int) -> list[Any]:
    """So many prompts, as a run has them."""
    from megatron_grpo.data.processors import REFERENCE

    return [
        {
            "message_log": [{"role": "user", "content": "", "token_ids": ids}],
            "length": len(ids),
            "extra_env_info": {REFERENCE: ""},
            "loss_multiplier": 1.0,
            "idx": number,
            "task_name": "task",
            "prompt": "",
        }
        for number, ids in enumerate(token_ids(count))
    ]


def sample_plain(folder: str, options: argparse.Namespace) -> Generator[Sampled]:
    """All requests, sampled anew each time."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    from megatron_grpo.rollouts.rollout import compute_sample_seed

    llm = LLM(
        folder,
        dtype="float32",
        max_model_len=PROMPT_WORDS + options.tokens,
        max_num_seqs=256,
        enforce_eager=not options.compiled,
        enable_chunked_prefill=False,  # with seeds a CPU cannot
        max_num_batched_tokens=MAX_BATCH_TOKENS,
        kv_cache_memory_bytes=int(KV_CACHE_GIB * 2**30),
        logprobs_mode="processed_logprobs",
    )
    requests = [
        (
            {"prompt_token_ids": ids},
            SamplingParams(
                max_tokens=options.tokens,
                stop_token_ids=[1],
                seed=compute_sample_seed(SEED, STEP, number, sample),
                logprobs=0,
            ),
        )
        for number, ids in enumerate(token_ids(options.prompts))
        for sample in range(options.samples)
    ]
    try:
        while True:
            llm.reset_prefix_cache()
            began = time.perf_counter()
            outputs = llm.generate(
                [prompt for prompt, _ in requests], [prompt for _, prompt in requests], use_tqdm=False
            )
            yield time.perf_counter() - began, [list(prompt.outputs[0].token_ids) for prompt in outputs]
    finally:
        llm.llm_engine.engine_core.shutdown()  # its processes end no sooner, and this one waits for them


def token_ids(number: int) -> list[list[int]]:
    """The prompts, a token a word."""
    return [[int(word.removeprefix("w")) for word in prompt.split()] for prompt in prompts(number)]


def answer(side: str, folder: str, options: argparse.Namespace, asker: Connection) -> None:
    """Sample whenever asked to, until told that it was the last time; the body of a side's process."""
    os.dup2(2, 1)  # the other end's standard output is for the result
    sample = sample_ours if side == "ours" else sample_plain
    with closing(sample(folder, options)) as sampled:
        next(sampled)  # warms up
        asker.send(None)
        while asker.recv():
            asker.send(next(sampled))


@contextmanager
def started(side: str, folder: str, options: argparse.Namespace) -> Iterator[Connection]:
    """A side's process, which has warmed up."""
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=answer, args=(side, folder, options, far))
    process.start()
    far.close()  # so that the death of the process ends what waits for it
    near.recv()
    yield near
    near.send(False)
    process.join()


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Both sides, in turn; who begins a pair changes."""
    runs: dict[str, list[float]] = {side: [] for side in SIDES}
    sampled: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_model(Path(folder))
        sides = {side: stack.enter_context(started(side, folder, options)) for side in SIDES}
        for pair in range(options.pairs):
            for side in SIDES if pair % 2 else SIDES[::-1]:
                time.sleep(SETTLE_S)
                sides[side].send(True)
                seconds, sampled[side] = sides[side].recv()
                runs[side].append(sum(map(len, sampled[side])) / seconds)
    pairs = [ours / plain for ours, plain in zip(runs["ours"], runs["plain"], strict=True)]
    return {
        **header("generation"),
        "requests": options.prompts * options.samples,
        "tokens": sum(map(len, sampled["ours"])),
        "compiled": options.compiled,
        "tokens_per_s": {side: statistics.median(values) for side, values in runs.items()},
        "ratio": statistics.median(pairs),
        "pairs": pairs,
        "same_tokens": sampled["ours"] == sampled["plain"],
        "runs": runs,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--compiled", action="store_true")
    print(json.dumps(compare(parser.parse_args()), indent=2))
