"""Plans of reinforcement learning steps that others have measured (`rl_rows` of plan_rows.yaml), and their errors.

    python benchmarks/plan_rl_rows.py [row ...] > result.json

Needs no GPU and no weights.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import yaml
from header import header
from moves_of_nemo_rl import slow_moves, time_gathered_refit
from plan_rows import error_of, shape_of
from rl_work import Kind, build_traces, choose_runs, pick_layers

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.generation_cost import find_lengths
from megatron_grpo.planning.step import StepTimes, build_step_times
from megatron_grpo.platform.hardware import load_hardware

if TYPE_CHECKING:
    from megatron_grpo.planning.dry_run import DryReport

HERE = Path(__file__).parent


def build_config(row: Mapping[str, Any]) -> Config:
    """Build the configuration of a row's run."""
    config, layout, engines = Config(), dict(row["layout"]), row["engines"]
    policy, generation, loop = config.policy, config.generation, config.sampled_loop
    parts = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1)
    policy.parallel = ParallelConfig(**layout, data=row["gpus"] // parts, sequence=layout.get("tensor", 1) > 1)
    policy.max_total_sequence_length = policy.microbatch_tokens = row["longest"]
    policy.logprob_microbatch_tokens = row["longest"] * row.get("logprob_micro", 1)
    policy.train_global_batch_samples = row.get("optimizer_samples")
    policy.activation_checkpointing = row["recompute"]
    policy.packing = row.get("packing", True)
    generation.parallel = GenerationParallelConfig(tensor=engines["tensor"], data=engines["count"])
    generation.placement = "separate" if "steps_off" in row else "colocated"
    generation.engine.gpu_memory_utilization = engines["memory"]
    generation.max_new_tokens = row["longest"] - row["prompt"]
    loop.num_prompts_per_step, loop.num_generations_per_prompt = row["prompts"], row["copies"]
    loop.async_grpo.enabled = "steps_off" in row
    loop.async_grpo.max_trajectory_age_steps = row.get("steps_off", 0)
    # A run of ours needs no log-probabilities before a single optimizer step; the measured ones compute them anyway.
    loop.seq_logprob_error_threshold = 1e9 if row["prev_logprobs"] else None
    config.loss_fn.reference_policy_kl_penalty = 0.01 if row["reference"] else 0.0
    config.plan.prompt_tokens, config.plan.response_tokens = row["prompt"], row["response"]
    config.plan.response_sigma = row.get("sigma", config.plan.response_sigma)
    return config


def list_dry_runs(row: Mapping[str, Any], shape: ModelShape) -> dict[Kind | None, tuple[Config, ModelShape]]:
    """List the dry runs that a row needs, on one pipeline stage."""
    config = build_config({**row, "prev_logprobs": True, "reference": False, "packing": True})
    parallel = replace(config.policy.parallel, pipeline=1, first_stage_layers=None, last_stage_layers=None)
    config.policy.parallel = parallel
    return {kind: (config, pick_layers(shape, layers)) for kind, layers in choose_runs(shape).items()}


def run_layers(config: Config, shape: ModelShape) -> DryReport:
    """Run training and log-probabilities of one rank dry."""
    import torch  # the tests of generation alone need none

    from megatron_grpo.planning.dry_run import run_dry

    torch.set_num_threads(1)
    return run_dry(config, shape, 0, moves=False, phases={"train", "logprobs"})


def add_reference(report: DryReport) -> DryReport:
    """Add the reference's phase, whose pass is that of log-probabilities."""
    work, passes = report.work.copy(), report.passes.copy()
    work.update({piece._replace(phase="reference"): n for piece, n in report.work.items() if piece.phase == "logprobs"})
    passes.update({("reference", chunk): n for (phase, chunk), n in report.passes.items() if phase == "logprobs"})
    return replace(report, work=work, passes=passes)


def list_cases(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """List the row at both ends of the numbers that its source does not state."""
    unstated = [name for name, value in row.items() if isinstance(value, list)]
    for end in (0, 1) if unstated else (0,):
        yield {name: value[end] if name in unstated else value for name, value in row.items()}


def plan_case(row: Mapping[str, Any], shape: ModelShape, reports: Mapping[Kind | None, DryReport]) -> StepTimes:
    """Plan the step of a row without unstated numbers."""
    config, gpu = build_config(row), load_hardware(row["gpu"])
    traces = build_traces(config, shape, {kind: add_reference(report) for kind, report in reports.items()})
    if row.get("moves") != "nemo_rl":
        return build_step_times(config, shape, traces, gpu, find_lengths(config))
    refit = time_gathered_refit(config, shape, gpu), 0
    with patch("megatron_grpo.planning.step.time_refit", return_value=refit):
        times = build_step_times(config, shape, traces, gpu, find_lengths(config))
    return slow_moves(times, config, shape, gpu)


def name_phases(times: StepTimes) -> dict[str, float]:
    """Name the seconds of a step and of its phases as sources do."""
    phases = times.phase_s
    sums = {
        "generation": ("generation",),
        "logprobs": ("logprobs", "reference"),
        "train": ("train", "optimizer"),
        "refit": ("refit", "offload", "onload"),
    }
    return {"step": times.step_s} | {name: sum(phases.get(part, 0.0) for part in parts) for name, parts in sums.items()}


def evaluate(row: Mapping[str, Any], models: Mapping[str, Any], cache: dict[str, DryReport]) -> dict[str, Any]:
    """Plan a row, and compare it with its published seconds.

    `cache` has the dry runs of earlier rows, and gets those of this one.
    """
    shape, reports = shape_of(row["model"], models), {}
    for kind, (config, layers) in list_dry_runs(next(list_cases(row)), shape).items():
        key = repr((config.policy, layers))
        if key not in cache:
            cache[key] = run_layers(config, layers)
        reports[kind] = cache[key]
    plans = [name_phases(plan_case(case, shape, reports)) for case in list_cases(row)]
    planned = {name: [plan[name] for plan in plans] for name in plans[0]}
    errors = {name: error_of("step_s", seconds, planned[name]) for name, seconds in row["published"].items()}
    return {
        "id": row["id"],
        "source": row["source"],
        "fitted": row.get("fitted", False),
        "published": row["published"],
        "planned": {name: [round(value, 1) for value in values] for name, values in planned.items()},
        "error": {name: round(error, 4) for name, error in errors.items()},
    }


def summarize(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Find the median and worst error of steps and phases, of all rows and of those held out."""
    summary = {}
    for title, rows in (("all", results), ("held_out", [row for row in results if not row["fitted"]])):
        for name in ("step", "generation", "logprobs", "train", "refit"):
            errors = [abs(row["error"][name]) for row in rows if name in row["error"]]
            if errors:
                median, worst = round(statistics.median(errors), 4), round(max(errors), 4)
                summary[f"{name}_{title}"] = {"rows": len(errors), "median": median, "worst": worst}
    return summary


def evaluate_all(names: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Plan the rows with these names; all if there are none."""
    file = yaml.safe_load((HERE / "plan_rows.yaml").read_text())
    cache: dict[str, DryReport] = {}
    rows = [row for row in file["rl_rows"] if not names or row["id"] in names]
    return [evaluate(row, file["models"], cache) for row in rows]


def main() -> None:
    """Print the rows with their errors, and the summary."""
    logging.disable(logging.WARNING)
    results = evaluate_all(sys.argv[1:])
    print(json.dumps({**header("plan_rl_rows"), "summary": summarize(results), "rows": results}, indent=1))


if __name__ == "__main__":
    main()
