"""Plans of steps that others have measured (plan_rows.yaml), and how far they are off.

    python benchmarks/plan_rows.py [row ...] > result.json

Needs no GPU and no weights. A row is planned as its source describes the run: a plain training step of full sequences.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from header import header

from megatron_grpo.config.schema import Config, Fp8Config, ParallelConfig
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.costs import Overlap
from megatron_grpo.planning.dry.work import Work
from megatron_grpo.planning.generation_cost import Lengths
from megatron_grpo.planning.step import build_step_times
from megatron_grpo.planning.trace import (
    RankTrace,
    _extrapolate_work,
    _run_dry,
    extrapolate_report,
    start_trace_pool,
    submit_traces,
)
from megatron_grpo.platform.hardware import load_hardware

if TYPE_CHECKING:
    from megatron_grpo.planning.dry_run import DryReport

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "tests" / "data" / "hf_configs"
DEADLINE_S = 1800.0
PACKED = 8
"""Sequences in the full length of a row whose data is packed: of one to this many, which the source does not state."""
DEPTHS = (2, 3)
"""Layers of a stage in the shallow dry runs."""
LOGIT_BYTES = 8
"""Bytes of each logit that Megatron's loss holds at once: bfloat16, float32, gradient in bfloat16. Our head holds
none, so they are added to the last stage."""


def shape_of(name: str, models: Mapping[str, Any]) -> ModelShape:
    """Sizes of a model of the file, or of tests/data/hf_configs."""
    fields = dict(models.get(name, {"base": name}))
    base = fields.pop("base", None)
    raw = json.loads((CONFIGS / base / "config.json").read_text()) if base else {}
    return parse_model_shape(raw | fields)


def cases(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The row, or one for either end of the numbers that its source does not state."""
    for index in (0, 1):
        case_row = {
            key: value[index] if key == "gpus" and isinstance(value, list) else value for key, value in row.items()
        }
        layout = row["layout"].items()
        case_row["layout"] = {key: value[index] if isinstance(value, list) else value for key, value in layout}
        if index == 0 or case_row["gpus"] != row["gpus"] or case_row["layout"] != row["layout"]:
            yield case_row
        if case_row["gpus"] == row["gpus"] and case_row["layout"] == row["layout"]:
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
        policy.fp8 = Fp8Config(format="hybrid", recipe=case["fp8"], parameters=case.get("fp8_parameters", False))
    policy.optimizer.cpu_offload = 1.0 if case.get("offload") else 0.0
    config.loss_fn.reference_policy_kl_penalty = 0.0
    return config


def find_overlap(case: Mapping[str, Any], shape: ModelShape) -> Overlap:
    """The messages that the row's recipe overlaps."""
    once = shape.experts is not None and case.get("grouped_tokens", False)
    gradients = case.get("gradient_overlap", True)
    return Overlap(
        gradients=gradients,
        parameters=gradients,
        tensor=case.get("tensor_overlap", False),
        expert_copies=shape.experts.top_k if once and shape.experts is not None else 1,
    )


Run = tuple[Config, ModelShape, int]
"""Configuration, model and rank of a dry run."""
Place = tuple[int | str, int]
"""Pipeline stage and layers of a dry run; "time" for one stage alone, 0 for all layers."""


def time_runs(case: Mapping[str, Any], shape: ModelShape) -> dict[Place, Run]:
    """Dry runs of one stage with 2 and 3 layers: every layer's work is the same."""
    config = config_of(case)
    config.policy.parallel = _one_chunk(config.policy.parallel, pipeline=1)
    return {("time", depth): (config, _with_layers(shape, depth), 0) for depth in DEPTHS}


