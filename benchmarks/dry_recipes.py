"""Memory of every recipe in conf/exp at its true size, from dry runs of a rank of each distinct pipeline stage.

    python benchmarks/dry_recipes.py [recipe ...] [precision=fp8] [KEY=VALUE ...] > result.json

Needs no GPU and no weights. Models are those of tests/data/hf_configs; recipes of other models are left out.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from header import header

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "data" / "hf_configs"


def model_config(path: str) -> dict[str, Any] | None:
    """The config.json of a hub name, such as Qwen/Qwen3-8B; None: it is not in `CONFIGS`."""
    name = _letters(path.rpartition("/")[2])
    found = [one for one in CONFIGS.iterdir() if name.startswith(_letters(one.name))]
    if not found:
        return None
    config: dict[str, Any] = json.loads((max(found, key=lambda one: len(one.name)) / "config.json").read_text())
    return config


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def distinct_ranks(parallel: Any) -> list[int]:
    """The first rank of the first, a middle and the last pipeline stage."""
    stages = sorted({0, parallel.pipeline // 2, parallel.pipeline - 1})
    return [stage * (parallel.world_size // parallel.pipeline) for stage in stages]


def recipes() -> Iterator[tuple[str, Any, Any]]:
    """Name, configuration and shape of every recipe whose model is known."""
    from megatron_grpo.config.compose import compose_typed
    from megatron_grpo.weights.families import shape_of_config

    overrides = [word for word in sys.argv[1:] if "=" in word]
    names = set(sys.argv[1:]) - set(overrides)
    for file in sorted((ROOT / "conf" / "exp").glob("*.yaml")):
        if names and file.stem not in names:
            continue
        config = compose_typed([f"+exp={file.stem}", *overrides]).config
        assert config is not None, f"{file} is no valid configuration"
        raw = model_config(config.policy.model.path)
        if raw is not None:
            yield file.stem, config, shape_of_config(raw)


def measure(config: Any, shape: Any, rank: int, expert_skew: float) -> dict[str, Any]:
    """A dry run: GiB by phase and by kind, and its seconds of CPU."""
    from megatron_grpo.proof.dry_run import dry_run

    began = time.process_time()
    report = dry_run(config, shape, rank, expert_skew=expert_skew)
    tables = {name: getattr(report, name) for name in ("phases", "held", "holders")}
    in_gib = {name: {key: round(value / 2**30, 2) for key, value in one.items()} for name, one in tables.items()}
    return {"peak_gib": round(report.peak_bytes / 2**30, 2), **in_gib, "cpu_s": round(time.process_time() - began, 1)}


def main() -> None:
    """Print the memory of every recipe and distinct rank, with balanced experts and with 1.5 times as many tokens."""
    found = []
    with ProcessPoolExecutor(1) as process:  # one for all: importing Megatron-Core takes longer than most dry runs
        for name, config, shape in recipes():
            for rank in distinct_ranks(config.policy.parallel):
                for skew in (1.0, 1.5) if shape.experts is not None else (1.0,):
                    future = process.submit(measure, config, shape, rank, skew)
                    error = future.exception()
                    result = {"error": str(error)} if error is not None else future.result()
                    found.append({"recipe": name, "rank": rank, "expert_skew": skew, **result})
                    print(found[-1], file=sys.stderr)
    print(json.dumps({**header("dry_recipes"), "results": found}, indent=1))


if __name__ == "__main__":
    main()
