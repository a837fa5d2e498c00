"""Plans of steps that others have measured (plan_rows.yaml), and how far they are off.

    python benchmarks/plan_rows.py [row ...] > result.json

Needs no GPU and no weights. A row is planned as its source describes the run: a plain training step of full sequences.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from header import header

from megatron_grpo.config.schema import Config, Fp8Config, ParallelConfig
from megatron_grpo.proof.plan.costs import Overlap
from megatron_grpo.proof.plan.generation import Lengths
from megatron_grpo.proof.plan.hardware import hardware
from megatron_grpo.proof.plan.step import step_times
from megatron_grpo.proof.plan.trace import RankTrace, submit_traces, tracing
from megatron_grpo.weights.families import shape_of_config
from megatron_grpo.weights.shape import ModelShape

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "tests" / "data" / "hf_configs"
DEADLINE_S = 1800.0
LOGIT_BYTES = 8
"""Bytes of each logit that Megatron's loss holds at once: bfloat16, float32, gradient in bfloat16. Our head holds
none, so they are added to the last stage."""


def shape_of(name: str, models: Mapping[str, Any]) -> ModelShape:
    """Sizes of a model of the file, or of tests/data/hf_configs."""
    given = dict(models.get(name, {"base": name}))
    base = given.pop("base", None)
    raw = json.loads((CONFIGS / base / "config.json").read_text()) if base else {}
    return shape_of_config(raw | given)


def cases(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The row, or one for either end of the numbers that its source does not state."""
    for place in (0, 1):
        found = {
            key: value[place] if key == "gpus" and isinstance(value, list) else value for key, value in row.items()
        }
        layout = row["layout"].items()
        found["layout"] = {key: value[place] if isinstance(value, list) else value for key, value in layout}
        if place == 0 or found["gpus"] != row["gpus"] or found["layout"] != row["layout"]:
            yield found
        if found["gpus"] == row["gpus"] and found["layout"] == row["layout"]:
            return


