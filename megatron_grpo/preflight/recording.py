"""Checks of the recorded rollouts that a run is to train on (debug.rollouts_from): by their files' ends alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.data.recording import RecordedFile, RunFacts, examine_file, recorded_folder, recorded_steps
from megatron_grpo.data.rollout_files import ROLLOUTS_FOLDER
from megatron_grpo.models.source import known_shape, local_folder
from megatron_grpo.models.vocabulary import vocabulary_digest
from megatron_grpo.preflight.paths import unlistable

_RECORD = "record a run with logger.rollouts=all"


def check_recording(config: Config) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with the recording that debug.rollouts_from names, and what is worth a remark."""
    assert config.debug.rollouts_from is not None
    subject = f"debug.rollouts_from={config.debug.rollouts_from}"
    text = _unusable(config, config.debug.rollouts_from)
    if text is not None:
        return [Problem(subject, text)], []
    steps = recorded_steps(config.debug.rollouts_from)
    problems: list[Problem] = []
    for step, file in steps.items():
        if step > config.loop.max_num_steps:
            break
        problems += _of_file(config, subject, file)
        if problems:  # those of other steps are likely the same
            return problems, []
    return [], list(_too_short(config, subject, max(steps)))


def recorded_max_num_steps(config: Config) -> int:
    """Steps that the recorded run was to make. The recording was checked."""
    assert config.debug.rollouts_from is not None
    file = next(iter(recorded_steps(config.debug.rollouts_from).values()))
    return examine_file(file).record.run.max_num_steps


def _unusable(config: Config, path: str) -> str | None:
    """Why a path is no recording, or not one for this run; None: it is."""
    reason = unlistable(path)
    if reason is not None:
        return f"{reason}; give the folder of a run that recorded its rollouts"
    folder = recorded_folder(path)
    if folder.resolve() == (Path(config.run_dir) / ROLLOUTS_FOLDER).resolve():
        return "is this run's own run_dir, whose rollouts a run replaces; choose another run_dir"
    steps = recorded_steps(path)
    if not steps:
        return f"{folder} has no step_N.parquet; {_RECORD}"
    missing = [step for step in range(min(steps), max(steps)) if step not in steps]
    if missing:
        return f"{folder} has no step_{missing[0]}.parquet, and later steps; put it back, or {_RECORD}"
    if min(steps) > 1 and _begins_anew(config):
        start = f"checkpointing.resume=RUN_DIR/checkpoints/step_{min(steps) - 1}"
        return f"begins with step {min(steps)}; start from the checkpoint before it, {start}"
    return None


def _begins_anew(config: Config) -> bool:
    """Whether the run starts with step 1, whatever its folder turns out to hold."""
    return config.checkpointing.resume in ("auto", "none") and not Path(config.run_dir, "checkpoints").is_dir()


def _of_file(config: Config, subject: str, file: Path) -> Iterator[Problem]:
    """What is wrong with the file of one step."""
    try:
        found = examine_file(file)
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else error
        yield Problem(subject, f"{file} {text}; {_RECORD}")
        return
    sizes = list(_sizes(config, found.record.run))
    yield from sizes
    rollouts = found.record.run.prompts_per_step * found.record.run.samples_per_prompt
    if not sizes and found.rollouts != rollouts:
        yield Problem(subject, f"{file} has {found.rollouts} of the {rollouts} rollouts of its step; {_RECORD}")
    longest, limit = found.record.step.longest, config.policy.max_total_sequence_length
    if longest > limit:
        text = f"{file} has a sequence of {longest} tokens; use that or more"
        yield Problem(f"policy.max_total_sequence_length={limit}", text)
    if config.loop.use_dynamic_sampling and not found.record.step.dynamic_sampling:
        text = f"{file} was sampled without it, and recorded rollouts are taken as they are; use false"
        yield Problem(f"{config.algorithm}.use_dynamic_sampling=True", text)
    yield from _tokens(config, found, file)


def _sizes(config: Config, recorded: RunFacts) -> Iterator[Problem]:
    ours: Mapping[str, tuple[int, int]] = {
        "num_prompts_per_step": (config.loop.num_prompts_per_step, recorded.prompts_per_step),
        "num_generations_per_prompt": (config.loop.num_generations_per_prompt, recorded.samples_per_prompt),
    }
    for name, (here, there) in ours.items():
        if here != there:
            text = f"the steps of debug.rollouts_from={config.debug.rollouts_from} have {there}; use {there}"
            yield Problem(f"{config.algorithm}.{name}={here}", text)


def _tokens(config: Config, found: RecordedFile, file: Path) -> Iterator[Problem]:
    """Whether the recorded tokens are those of the model."""
    path, shape, recorded = config.policy.model.path, known_shape(config), found.record.run
    subject = f"policy.model.path={path}"
    if shape is None:
        return
    if found.largest_token is not None and found.largest_token >= shape.vocab:
        text = f"has {shape.vocab} tokens, and {file} has token {found.largest_token}; name the model that was recorded"
        yield Problem(subject, text)
        return
    folder = local_folder(path)
    ours = None if folder is None else vocabulary_digest(folder)
    if ours is not None and recorded.vocabulary is not None:
        if ours != recorded.vocabulary:
            text = f"has another vocabulary than the model that {file} was recorded with; name that, or one with its"
            yield Problem(subject, f"{text} tokenizer")
    elif shape.vocab != recorded.vocab:
        text = f"has {shape.vocab} tokens, and the model that {file} was recorded with has {recorded.vocab}; name that"
        yield Problem(subject, text)


def _too_short(config: Config, subject: str, last: int) -> Iterator[Problem]:
    steps = config.loop.max_num_steps
    if last < steps:
        text = f"ends with step {last}, and the run with it, before {config.algorithm}.max_num_steps={steps}"
        yield Problem(subject, text)
