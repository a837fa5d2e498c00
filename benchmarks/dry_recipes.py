"""Memory of every recipe in conf/exp at its true size, from dry runs of a rank of each distinct pipeline stage.

    python benchmarks/dry_recipes.py [recipe ...] [precision=fp8] [KEY=VALUE ...] > result.json

Needs no GPU and no weights. Models are those of tests/data/hf_configs; recipes of other models are left out. Layers are
at their true sizes. Where all layers of a stage are alike, its memory follows from two dry runs of fewer layers
("dry_depths"), as in `plan`; tests/unit/planning/test_pipeline.py compares that with the full depth.
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

from megatron_grpo.config.errors import RunError

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests" / "data" / "hf_configs"
TIMEOUT_S = 3600.0
"""Deadline of a dry run in seconds."""


def model_config(path: str) -> dict[str, Any] | None:
    """The config.json of a hub name, such as Qwen/Qwen3-8B; None: it is not in `CONFIGS`."""
    name = _letters(path.rpartition("/")[2])
    candidates = [config_path for config_path in CONFIGS.iterdir() if name.startswith(_letters(config_path.name))]
    if not candidates:
        return None
    config: dict[str, Any] = json.loads(
        (max(candidates, key=lambda config_path: len(config_path.name)) / "config.json").read_text()
    )
    return config


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def recipes() -> Iterator[tuple[str, Any, Any]]:
    """Name, configuration and shape of every recipe whose model is known."""
    from megatron_grpo.config.compose import compose_typed
    from megatron_grpo.models.families.reading import parse_model_shape

    overrides = [word for word in sys.argv[1:] if "=" in word]
    names = set(sys.argv[1:]) - set(overrides)
    for file in sorted((ROOT / "conf" / "exp").glob("*.yaml")):
        if names and file.stem not in names:
            continue
        config = compose_typed([f"+exp={file.stem}", *overrides]).config
        assert config is not None, f"{file} is not a valid configuration"
        raw = model_config(config.policy.model.path)
        if raw is not None:
            yield file.stem, config, parse_model_shape(raw)


def measure(pool: ProcessPoolExecutor, config: Any, shape: Any, expert_skew: float) -> Iterator[dict[str, Any]]:
    """Of a rank of each distinct stage, GiB by phase and by kind."""
    from megatron_grpo.planning.trace import submit_traces

    for pending in submit_traces(pool, config, shape, expert_skew=expert_skew):
        row = {"rank": pending.rank, "expert_skew": expert_skew, "layers": pending.layers}
        try:
            report = pending.wait(time.monotonic() + TIMEOUT_S).report
        except RunError as error:
            yield {**row, "error": str(error)}
            continue
        tables = {name: getattr(report, name) for name in ("phases", "end_bytes", "holders")}
        in_gib = {
            name.replace("end_bytes", "held"): {key: round(value / 2**30, 2) for key, value in table.items()}
            for name, table in tables.items()
        }
        yield {**row, "dry_depths": pending.depths, "peak_gib": round(report.peak_bytes / 2**30, 2), **in_gib}


def main() -> None:
    """Print the memory of every recipe and distinct rank, with balanced experts and with 1.5 times as many tokens."""
    from megatron_grpo.planning.trace import start_trace_pool

    rows = []
    with start_trace_pool() as pool:
        for name, config, shape in recipes():
            for skew in (1.0, 1.5) if shape.experts is not None else (1.0,):
                for result in measure(pool, config, shape, skew):
                    rows.append({"recipe": name, **result})
                    print(rows[-1], file=sys.stderr)
    print(json.dumps({**header("dry_recipes"), "results": rows}, indent=1))


if __name__ == "__main__":
    main()