def memory_runs(case: Mapping[str, Any], shape: ModelShape) -> dict[Place, Run]:
    """Dry runs of the stages whose memory is compared.

    The first and the last with 2 and 3 layers, as far as time's do not show it; of an interleaved pipeline the first
    stage, or the last one, with all of its layers.
    """
    config = config_of(case)
    runs_by_stage: dict[Place, Run] = {}
    parallel = config.policy.parallel
    per_stage, last = parallel.world_size // parallel.pipeline, parallel.pipeline - 1
    if not any(name.startswith("memory") for name in case["published"]) or parallel.pipeline == 1:
        return {}
    if parallel.virtual_pipeline > 1:
        stage = last if case.get("stage") == "last" else 0
        return {(stage, 0): (config, shape, stage * per_stage)}
    config.policy.parallel = _one_chunk(parallel, parallel.pipeline)
    for stage in (last,) if case.get("stage") == "last" else (0, last):
        for depth in DEPTHS:
            runs_by_stage[stage, depth] = config, _with_layers(shape, depth * parallel.pipeline), stage * per_stage
    return runs_by_stage


def _one_chunk(parallel: ParallelConfig, pipeline: int) -> ParallelConfig:
    return replace(parallel, pipeline=pipeline, virtual_pipeline=1, count_embedding=False, count_loss=False)


def _with_layers(shape: ModelShape, layers: int) -> ModelShape:
    experts = shape.experts
    return replace(shape, layers=layers, experts=experts and replace(experts, layers=(True,) * layers))


def chunk_layers(case: Mapping[str, Any], shape: ModelShape) -> list[list[int]]:
    """Layers by stage and chunk; an embedding or a head that counts as a layer takes the place of one."""
    layout = case["layout"]
    stages, chunks = layout.get("pipeline", 1), layout.get("virtual_pipeline", 1)
    counted = [int(layout.get(name, False)) for name in ("count_embedding", "count_loss")]
    per_chunk, rest = divmod(shape.layers + sum(counted), stages * chunks)
    assert rest == 0, "layers are not divisible"
    counts = [[per_chunk] * chunks for _ in range(stages)]
    counts[0][0] -= counted[0]
    counts[-1][-1] -= counted[1]
    return counts


def traces_of(case: Mapping[str, Any], shape: ModelShape, reports: Mapping[Place, DryReport]) -> list[RankTrace]:
    """The work of every stage, put together of a layer's and of what it has besides: the embedding, which
    is the first one's, and the head, which is the last one's. Stages send each other the hidden states of a microbatch.
    """
    layers, traces = chunk_layers(case, shape), []
    low, high = (reports["time", depth] for depth in DEPTHS)
    last, layout = len(layers) - 1, case["layout"]
    passes, ranks = low.passes["train", 0], case["gpus"] // len(layers)
    tokens = case["micro"] * case["sequence"] // layout.get("context", 1) // layout.get("tensor", 1)
    for stage, depths in enumerate(layers):
        work: Counter[Work] = Counter()
        for chunk, depth in enumerate(depths):
            first, end = (stage, chunk) == (0, 0), (stage, chunk) == (last, len(depths) - 1)
            for item in low.work.keys() | high.work.keys():
                slope = high.work[item] - low.work[item]
                is_own = first if "embedding" in item.name else end
                times = depth * slope + (low.work[item] - DEPTHS[0] * slope if is_own else 0)
                if item.chunk is not None and times > 0:
                    work[item._replace(chunk=chunk)] += _times(item, times)
        base_work = _extrapolate_work(low.work, high.work, sum(depths) - DEPTHS[0])
        work.update({item: times for item, times in base_work.items() if item.chunk is None})
        if last:
            ends = (stage * ranks, (stage + 1) % len(layers) * ranks)
            work[Work("train", None, False, "send", "send", nbytes=2 * tokens * shape.hidden, ranks=ends)] += 1
        counts = Counter({("train", chunk): passes for chunk in range(len(depths))})
        traces.append(RankTrace(stage, stage, sum(depths), 1.0, replace(low, work=work, passes=counts), {}))
    return traces


def _times(work: Work, times: int) -> Any:
    """How often a loss over whole logits does this; our kernel computes them twice: four products instead of three."""
    return times * 2 / 3 if work.name == "head" and work.is_backward else times


