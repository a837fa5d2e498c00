"""Runs an evaluation: samples and scores responses to each set, and writes results.json."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from megatron_grpo.algorithms.validation import sample_responses
from megatron_grpo.batch.generation_requests import SamplingSettings, make_sampling_settings
from megatron_grpo.cluster.cleanup import cleanup_after_kill, interrupt_on_sigterm
from megatron_grpo.cluster.process_log import driver_log
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.output import tolerant_output
from megatron_grpo.config.schema import Config, MoeConfig
from megatron_grpo.data.load_prompts import PromptReader
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.evaluation.request import EvaluationRequest
from megatron_grpo.evaluation.results import (
    SAMPLES_FILE,
    AnsweredSet,
    Row,
    compare_evaluations,
    compute_set_results,
    make_sample_row,
)
from megatron_grpo.models.image_store import locate_images
from megatron_grpo.observability.run_files import format_json_line, read_lines, write_json
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.preflight.environment_checks import check_scoring
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.run.launch import start_engines, start_rollouts

RESULTS_FILE = "results.json"


def evaluate(request: EvaluationRequest) -> dict[str, Any]:
    """Sample and score responses to every set, and write the results.

    Returns:
        The content of results.json.

    Raises:
        ConfigError: an environment cannot be made, or a set of prompts, or a row in it, cannot be used.
        RunError: the checkpoint cannot be exported, or a process did not start or failed.
    """
    config, timer = request.config, StepTimer()
    check_scoring(config, [evaluated.rows for evaluated in request.sets.values()])
    before = None if request.compare is None else read_lines(request.compare / SAMPLES_FILE)
    request.output.mkdir(mode=0o700, parents=True, exist_ok=True)
    sets: dict[str, Any] = {}
    rows: list[Row] = []
    with _open_model(request) as model:
        with timer.phase("prompts"):
            reader = PromptReader(config, model, image_store=locate_images(str(request.output)))
            prompts = {
                name: reader.read_held_out(evaluated.key, evaluated.rows) for name, evaluated in request.sets.items()
            }
        for note in reader.notes:
            print(note, flush=True)
        with (
            rollout_pool(config, model, request.output) as rollouts,
            (request.output / SAMPLES_FILE).open("w", encoding="utf-8") as file,
        ):
            sampling = make_sampling_settings(config.generation, reader.stops)
            sampling = replace(sampling, temperature=request.temperature)
            for name, held_out in prompts.items():
                answered = _sample_set(request, name, held_out, sampling, rollouts, timer, file)
                sets[name] = compute_set_results(answered, request.k)
                rows += [row for group in answered.rows for row in group]
    results: dict[str, Any] = {
        "checkpoint": str(request.checkpoint),
        "samples": request.samples,
        "temperature": request.temperature,
        "seed": config.loop.seed,
        "interval": "95%, percentiles of 10,000 bootstrap resamples of prompts",
        "sets": sets,
        "timing": timer.seconds,
    }
    if before is not None:
        results["compared"] = {"with": str(request.compare), "sets": compare_evaluations(rows, before)}
    write_json(request.output / RESULTS_FILE, results)
    return results


def _sample_set(
    request: EvaluationRequest,
    name: str,
    held_out: list[DatumSpec],
    sampling: SamplingSettings,
    rollouts: RolloutPool,
    timer: StepTimer,
    file: TextIO,
) -> AnsweredSet:
    config, answered = request.config, AnsweredSet(held_out, [], [])
    size = max(1, config.loop.val_batch_size // request.samples)
    prompts = iter(held_out)
    for groups in sample_responses(
        rollouts, held_out, request.samples, sampling, seed=config.loop.seed, size=size, timer=timer
    ):
        for group, trajectories, prompt in zip(groups, rollouts.fetch(groups), prompts, strict=False):
            answered.outcomes.append(group.outcomes)
            answered.rows.append([make_sample_row(name, prompt, trajectory) for trajectory in trajectories])
            file.writelines(format_json_line(row) for row in answered.rows[-1])
    return answered


@contextmanager
def rollout_pool(config: Config, model: Path, output: Path) -> Iterator[RolloutPool]:
    """Start rollout workers over a model's engines; they end with the body.

    Args:
        config: the configuration of the evaluation.
        model: folder in Hugging Face format.
        output: folder whose logs/ and images/ the processes write to.

    Raises:
        RunError: a process did not start.
    """
    with ExitStack() as stack:
        stack.enter_context(tolerant_output(of_run=True))
        stack.enter_context(interrupt_on_sigterm())
        one_machine = config.cluster.ray_address is None
        stack.enter_context(driver_log(output, config.logger.level, one_machine=one_machine))
        remove_if_killed = stack.enter_context(cleanup_after_kill()) if one_machine else None
        cluster = RayCluster(config.cluster)
        stack.callback(cluster.shutdown)
        cluster.start(remove_if_killed)
        # Engines record the experts that they choose for training to replay; an evaluation does not train.
        untrained = replace(config, policy=replace(config.policy, moe=MoeConfig()))
        store = locate_images(str(output))
        generation = start_engines(untrained, model, cluster, stack, store)
        rollouts = start_rollouts(config, model, generation, stack, image_store=store)
        generation.wait_ready()
        rollouts.wait_ready()
        yield rollouts


@contextmanager
def _open_model(request: EvaluationRequest) -> Iterator[Path]:
    """Yield the model's folder, to which a run's checkpoint is exported first."""
    if not request.is_run:
        yield request.checkpoint
        return
    with tempfile.TemporaryDirectory(prefix=".model-", dir=request.output) as temporary:
        folder = Path(temporary) / "model"
        # A process of its own releases the memory of the export before the engines start.
        command = [sys.executable, "-m", "megatron_grpo.export", f"checkpoint={request.checkpoint}", f"output={folder}"]
        family = request.config.policy.model.family
        command += [f"policy.model.family={family}"] if family is not None else []
        exported = subprocess.run(command, capture_output=True, text=True, check=False)
        if exported.returncode:
            raise RunError(exported.stderr.strip().removeprefix("export: ") or "the checkpoint cannot be exported")
        yield folder
