"""Soaks rollouts with agents and tools that misbehave, and looks for what suffers or stays; prints JSON.

    python benchmarks/soak.py [--rollouts 2000]

Rollout worker, endpoint, environments and MCP servers are the real ones; the engine writes a script. Of each ten
rollouts one retries its calls, cancels them, floods the endpoint, sends garbage, and has a tool that hangs, dies or
lies; the others are sound, or a response breaks what reads it. `kinds` counts what came of each kind: `right` and
`wrong` rewards of responses that nothing broke, `fault` (reward 0 with a reason) and `failed` (not in the loss).
`undeserved` lists rollouts that came out otherwise than their kind and answer say, `untrue` those whose trained
responses are not the ones that the agent got. `late` counts sound groups that took longer than the slowest one of an
equal batch of sound rows alone, and the deadline of a call of their own environment: a call is not interrupted, so one
that hangs may hold a process for as long. `rss_mb` is the memory of rollout worker and environments after a quarter and
at the end; `left` are processes of the soak after its end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from header import header
from soak_parts import BAD, GOOD, KINDS, ScriptedEngine, find_kind, save_tokenizer

from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.generation_schema import EndpointConfig
from megatron_grpo.config.schema import ClusterConfig, EnvironmentConfig, RolloutsConfig
from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.data.prompt_renderer import PromptFormat, PromptRenderer
from megatron_grpo.data.tokenizer import load_tokenizer
from megatron_grpo.environments.environment_processes import build_environments
from megatron_grpo.environments.interface import EnvironmentSettings
from megatron_grpo.rollouts.endpoint import make_endpoint_settings
from megatron_grpo.rollouts.pool import RolloutPool

SAMPLES = 4
DEADLINES_S = {"agent": 15.0, "tools": 15.0, "steps": 6.0}  # of a call, by environment
MARK = "MEGATRON_GRPO_SOAK"  # variable by which the soak's processes are found
FOLDER = Path(__file__).resolve().parent
TASKS = {"agent": "agent", "tool": "tools", "step": "steps", "serve": "steps", "score": "steps"}
SERVER = {"command": [sys.executable, str(FOLDER / "soak_server.py")], "variables": [MARK], "timeout_s": 1.0}
ENVIRONMENTS = {
    "agent": EnvironmentConfig(
        type="reward_functions",
        agent_func="soak_parts.ask_model",
        reward_funcs=["soak_parts.grade"],
        num_workers=4,
        timeout_s=DEADLINES_S["agent"],
    ),
    "tools": EnvironmentConfig(
        type="tools",
        options={"servers": {"soak": SERVER}, "compare": "exact"},
        num_workers=2,
        timeout_s=DEADLINES_S["tools"],
    ),
    "steps": EnvironmentConfig(type="soak_parts:StepEnvironment", num_workers=4, timeout_s=DEADLINES_S["steps"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=2000)
    options = parser.parse_args()
    mark = os.environ[MARK] = uuid.uuid4().hex
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")]))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak_") as folder, open_pool(Path(folder)) as pool:
        measured = soak(pool, load_tokenizer(folder), options.rollouts, mark)
    measured["left"] = wait_for_end(mark)
    measured["seconds"] = round(time.monotonic() - began)
    print(json.dumps({**header("soak"), **measured}, indent=2))


@contextmanager
def open_pool(folder: Path) -> Iterator[RolloutPool]:
    """Start Ray, a rollout worker with its endpoint, the environments, and a scripted engine."""
    save_tokenizer(folder)
    cluster = RayCluster(ClusterConfig())
    cluster.start()
    settings = EnvironmentSettings(tokenizer=str(folder), prompts=PromptFormat(), import_folders=(str(FOLDER),))
    environments = build_environments(ENVIRONMENTS, lambda _: settings)
    pool = RolloutPool(
        RolloutsConfig(max_failed_fraction=1.0, timeout_s=120.0),
        {0: ray.remote(num_cpus=0)(ScriptedEngine).remote(str(folder))},
        environments,
        generation_timeout_s=600.0,
        max_total_sequence_length=8192,
        max_turns=3,
        endpoint=make_endpoint_settings(EndpointConfig(enabled=True), str(folder)),
    )
    pool.start()
    try:
        pool.wait_ready()
        yield pool
    finally:
        pool.shutdown()
        for environment in environments.values():
            environment.shutdown()
        cluster.shutdown()


def soak(pool: RolloutPool, tokenizer: Any, rollouts: int, mark: str) -> dict[str, Any]:
    """Run batches with one row of each kind; returns the verdicts of their rollouts."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    problems: defaultdict[str, list[str]] = defaultdict(list)
    waits: defaultdict[str, list[float]] = defaultdict(list)
    sound = [number for number, kind in enumerate(KINDS) if kind.endswith(" plain")]
    # As many rows of each environment, all sound: so calls that wait for a free process are not called late.
    rows = [number + len(KINDS) * i for i, kind in enumerate(KINDS) for number in sound if is_same_task(number, kind)]
    usual = max(run_batch(pool, tokenizer, 0, rows)[1].values())
    batches, memory = max(1, round(rollouts / SAMPLES / len(KINDS))), {}
    for batch in range(1, batches + 1):
        groups, times = run_batch(pool, tokenizer, batch, range(len(KINDS)))
        for number in sound:
            waits[find_task(KINDS[number])].append(times[number])
        for samples, trajectory in ((group, trajectory) for group in groups for trajectory in group):
            kind = KINDS[trajectory.prompt_idx % len(KINDS)]
            verdict = describe_verdict(trajectory)
            counts[kind][verdict] += 1
            text = f"{kind}, row {trajectory.prompt_idx}: {verdict}; {trajectory.fault or trajectory.failure}"
            if not is_deserved(kind, trajectory, samples, verdict):
                problems["undeserved"].append(text)
            if "answered" in trajectory.notes and int(trajectory.notes["answered"]) != len(trajectory.spans):
                problems["untrue"].append(f"{text}: {trajectory.notes['answered']} and {len(trajectory.spans)}")
        if batch in (max(1, batches // 4), batches):
            memory["quarter" if "quarter" not in memory else "end"] = measure_memory(mark)
        text = ", ".join(f"{KINDS[number]} {times[number]:.1f}" for number in sorted(times))
        print(f"batch {batch} of {batches}, seconds: {text}", file=sys.stderr, flush=True)
    return {
        "rollouts": sum(sum(count.values()) for count in counts.values()),
        "kinds": {kind: dict(count) for kind, count in counts.items()},
        **{name: {"count": len(problems[name]), "first": problems[name][:5]} for name in ("undeserved", "untrue")},
        "late": sum(wait > usual + DEADLINES_S[task] for task in waits for wait in waits[task]),
        "seconds_of_sound_groups": {"without_others": usual}
        | {
            task: {"median": sorted(seconds)[len(seconds) // 2], "longest": max(seconds), "deadline": DEADLINES_S[task]}
            for task, seconds in waits.items()
        },
        "rss_mb": memory,
    }


def run_batch(
    pool: RolloutPool, tokenizer: Any, batch: int, rows: Sequence[int]
) -> tuple[list[list[Trajectory]], dict[int, float]]:
    """Sample and score rows; returns the groups, and the seconds of each row."""
    prompts = {row: make_prompt(tokenizer, batch * len(KINDS) + row) for row in rows}
    settings = pool.make_settings(SAMPLES, SamplingSettings(max_new_tokens=512), run_seed=1, generation_batch=batch)
    began, complete = time.monotonic(), []
    seconds: dict[int, float] = {}
    pending = pool.begin(prompts, settings)
    while len(seconds) < len(prompts):
        for prompt in pool.list_complete([pending]):
            seconds[prompt.number] = time.monotonic() - began
            complete.append(prompt)
        time.sleep(0.02)
    return pool.fetch(pool.take(sorted(complete))), seconds


def make_prompt(tokenizer: Any, number: int) -> DatumSpec:
    text = f"row {number:06d}"
    renderer = PromptRenderer(tokenizer, PromptFormat())
    ids = renderer.encode_prompt(renderer.render_first_turn(text))
    return {
        "message_log": [{"role": "user", "content": text, "token_ids": ids}],
        "length": len(ids),
        "extra_env_info": {REFERENCE: GOOD},
        "loss_multiplier": 1.0,
        "idx": number,
        "task_name": find_task(find_kind(text)),
        "prompt": text,
    }


def find_task(kind: str) -> str:
    return TASKS[kind.partition(" ")[0][:5]]


def is_same_task(number: int, kind: str) -> bool:
    return find_task(KINDS[number]) == find_task(kind)


def describe_verdict(trajectory: Trajectory) -> str:
    if trajectory.failure is not None:
        return "failed"
    if trajectory.fault is not None:
        return "fault"
    reward = trajectory.reward
    return "right" if reward == 1.0 else "wrong" if reward == 0.0 else f"reward {reward}"


def is_deserved(kind: str, trajectory: Trajectory, group: Sequence[Trajectory], verdict: str) -> bool:
    """True if a rollout came out as its kind and the last answers of its group say."""
    is_good = trajectory.response.endswith(GOOD)
    if kind == "server lost":
        return verdict == "failed"
    # Scores are those of a group: if every answer breaks them, nothing shows that an answer is to blame.
    if kind == "score raises" and all(sample.response.endswith(BAD) for sample in group):
        return verdict == "failed"
    if kind in ("agent raises", "step hangs", "step dies", "step raises", "score raises") and not is_good:
        return verdict == "fault" and trajectory.reward == 0.0 and trajectory.response.endswith(BAD)
    return verdict == ("right" if is_good else "wrong")


def list_processes(mark: str) -> list[psutil.Process]:
    """List the other processes with the soak's mark in their environment."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def measure_memory(mark: str) -> dict[str, Any]:
    """Measure RSS by kind of process, in MB: number, sum and largest."""
    memory: defaultdict[str, list[float]] = defaultdict(list)
    for process in list_processes(mark):
        try:
            title = " ".join(process.cmdline())
            for name in ("RolloutWorker", "EnvironmentWorker", "ScriptedEngine", "soak_server.py"):
                if name in title:
                    memory[name].append(process.memory_info().rss / 2**20)
        except psutil.Error:
            continue
    return {
        name: {"processes": len(sizes), "sum": round(sum(sizes)), "largest": round(max(sizes))}
        for name, sizes in sorted(memory.items())
    }


def wait_for_end(mark: str, limit_s: float = 15.0) -> list[str]:
    """Wait for the end of the soak's processes; returns those that stay."""
    deadline = time.monotonic() + limit_s
    while (processes := list_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    names = []
    for process in processes:
        try:
            names.append(" ".join(process.cmdline())[:100])
        except psutil.Error:
            continue
    return names


if __name__ == "__main__":
    main()
