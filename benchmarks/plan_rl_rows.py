"""Plans of reinforcement learning steps that others have measured (`rl_rows` of plan_rows.yaml), and their errors.

    python benchmarks/plan_rl_rows.py [row ...] > result.json

Needs no GPU and no weights.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from header import header
from plan_rows import error_of, shape_of
from rl_work import Kind, build_traces, choose_runs, pick_layers

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.generation_cost import find_lengths
from megatron_grpo.planning.hardware import load_hardware
from megatron_grpo.planning.step import StepTimes, build_step_times
from megatron_grpo.planning.trace import start_trace_pool

if TYPE_CHECKING:
    from megatron_grpo.planning.dry_run import DryReport

HERE = Path(__file__).parent
DEADLINE_S = 1800.0


def build_config(row: Mapping[str, Any]) -> Config:
    """Build the configuration of a row's run."""
    config, layout, engines = Config(), dict(row["layout"]), row["engines"]
    policy, generation, loop = config.policy, config.generation, config.grpo
    parts = layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("context", 1)
    policy.parallel = ParallelConfig(**layout, data=row["gpus"] // parts, sequence=layout.get("tensor", 1) > 1)
    policy.max_total_sequence_length = policy.microbatch_tokens = row["longest"]
    policy.logprob_microbatch_tokens = row["longest"] * row.get("logprob_micro", 1)
    policy.train_global_batch_samples = row.get("optimizer_samples")
    policy.activation_checkpointing = row["recompute"]
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
    return config


def list_dry_runs(row: Mapping[str, Any], shape: ModelShape) -> dict[Kind | None, tuple[Config, ModelShape]]:
    """List the dry runs that a row needs, on one pipeline stage."""
    config = build_config(row | {"prev_logprobs": True, "reference": False})
    parallel = replace(config.policy.parallel, pipeline=1, first_stage_layers=None, last_stage_layers=None)
    config.policy.parallel = parallel
    return {kind: (config, pick_layers(shape, layers)) for kind, layers in choose_runs(shape).items()}


def run_layers(config: Config, shape: ModelShape) -> DryReport:
    """Run training and log-probabilities of one rank dry."""
    import torch  # only in the processes of `start_trace_pool`

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
    return build_step_times(config, shape, traces, gpu, find_lengths(config))


def name_phases(times: StepTimes, row: Mapping[str, Any]) -> dict[str, float]:
    """Name the seconds of a step and of its phases as sources do."""
    phases = times.phase_s
    logprobs_s = phases.get("logprobs", 0.0) + phases.get("reference", 0.0)
    moves_s = phases.get("offload", 0.0) + phases.get("onload", 0.0)
    return {
        "step": times.step_s,
        "generation": phases["generation"],
        "logprobs": logprobs_s,
        "train": phases["train"] + phases["optimizer"],
        "refit": phases["refit"] + moves_s,
    }