def config_of(case: Mapping[str, Any]) -> Config:
    """The configuration of a row."""
    config, layout = Config(), dict(case["layout"])
    policy = config.policy
    parts = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1)
    policy.parallel = ParallelConfig(**layout, data=case["gpus"] // parts, sequence=layout.get("tensor", 1) > 1)
    policy.max_total_sequence_length = case["sequence"]
    policy.microbatch_tokens = case["micro"] * case["sequence"]
    policy.activation_checkpointing = case.get("recompute") == "full"
    if isinstance(case.get("recompute"), list):
        policy.recompute_modules = case["recompute"]
    if case.get("fp8"):
        policy.fp8 = Fp8Config(format="hybrid", recipe=case["fp8"])
    policy.optimizer.cpu_offload = 1.0 if case.get("offload") else 0.0
    config.loss_fn.reference_policy_kl_penalty = 0.0
    return config


def overlap_of(case: Mapping[str, Any], shape: ModelShape) -> Overlap:
    """The messages that the row's recipe overlaps."""
    once = shape.experts is not None and case.get("grouped_tokens", False)
    gradients = case.get("gradient_overlap", True)
    return Overlap(
        gradients=gradients,
        parameters=gradients,
        tensor=case.get("tensor_overlap", False),
        expert_copies=shape.experts.top_k if once and shape.experts is not None else 1,
    )


def without_recomputed_logits(trace: RankTrace) -> RankTrace:
    """The trace with three products of the head, as in a loss over whole logits; our kernel computes them twice."""
    work = {
        one: number * 2 / 3 if one.name == "head" and one.is_backward else number
        for one, number in trace.report.work.items()
    }
    return replace(trace, report=replace(trace.report, work=work))


def model_flops(shape: ModelShape, sequence: int) -> float:
    """Operations for each token: 6 for every number of a matrix, and causal attention, forward and backward."""
    attention = shape.hidden * shape.head_dim * 2 * (shape.attention_heads + shape.key_value_heads)
    dense = 3 * shape.hidden * shape.ffn_hidden
    numbers = shape.layers * (attention + dense) + shape.hidden * shape.vocab
    assert shape.experts is None, "the formula is that of a dense model"
    return 6.0 * numbers + 6.0 * shape.layers * sequence * shape.attention_heads * shape.head_dim


def peak_gib(case: Mapping[str, Any], shape: ModelShape, traces: Sequence[RankTrace], on_device: bool) -> float:
    """The peak of training of the row's rank, GiB; on the device, with the profile's reserve."""
    last = case["layout"].get("pipeline", 1) - 1
    gpu, found = hardware(case["gpu"]), []
    for one in traces:
        peak = max(one.report.phases[name] for name in ("train", "first step") if name in one.report.phases)
        if one.stage == last:
            tokens = case["micro"] * case["sequence"] // case["layout"].get("context", 1)
            peak += LOGIT_BYTES * tokens * shape.vocab // case["layout"].get("tensor", 1)
        if one.stage == last or case.get("stage") != "last":
            found.append(peak * (1 + gpu.fragmentation) + gpu.reserve_gib * 2**30 if on_device else peak)
    return max(found) / 2**30


def planned(case: Mapping[str, Any], shape: ModelShape, traces: Sequence[RankTrace]) -> dict[str, float]:
    """What the plan says of each published number."""
    config, batch = config_of(case), case["batch"]
    lengths = Lengths(0.0, np.full(batch, float(case["sequence"])), "as published")
    ranks = [without_recomputed_logits(one) for one in traces]
    overlap = overlap_of(case, shape)
    times = step_times(config, shape, ranks, hardware(case["gpu"]), lengths, workload="pretrain", overlap=overlap)
    found: dict[str, float] = {}
    for name in case["published"]:
        if name.startswith("memory"):
            found[name] = peak_gib(case, shape, traces, name.endswith("device"))
        elif name == "tokens":
            found[name] = times.tokens_per_s_per_gpu
        elif name == "tflops":
            found[name] = times.tokens_per_s_per_gpu * model_flops(shape, case["sequence"]) / 1e12
        else:
            found[name] = times.step_s
    return found


def error_of(name: str, published: float, ends: Sequence[float]) -> float:
    """Relative error of the planned memory or seconds; 0 within an interval, else that of the nearer end."""
    seconds = [published / one if name in ("tokens", "tflops") else one / published for one in ends]
    if min(seconds) <= 1 <= max(seconds):
        return 0.0
    return min((one - 1 for one in seconds), key=abs)


def evaluate(row: Mapping[str, Any], models: Mapping[str, Any], pool: Any) -> dict[str, Any]:
    """A row's planned numbers, at either end of unstated ones, and its errors."""
    shape, began, ends = shape_of(row["model"], models), time.monotonic(), []
    for case in cases(row):
        pending = submit_traces(pool, config_of(case), shape, moves=False)
        traces = [one.result(began + DEADLINE_S) for one in pending]
        ends.append(planned(case, shape, traces))
    published = row["published"]
    return {
        "id": row["id"],
        "source": row["source"],
        "fitted": row.get("fitted", False),
        "ranking": row.get("ranking"),
        "published": published,
        "planned": {name: [round(one[name], 3) for one in ends] for name in published},
        "error": {
            name: round(error_of(name, value, [one[name] for one in ends]), 4) for name, value in published.items()
        },
        "seconds_of_planning": round(time.monotonic() - began, 1),
    }


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and worst error of memory and of time, over all rows and over those held out; and the rankings."""
    found: dict[str, Any] = {}
    for title, names in (("memory", ("memory_gib", "memory_gib_device")), ("time", ("tokens", "tflops", "step_s"))):
        for which, rows in (("all", results), ("held_out", [one for one in results if not one["fitted"]])):
            errors = [abs(value) for one in rows for name, value in one["error"].items() if name in names]
            if errors:
                numbers = {"rows": len(errors), "median": statistics.median(errors), "worst": max(errors)}
                found[f"{title}_{which}"] = {key: round(value, 4) for key, value in numbers.items()}
    for name in {one["ranking"] for one in results if one["ranking"]}:
        rows = [one for one in results if one["ranking"] == name]
        orders = [
            sorted(rows, key=lambda one, key=key: -np.mean(one[key]["tflops"])) for key in ("published", "planned")
        ]
        found[f"ranking_{name}"] = [[one["id"] for one in order] for order in orders]
    return found


def main() -> None:
    """Print the rows with their errors, and the summary."""
    file = yaml.safe_load((HERE / "plan_rows.yaml").read_text())
    chosen = [row for row in file["rows"] if not sys.argv[1:] or row["id"] in sys.argv[1:]]
    results = []
    with tracing(1) as pool:
        for row in chosen:
            results.append(evaluate(row, file["models"], pool))
            print(results[-1], file=sys.stderr)
    print(
        json.dumps(
            {**header("plan_rows"), "sources": file["sources"], "summary": summary(results), "rows": results}, indent=1
        )
    )


if __name__ == "__main__":
    main()
