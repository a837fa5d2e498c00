"""Compares the sampling phase of a step with vLLM's own `LLM.generate` on the same requests; prints JSON.

    python benchmarks/generation.py [--prompts 16] [--samples 8] [--tokens 128] [--repeats 3] [--rounds 2] [--compiled]

A model of 21 million parameters with random weights answers prompts of 16 tokens. Ours is what a step waits for: from
prompts at the driver to scored groups, through rollout workers, Ray, an engine and an environment. The other side is a
process that calls `LLM.generate` with the very requests (token ids, seeds, log-probabilities of the sampled tokens),
the same arguments of vLLM and the same cores. Sides take turns. `ratio` is the median of tokens per second, ours over
the other; `same_tokens` says whether both sampled the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from header import header
from small_model import PROMPT_WORDS, make_model, prompts

if TYPE_CHECKING:
    from megatron_grpo.rollouts.pool import RolloutPool

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("ours", "plain")
SEED, STEP = 7, 1
KV_CACHE_GIB = 1.0
MAX_BATCH_TOKENS = 4096


def measure_ours(folder: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each repeat, and the tokens of the last one."""
    from megatron_grpo.data.responses import SamplingSettings
    from megatron_grpo.observability.timers import StepTimer

    settings = SamplingSettings(max_new_tokens=asked.tokens, stop_token_ids=(1,))
    rows, seconds = data(asked.prompts), []
    with rollout_workers(folder, asked) as pool:
        for _ in range(1 + asked.repeats):
            began = time.perf_counter()
            groups = pool.collect(
                rows,
                samples_per_prompt=asked.samples,
                settings=settings,
                run_seed=SEED,
                step=STEP,
                timer=StepTimer(),
            )
            seconds.append(time.perf_counter() - began)
        tokens = [one.token_ids[PROMPT_WORDS:].tolist() for group in pool.fetch(groups) for one in group]
    return {"seconds": seconds[1:], "token_ids": tokens}


@contextmanager
def rollout_workers(folder: str, asked: argparse.Namespace) -> Iterator[RolloutPool]:
    """Rollout workers over one engine of a model, on a Ray of their own; all end with the body."""
    from megatron_grpo.cluster.ray_cluster import RayCluster
    from megatron_grpo.config.generation_schema import EngineConfig, GenerationConfig
    from megatron_grpo.config.schema import ClusterConfig, EnvironmentConfig, RolloutsConfig
    from megatron_grpo.environments.pool import build_environments
    from megatron_grpo.generation.vllm_generation import VllmGeneration
    from megatron_grpo.rollouts.pool import RolloutPool

    longest = PROMPT_WORDS + asked.tokens
    with ExitStack() as stack:
        cluster = RayCluster(ClusterConfig())
        stack.callback(cluster.shutdown)
        cluster.start()
        engine = EngineConfig(enforce_eager=not asked.compiled, kv_cache_gib=KV_CACHE_GIB)
        generation = VllmGeneration(
            folder,
            GenerationConfig(engine=engine),
            precision="float32",
            max_total_sequence_length=longest,
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
            max_total_sequence_length=longest,
            generation_timeout_s=300.0,
        )
        stack.callback(pool.shutdown)
        pool.start()
        pool.wait_ready()
        yield pool


def data(count: int) -> list[Any]:
    """So many prompts, as a run has them."""
    from megatron_grpo.data.interfaces import REFERENCE

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


def measure_plain(folder: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each repeat, and the tokens of the last one."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    from megatron_grpo.rollouts.plan import sample_seed

    llm = LLM(
        folder,
        dtype="float32",
        max_model_len=PROMPT_WORDS + asked.tokens,
        max_num_seqs=256,
        enforce_eager=not asked.compiled,
        enable_chunked_prefill=False,  # with seeds a CPU cannot
        max_num_batched_tokens=MAX_BATCH_TOKENS,
        kv_cache_memory_bytes=int(KV_CACHE_GIB * 2**30),
        logprobs_mode="processed_logprobs",
    )
    requests = [
        (
            {"prompt_token_ids": ids},
            SamplingParams(
                max_tokens=asked.tokens,
                stop_token_ids=[1],
                seed=sample_seed(SEED, STEP, number, sample),
                logprobs=0,
            ),
        )
        for number, ids in enumerate(token_ids(asked.prompts))
        for sample in range(asked.samples)
    ]
    seconds = []
    for _ in range(1 + asked.repeats):
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate([one for one, _ in requests], [one for _, one in requests], use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds[1:], "token_ids": [list(one.outputs[0].token_ids) for one in outputs]}


def token_ids(number: int) -> list[list[int]]:
    """The prompts, a token a word."""
    return [[int(word.removeprefix("w")) for word in one.split()] for one in prompts(number)]


def measured(side: str, folder: str, given: Sequence[str]) -> dict[str, Any]:
    """What a process of its own measured."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
        command = [sys.executable, __file__, *given, "--side", side, "--model", folder, "--answer", answer.name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{side} failed:\n{done.stdout}\n{done.stderr}")
        found: dict[str, Any] = json.load(answer)
    return found


def compare(asked: argparse.Namespace, given: Sequence[str]) -> dict[str, Any]:
    """All sides, in turn."""
    runs: dict[str, list[float]] = {side: [] for side in SIDES}
    sampled: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for _ in range(asked.rounds):
            for side in SIDES:
                found = measured(side, folder, given)
                sampled[side] = found["token_ids"]
                count = sum(map(len, found["token_ids"]))
                runs[side] += [count / seconds for seconds in found["seconds"]]
    speed = {side: statistics.median(values) for side, values in runs.items()}
    return {
        **header("generation"),
        "requests": asked.prompts * asked.samples,
        "tokens": sum(map(len, sampled["ours"])),
        "compiled": asked.compiled,
        "tokens_per_s": speed,
        "ratio": speed["ours"] / speed["plain"],
        "same_tokens": sampled["ours"] == sampled["plain"],
        "runs": runs,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side is None:
        print(json.dumps(compare(arguments, sys.argv[1:]), indent=2))
    else:
        ours = arguments.side == "ours"
        result = (measure_ours if ours else measure_plain)(arguments.model, arguments)
        arguments.answer.write_text(json.dumps(result))