def model_flops(shape: ModelShape, sequence: int) -> float:
    """Operations for each token: 6 for every number of a matrix, and causal attention, forward and backward."""
    attention = shape.hidden * shape.head_dim * 2 * (shape.attention_heads + shape.key_value_heads)
    dense = 3 * shape.hidden * shape.ffn_hidden
    numbers = shape.layers * (attention + dense) + shape.hidden * shape.vocab
    assert shape.experts is None, "the formula is that of a dense model"
    return 6.0 * numbers + 6.0 * shape.layers * sequence * shape.attention_heads * shape.head_dim


def peak_gib(case: Mapping[str, Any], shape: ModelShape, memory: Mapping[int, DryReport]) -> float:
    """The peak of the tensors of training on the row's rank, GiB.

    Recipes differ from ours in types: gradients in bfloat16, and moments in bfloat16, take half of the bytes.
    """
    last = case["layout"].get("pipeline", 1) - 1
    peaks = []
    for stage, stage_memory in memory.items():
        peak = max(stage_memory.phases[name] for name in ("train", "first step") if name in stage_memory.phases)
        if stage == last:
            tokens = case["micro"] * case["sequence"] // case["layout"].get("context", 1)
            peak += LOGIT_BYTES * tokens * shape.vocab // case["layout"].get("tensor", 1)
        if case.get("bf16_gradients"):
            peak -= stage_memory.holders.get("gradients", 0) // 2
        if case.get("bf16_moments"):
            peak -= stage_memory.holders.get("optimizer", 0) // 3  # two of three numbers in two bytes each, not in four
        if stage == last or case.get("stage") != "last":
            peaks.append(peak)
    return max(peaks) / 2**30


def plan_row(
    case: Mapping[str, Any], shape: ModelShape, traces: Sequence[RankTrace], memory: Mapping[int, DryReport]
) -> dict[str, list[float]]:
    """What the plan says of each published number; two numbers where the source leaves the meaning open."""
    config, batch, sequence = config_of(case), case["batch"], case["sequence"]
    overlap = find_overlap(case, shape)
    every = []
    for parts in (1, PACKED) if case.get("packed") else (1,):
        lengths = Lengths(0.0, np.full(batch * parts, sequence / parts), "as published")
        every.append(
            build_step_times(
                config, shape, traces, load_hardware(case["gpu"]), lengths, workload="pretrain", overlap=overlap
            )
        )
    figures_by_name: dict[str, list[float]] = {}
    for name in case["published"]:
        if name.startswith("memory"):
            gpu, peak = load_hardware(case["gpu"]), peak_gib(case, shape, memory)
            cached = peak * (1 + gpu.fragmentation)
            figures_by_name[name] = [cached, cached + gpu.reserve_gib] if name.endswith("device") else [peak]
        elif name == "tokens":
            figures_by_name[name] = [plan.tokens_per_s_per_gpu for plan in every]
        elif name == "tflops":
            figures_by_name[name] = [plan.tokens_per_s_per_gpu * model_flops(shape, sequence) / 1e12 for plan in every]
        else:
            figures_by_name[name] = [plan.step_s for plan in every]
    return figures_by_name


def error_of(name: str, published: float, ends: Sequence[float]) -> float:
    """Relative error of the planned memory or seconds; 0 within an interval, else that of the nearer end."""
    seconds = [published / ratio if name in ("tokens", "tflops") else ratio / published for ratio in ends]
    if min(seconds) <= 1 <= max(seconds):
        return 0.0
    return min((ratio - 1 for ratio in seconds), key=abs)


