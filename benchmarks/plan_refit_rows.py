"""Plans of refits that others have measured (`refit_rows` of plan_rows.yaml), and their errors.

    python benchmarks/plan_refit_rows.py [row ...] > result.json

Needs no GPU and no weights.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from header import header
from plan_rows import error_of, shape_of

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.refit_summary import RefitSummary, summarize_run, time_transfer
from megatron_grpo.platform.hardware import Hardware, load_hardware

HERE = Path(__file__).parent
_SUMMARIES: dict[str, RefitSummary] = {}  # some rows differ in the GPU alone


def load_gpu(name: str) -> Hardware:
    """Load a profile; that of GH200 is H100's, with another network."""
    if name != "gh200":
        return load_hardware(name)
    return replace(load_hardware("h100"), name=name, network_bytes_per_s=25e9, gpus_per_domain=4)


def build_config(row: Mapping[str, Any]) -> Config:
    """Build the configuration of a row's refit."""
    config, layout = Config(), row["layout"]
    config.policy.parallel = ParallelConfig(**layout, sequence=layout.get("tensor", 1) > 1)
    config.generation.parallel = GenerationParallelConfig(**row["engines"])
    config.generation.placement, config.cluster.gpus_per_node = "separate", 4 if row["gpu"] == "gh200" else 8
    if row.get("fp8"):
        config.refit.fp8_blocks = True
        config.generation.engine_args = {"quantization": "fp8_per_block"}
    return config


def _summarize_once(key: str, config: Config, shape: ModelShape, gpu: Hardware) -> RefitSummary:
    if key not in _SUMMARIES:
        _SUMMARIES[key] = summarize_run(config, shape, gpu)
    return _SUMMARIES[key]


def evaluate(row: Mapping[str, Any], models: Mapping[str, Any]) -> dict[str, Any]:
    """Plan a row, and compare it with its published seconds."""
    config, shape, gpu = build_config(row), shape_of(row["model"], models), load_gpu(row["gpu"])
    messages_alone = replace(gpu.efficiency, refit=1.0, refit_s=0.0, refit_piece_s=0.0)  # at the speed of collectives
    ideal = replace(gpu, efficiency=messages_alone)
    summary = _summarize_once(repr((config, shape)), config, shape, gpu)
    planned = {"planned": time_transfer(config, summary, gpu), "messages alone": time_transfer(config, summary, ideal)}
    lowest, highest = row["published"]
    errors = {}
    for name, seconds in planned.items():
        nearer = min(max(seconds, lowest), highest)  # an interval counts as an error of 0 if it has the seconds
        errors[name] = round(error_of("step_s", nearer, [seconds]), 4)
    seconds_by_name = {name: round(seconds, 3) for name, seconds in planned.items()}
    facts = {name: row[name] for name in ("id", "source", "gpu", "published")}
    return {**facts, "fitted": row.get("fitted", False), **seconds_by_name, "error": errors}


def summarize(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Find the median and worst error, of all rows and of those held out."""
    summary = {}
    for title, rows in (("all", results), ("held_out", [row for row in results if not row["fitted"]])):
        for name in ("planned", "messages alone"):
            errors = [abs(row["error"][name]) for row in rows]
            figures = {"rows": len(errors), "median": statistics.median(errors), "worst": max(errors)} if errors else {}
            summary[f"{name}, {title}"] = figures
    return summary


def main() -> None:
    """Print the rows with their errors, and the summary."""
    file = yaml.safe_load((HERE / "plan_rows.yaml").read_text())
    rows = [row for row in file["refit_rows"] if not sys.argv[1:] or row["id"] in sys.argv[1:]]
    results = []
    for row in rows:
        results.append(evaluate(row, file["models"]))
        print(results[-1], file=sys.stderr, flush=True)
    print(json.dumps({**header("plan_refit_rows"), "summary": summarize(results), "rows": results}, indent=1))


if __name__ == "__main__":
    main()
