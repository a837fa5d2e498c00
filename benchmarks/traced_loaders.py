"""CPU seconds and memory of tracing vLLM's loaders at full size, on a CPU: python benchmarks/traced_loaders.py

Prints one JSON object. Each rank is traced in a process of its own, as in an engine, where all ranks trace at once.
`assumed_elements` are those that the rank would keep if vLLM cut matrices as Megatron-Core does (`assume_boxes`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from header import header

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.models.families import measure_tensors
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.planning.engine_shards import assume_boxes
from megatron_grpo.weight_sync.boxes import count_elements, pack_boxes

CONFIGS = Path(__file__).parents[1] / "tests" / "data" / "hf_configs"
LAYOUTS = {
    "TP8": GenerationParallelConfig(tensor=8),
    "TP8, EP8": GenerationParallelConfig(tensor=8, expert=8),
}
RANKS = (0, 3)
"""Ranks that are traced of each layout."""


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM prints its log to where the JSON goes
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["qwen3_235b_a22b", "deepseek_v3"])
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    cases = []
    for model in options.models:
        raw = json.loads((CONFIGS / model / "config.json").read_text())
        raw.pop("quantization_config", None)  # the policy publishes bfloat16
        for layout, parallel in LAYOUTS.items():
            for rank in RANKS:
                with context.Pool(1) as pool:
                    figures = pool.apply(_trace, (raw, parallel, rank))
                cases.append({"model": model, "layout": layout, "rank": rank, **figures})
    print(json.dumps({**header("traced_loaders"), "cases": cases}, indent=2))


def _trace(raw: dict[str, Any], parallel: GenerationParallelConfig, rank: int) -> dict[str, Any]:
    """Trace a rank; return its figures."""
    import torch
    from vllm.config import set_current_vllm_config

    from megatron_grpo.planning.meta_engine import build_rank
    from megatron_grpo.weight_sync.weight_trace import trace_model

    shape = parse_model_shape(raw)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        imported_gib, began = _read_peak_gib(), time.process_time()
        with build_rank(Path(folder), rank, parallel, "bfloat16") as (model, config), set_current_vllm_config(config):
            built = time.process_time()
            trace = trace_model(model, measure_tensors(shape), torch.bfloat16)
            traced = time.process_time()
    text = pack_boxes(trace.boxes)
    packed = time.process_time()
    assert not trace.unexplained, trace.unexplained
    elements = sum(count_elements(box.layout.tensor) for box in trace.boxes)
    assumed = sum(count_elements(box.layout.tensor) for box in assume_boxes(shape, parallel)[rank])
    return {
        "parallel": asdict(parallel),
        "tensors": sum(1 for box in trace.boxes if box.tensor),
        "boxes": len(trace.boxes),
        "elements": elements,
        "assumed_elements": assumed,
        "build_cpu_s": round(built - began, 2),
        "trace_cpu_s": round(traced - built, 2),
        "pack_cpu_s": round(packed - traced, 2),
        "packed_bytes": len(text),
        "peak_gib": round(_read_peak_gib(), 2),
        "peak_after_imports_gib": round(imported_gib, 2),
    }


def _read_peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