def memory_of(case: Mapping[str, Any], shape: ModelShape, reports: Mapping[Place, DryReport]) -> dict[int, DryReport]:
    """The memory of ranks by their stage, from a full dry run, or extrapolated from shallow ones."""
    layers, memories = chunk_layers(case, shape), {}
    for stage in (0, len(layers) - 1):
        if (stage, 0) in reports:
            memories[stage] = reports[stage, 0]
        elif len(layers) == 1 or (stage, DEPTHS[0]) in reports:
            low, high = (reports["time" if len(layers) == 1 else stage, depth] for depth in DEPTHS)
            memories[stage] = extrapolate_report(low, high, layers[stage][0] - DEPTHS[0])[0]
    return memories


def trace_stages(
    case: Mapping[str, Any], shape: ModelShape, pool: Any
) -> tuple[Sequence[RankTrace], dict[int, DryReport]]:
    """The work of the stages, and the reports whose memory is compared.

    Layers that are unlike run whole, stage by stage, as in a plan.
    """
    if shape.mamba_layers or shape.windowed:
        deadline = time.monotonic() + DEADLINE_S
        traces = [pending.wait(deadline) for pending in submit_traces(pool, config_of(case), shape, moves=False)]
        return traces, {trace.stage: trace.report for trace in traces}
    runs = time_runs(case, shape) | memory_runs(case, shape)
    futures = {index: pool.submit(_run_dry, *run, False, 1.0, False) for index, run in runs.items()}
    reports = {index: row.result(DEADLINE_S) for index, row in futures.items()}
    return traces_of(case, shape, reports), memory_of(case, shape, reports)


def evaluate(row: Mapping[str, Any], models: Mapping[str, Any], pool: Any) -> dict[str, Any]:
    """A row's planned numbers, at either end of unstated ones, and its errors."""
    shape, began = shape_of(row["model"], models), time.monotonic()
    ends = [plan_row(case, shape, *trace_stages(case, shape, pool)) for case in cases(row)]
    published = row["published"]
    values = {name: [value for end in ends for value in end[name]] for name in published}
    return {
        "id": row["id"],
        "source": row["source"],
        "fitted": row.get("fitted", False),
        "ranking": row.get("ranking"),
        "unlike": row.get("unlike"),
        "published": published,
        "planned": {name: [round(value, 3) for value in values[name]] for name in published},
        "error": {name: round(error_of(name, value, values[name]), 4) for name, value in published.items()},
        "seconds_of_planning": round(time.monotonic() - began, 1),
    }


def summary(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median and worst error of memory and time, over all rows, those held out, and those of the latter
    whose sources state all numbers; and the rankings."""
    figures: dict[str, Any] = {}
    for title, names in (("memory", ("memory_gib", "memory_gib_device")), ("time", ("tokens", "tflops", "step_s"))):
        alike = [row for row in results if not row["unlike"]]
        held_out = [row for row in alike if not row["fitted"]]
        for group, rows in (("all", alike), ("held_out", held_out), ("held_out_all_stated", held_out)):
            stated = group.endswith("stated")
            errors = [
                abs(value)
                for result_row in rows
                for name, value in result_row["error"].items()
                if name in names and not (stated and len(result_row["planned"][name]) > 1)
            ]
            if errors:
                numbers = {"rows": len(errors), "median": statistics.median(errors), "worst": max(errors)}
                figures[f"{title}_{group}"] = {key: round(value, 4) for key, value in numbers.items()}
    for name in {result_row["ranking"] for result_row in results if result_row["ranking"]}:
        rows = [result_row for result_row in results if result_row["ranking"] == name]
        for key in ("published", "planned"):
            speeds = {result_row["id"]: float(np.mean(result_row[key]["tflops"])) for result_row in rows}
            figures[f"ranking_{name}_{key}"] = sorted(speeds, key=speeds.__getitem__, reverse=True)
    return figures


def main() -> None:
    """Print the rows with their errors, and the summary."""
    file = yaml.safe_load((HERE / "plan_rows.yaml").read_text())
    chosen = [row for row in file["rows"] if not sys.argv[1:] or row["id"] in sys.argv[1:]]
    results = []
    with start_trace_pool(1) as pool:
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
