"""A server of followed runs in a thread, and made runs of many steps with spans."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron_grpo.observability.live.followed_run import FollowedRun
from megatron_grpo.observability.live.page_server import PageServer
from megatron_grpo.watch import is_going_on

TOKEN = "token-of-tests"


@contextmanager
def serve_runs(folders: Sequence[Path]) -> Iterator[PageServer]:
    """A server that ends with the body."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = PageServer([FollowedRun(folder, is_going_on) for folder in folders], TOKEN)
    try:
        asyncio.run_coroutine_threadsafe(server.start(0), loop).result(30)
        yield server
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()


def write_spans(run_dir: Path, *, begin: float, steps: int, step_s: float = 1.0, ranks: int = 2) -> float:
    """Spans of a run whose steps generate, train and refit one after the other; returns when it ended."""
    folder = run_dir / "logs" / "spans"
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    lines: dict[str, list[str]] = {name: [] for name in ("driver", "generation_engine_0", "rollout_worker_0")}
    lines |= {f"policy_rank_{rank}": [] for rank in range(ranks)}

    def add(name: str, offset: float, seconds: float, phase: str, *memory: float) -> None:
        lines[name].append(json.dumps([round(begin + offset, 4), round(seconds, 4), phase, *memory]) + "\n")

    for step in range(steps):
        at, generation = step * step_s, step_s * draw.uniform(0.35, 0.5)
        add("generation_engine_0", at, generation, "generate", 40.0)
        add("rollout_worker_0", at, generation, "rollouts")
        for rank in range(ranks):
            late = 0.02 * step_s * rank
            add(f"policy_rank_{rank}", at + generation + late, 0.35 * step_s, "train", 30.5 + rank)
            add(
                f"policy_rank_{rank}",
                at + generation + 0.36 * step_s + late,
                0.08 * step_s,
                "send weights",
                31.5 + rank,
            )
        add("generation_engine_0", at + generation + 0.36 * step_s, 0.1 * step_s, "receive weights", 45.0)
        add("driver", at, generation, "generation")
        add("driver", at + generation, 0.36 * step_s, "train")
        add("driver", at, 0.98 * step_s, f"step {step + 1}")
    for name, rows in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(rows))
    return begin + steps * step_s
