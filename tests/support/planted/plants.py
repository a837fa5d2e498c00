"""How a wrong engine, trainer or record is written into a run, and how the rollouts of healthy runs are."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from megatron_grpo.batch.trajectory import Trajectory
from tests.support.recorded_runs import (
    RecordedRun,
    alone,
    consistency,
    edit_config,
    edited_copy,
    sample_rollouts,
    score_rollouts,
)

Tensors = dict[str, Tensor]
Edit = Callable[[Tensors, Tensors], Tensors]
"""Changes the tensors of a model; the second argument has those of the version before."""
Column = list[NDArray[np.float32]]
"""Values of the sampled tokens of every rollout."""
Rollouts = list[Trajectory]
Plant = Callable[[RecordedRun], None]
"""Writes the record of the newest step of a run."""
Forward = Callable[[Any, list[int], int], Tensor]
"""Computes the logits of the next token (`recorded_runs.last_logits`)."""
Choose = Callable[[Tensor], Tensor]
"""Changes the logits that a token is drawn from."""
HEALTHY_ERROR = {"token_mult_prob_error": 1.0000003, "token_mult_prob_error_max": 1.000005}


def tensors_of(folder: Path) -> Tensors:
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def dtype_of(run: RecordedRun) -> torch.dtype:
    return torch.bfloat16 if run.config.policy.precision == "bfloat16" else torch.float32


def draw(run: RecordedRun, version: int = -1, **options: Any) -> Rollouts:
    """Rollouts of an engine with the weights of a version, by default the newest; `options`: of `sample_rollouts`."""
    version %= len(run.versions)
    options = {"version": version, "samples": run.samples, **options}
    return sample_rollouts(run.versions[version], run.prompts(), **options)


def write(run: RecordedRun, drawn: Rollouts, trained: Column, *, recorded: bool, stale: bool = False) -> None:
    """Write rollouts and metrics of the newest step.

    Args:
        run: the run.
        drawn: the rollouts.
        trained: the trainer's log-probabilities of them.
        recorded: whether the rollouts' file has these.
        stale: whether earlier steps were right; else they have the figures of the newest one.
    """
    step = len(run.versions)
    run.write(step, drawn, [{"prev_logprobs": logprobs} for logprobs in trained] if recorded else ())
    figures = consistency(drawn, trained)
    run.write_metrics(
        {number: figures if number == step or not stale else HEALTHY_ERROR for number in range(1, step + 1)}
    )


def write_scored(run: RecordedRun, drawn: Rollouts, *, recorded: bool, stale: bool = False, **options: Any) -> None:
    """Write the newest step with a right trainer; `options`: of `score_rollouts`."""
    write(run, drawn, score_rollouts(run.versions[-1], drawn, **options), recorded=recorded, stale=stale)


def changed_folder(
    run: RecordedRun, edit: Edit | None, config: dict[str, Any] | None = None, against: int = -2
) -> Path:
    """A folder with the weights and the configuration that a wrong side has."""
    right = run.versions[-1]
    if edit is None and config is None:
        return right

    def changed(now: Tensors) -> Tensors:
        after = now if edit is None else edit(now, tensors_of(run.versions[against]))
        return {name: value.contiguous().clone() for name, value in after.items()}  # files take no shared memory

    wrong = edited_copy(right, run.root / "wrong", changed)
    edit_config(wrong, **(config or {}))
    return wrong


def engine(
    edit: Edit | None = None,
    *,
    config: dict[str, Any] | None = None,
    forward: Callable[[RecordedRun], Forward] | None = None,
    rollouts: int | None = None,
    against: int = -2,
    stale: bool = False,
    recorded: bool = False,
    **options: Any,
) -> Plant:
    """An engine that is wrong, and a trainer that is right.

    Args:
        edit: changes of the engine's weights.
        config: changes of the engine's config.json.
        forward: makes the engine's forward pass for the run.
        rollouts: number of rollouts, the first ones, that come from the wrong engine; None: all.
        against: the version whose tensors `edit` gets as the second argument.
        stale: the first step shows nothing yet.
        recorded: the step recorded the trainer's log-probabilities.
        options: further arguments of `sample_rollouts`.
    """

    def plant(run: RecordedRun) -> None:
        usual = {"dtype": dtype_of(run), "temperature": run.config.generation.temperature}
        options_ = options if forward is None else {**options, "forward": forward(run)}
        named = {"version": len(run.versions) - 1, "samples": run.samples}
        drawn = sample_rollouts(
            changed_folder(run, edit, config, against), run.prompts(), **{**named, **usual, **options_}
        )
        if rollouts is not None:
            drawn[rollouts:] = draw(run, **usual)[rollouts:]
        write_scored(run, drawn, recorded=recorded, stale=stale, **usual)

    return plant


def trainer(
    *,
    recorded: bool,
    edit: Edit | None = None,
    forward: Callable[[Any, list[list[int]]], list[Tensor]] = alone,
    change: Callable[[Column], Column] = lambda column: column,
    stale: bool = False,
    **options: Any,
) -> Plant:
    """A trainer that is wrong, and an engine that is right.

    Args:
        recorded: the step recorded the trainer's log-probabilities; else only its metrics show them.
        edit: changes of the trainer's weights.
        forward: the trainer's forward pass over all sequences.
        change: changes of the log-probabilities.
        stale: the first step shows nothing yet.
        options: further arguments of `score_rollouts`.
    """

    def plant(run: RecordedRun) -> None:
        temperature = run.config.generation.temperature
        drawn, wrong = draw(run, temperature=temperature), changed_folder(run, edit)
        trained = change(score_rollouts(wrong, drawn, forward=forward, **{"temperature": temperature, **options}))
        write(run, drawn, trained, recorded=recorded, stale=stale)

    return plant


def record(edit: Callable[[Rollouts], Rollouts]) -> Plant:
    """A run in which both sides are right, whose rollouts were changed afterwards."""

    def plant(run: RecordedRun) -> None:
        drawn = draw(run)
        write_scored(run, drawn, recorded=False)
        run.write(len(run.versions), edit(drawn))

    return plant


def serve_in_turns(count: int, wrong: Mapping[int, dict[str, Any]] | None = None, *, numbered: bool = True) -> Plant:
    """Several engines take turns, some of which are wrong.

    Args:
        count: number of engines.
        wrong: by number of a wrong engine, arguments of `sample_rollouts`, `edit` and `against` of `changed_folder`.
        numbered: whether the rollouts record their engine.
    """

    def plant(run: RecordedRun) -> None:
        usual: dict[str, Any] = {"dtype": dtype_of(run), "temperature": run.config.generation.temperature}
        named = {"version": len(run.versions) - 1, "samples": run.samples}
        drawn = draw(run, **usual)
        for number, options in (wrong or {}).items():
            settings = dict(options)
            folder = changed_folder(run, settings.pop("edit", None), against=settings.pop("against", -2))
            if "forward" in settings:
                settings["forward"] = settings["forward"](run)
            other_drawn = sample_rollouts(folder, run.prompts(), **{**named, **usual, "seed": 8 + number, **settings})
            drawn[number::count] = other_drawn[number::count]
            shutil.rmtree(run.root / "wrong", ignore_errors=True)
        if numbered:
            drawn = [replace(rollout, engine=index % count) for index, rollout in enumerate(drawn)]
        write_scored(run, drawn, recorded=False, **usual)

    return plant


def both_sides(choose: Choose, **options: float) -> Plant:
    """Both sides choose tokens in the same way, and training records its log-probabilities."""

    def plant(run: RecordedRun) -> None:
        drawn = draw(run, choose=choose, dtype=dtype_of(run), **options)
        write_scored(run, drawn, choose=choose, dtype=dtype_of(run), recorded=True)

    return plant


def left_as(edit: Callable[[Rollouts], Rollouts]) -> Plant:
    """Rollouts that the run itself left in another form."""
    return lambda run: write_scored(run, edit(draw(run)), recorded=True)


def copied_samples(distinct: int) -> Plant:
    """So many samples of a prompt are drawn, and the others repeat them: engines or requests have one seed."""

    def plant(run: RecordedRun) -> None:
        drawn = draw(run, samples=distinct, dtype=dtype_of(run))
        copies = [
            replace(rollout, sample=rollout.sample + distinct * again)
            for rollout in drawn
            for again in range(run.samples // distinct)
        ]
        write_scored(run, copies, dtype=dtype_of(run), recorded=False)

    return plant


def at_temperature(temperature: float, trained: float) -> Plant:
    """Tokens are drawn at one temperature, and both sides report log-probabilities at another."""
    return lambda run: write_scored(
        run, draw(run, temperature=temperature, reported=trained), temperature=trained, recorded=True
    )


def link_checkpoints(run: RecordedRun, sources: Sequence[int]) -> None:
    """Let the folders of steps 1, 2, ... be those of other steps."""
    checkpoints = run.run_dir / "checkpoints"
    folder = checkpoints.resolve()
    checkpoints.unlink()
    checkpoints.mkdir()
    for number, source in enumerate(sources, start=1):
        (checkpoints / f"step_{number}").symlink_to(folder / f"step_{source}")


def checkpoints_of(sources: Sequence[int], *, recorded: bool = False) -> Plant:
    """A right run whose checkpoints are afterwards those of other steps."""

    def plant(run: RecordedRun) -> None:
        engine(recorded=recorded)(run)
        link_checkpoints(run, sources)

    return plant
