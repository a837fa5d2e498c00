"""Checks of prompt files, row by row and without the tokenizer, and of recorded rollouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.batch.rollout_files import (
    ROLLOUTS_FOLDER,
    RecordedFile,
    examine_file,
    find_recorded_folder,
    find_recorded_steps,
)
from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.errors import Problem, format_count
from megatron_grpo.config.paths import check_readable
from megatron_grpo.config.schema import Config
from megatron_grpo.data.rows import SetReport, examine_set
from megatron_grpo.data.sources import is_remote
from megatron_grpo.data.specs import PREPARED_PROMPTS, PreparedPrompts, find_spec_problems
from megatron_grpo.models.source import (
    compute_vocabulary_digest,
    find_local_folder,
    find_model_shape,
    is_made_before_run,
)
from megatron_grpo.preflight.rules import Rule, evaluate_rules


def check_prompt_files(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Problems of the training and validation sets, and remarks on them."""
    problems = list(find_spec_problems(config.data))
    remarks: list[Problem] = []
    if problems:
        return problems, remarks  # the form of the rows is unknown
    training = config.data.training_sets
    tasks = {config.data.task_name}
    rows = 0
    for key, one in [*training.items(), *config.data.validation_sets.items()]:
        if config.data.streaming and key in training:
            continue
        report = _report(config, key, one)
        problems += report.problems
        for remark in report.remarks:  # a remark on one row names its line; a remark on the set gets its key
            whole = remark.subject == one.path
            remarks.append(Problem(f"{key}={one.path}", remark.text) if whole else remark)
        tasks |= report.tasks
        if key in training:
            rows += min(report.rows, one.count_visits(report.rows))  # a repeated visit would have the same seeds
            if report.rows and not one.count_visits(report.rows):
                least = f"{1 / report.rows:.2g} or more, or leave the set out"
                text = f"visits none of its {format_count('row', report.rows)} in an epoch; give {least}"
                problems.append(Problem(f"{key.removesuffix('path')}weight={one.weight:g}", text))
        if not report.problems and key not in training and report.rows == 0:
            problems.append(Problem(f"{key}={one.path}", "has no rows"))
    if not problems and not config.data.streaming:
        problems += _too_few(config, rows)
    for name in sorted(config.env.keys() - tasks) if not config.data.streaming else ():
        text = f"no prompt is for it: data.task_name is {config.data.task_name}, and no row has task_name {name}"
        problems.append(Problem(f"env.{name}", f"{text}; mistyped? ~env.{name} takes it away"))
    return problems, remarks


def count_training_rows(config: Config) -> int:
    """Visits to training rows in one epoch; the sets are not streamed."""
    return sum(one.count_visits(_report(config, key, one).rows) for key, one in config.data.training_sets.items())


def examine_rows(config: Config, subject: str, one: DatasetConfig) -> SetReport:
    """The report on the rows of an existing set; `subject` (KEY=PATH) is the subject of problems of its file."""
    reason = None if is_remote(one.path) or os.path.isdir(one.path) else check_readable(one.path)
    if reason is not None:
        advice = "; give a JSONL file, one object with prompt and answer a line" if reason == "no such file" else ""
        return SetReport(problems=[Problem(subject, reason + advice)])
    return examine_set(one, config.data, {name: env.type for name, env in config.env.items()})


@evaluate_rules
def _too_few(config: Config, rows: int) -> Iterator[Rule]:
    """Training sets with fewer rows, counted by their visits in an epoch, than the prompts of a step."""
    wanted, ((key, one), *others) = config.prompts_per_generation_batch, config.data.training_sets.items()
    subject = "data.train_sets" if others else f"{key}={one.path}"
    weighted = ", by weight, for an epoch" if any(one.weight != 1 for one in config.data.training_sets.values()) else ""
    text = f"has {format_count('row', rows)}{weighted}, fewer than the {wanted} prompts that are sampled together"
    yield rows < wanted, subject, text


def _report(config: Config, key: str, one: DatasetConfig) -> SetReport:
    """The report on a set, from its rows or, for a set that prepare.name makes, from PREPARED_PROMPTS."""
    subject = f"{key}={one.path}"
    if not is_made_before_run(config, one.path):
        return examine_rows(config, subject, one)
    assert config.prepare.name is not None
    made = PREPARED_PROMPTS[config.prepare.name]
    name = str(Path(one.path).relative_to(config.prepare.folder))
    if name not in made.rows:
        text = f"is not among what prepare.name={config.prepare.name} makes: {', '.join(made.rows)}"
        return SetReport(problems=[Problem(subject, text)])
    problems = list(_unfit(config, made)) if key in config.data.training_sets else []
    return SetReport(rows=made.rows[name], tasks=set(made.tasks), problems=problems)


@evaluate_rules
def _unfit(config: Config, made: PreparedPrompts) -> Iterator[Rule]:
    """Settings that do not fit prompts which are made before the run."""
    data, made_by = config.data, f"prepare.name={config.prepare.name}"
    for key, column in (("data.prompt_key=", data.prompt_key), ("data.answer_key=", data.answer_key)):
        text = f"{made_by} makes rows with {', '.join(made.columns)}"
        yield column is not None and column not in made.columns, key, text
    for task in made.tasks:
        text = f"{made_by} makes rows of the task {task}, and env has {', '.join(sorted(config.env))}; use env={task}"
        yield task not in config.env, "env", text
    text = f"the tokenizer that {made_by} makes has no chat template; use false"
    yield data.apply_chat_template, "data.apply_chat_template=", text
    text = f"leaves out every row: the prompts that {made_by} makes have {made.prompt_tokens} tokens"
    is_short = data.max_input_seq_length < made.prompt_tokens
    yield is_short and not data.apply_chat_template, "data.max_input_seq_length=", text


_RECORD = "record a run with logger.rollouts=all"


def check_recording(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Problems of the recording that debug.rollouts_from names, and remarks on it."""
    assert config.debug.rollouts_from is not None
    subject = f"debug.rollouts_from={config.debug.rollouts_from}"
    text = _unusable(config, config.debug.rollouts_from)
    if text is not None:
        return [Problem(subject, text)], []
    steps = find_recorded_steps(config.debug.rollouts_from)
    for step, file in steps.items():
        problems = list(_of_file(config, subject, file)) if step <= config.training_loop.max_num_steps else []
        if problems:  # other steps likely have the same problems
            return problems, []
    last, wanted = max(steps), config.training_loop.max_num_steps
    text = f"ends with step {last}, and the run with it, before {config.algorithm}.max_num_steps={wanted}"
    return [], [Problem(subject, text)] if last < wanted else []


def read_recorded_max_num_steps(config: Config) -> int:
    """The max_num_steps of the recorded run; the recording has passed its checks."""
    assert config.debug.rollouts_from is not None
    file = next(iter(find_recorded_steps(config.debug.rollouts_from).values()))
    return examine_file(file).record.run.max_num_steps


def _unusable(config: Config, path: str) -> str | None:
    """The reason why a path holds no recording for this run, or None."""
    reason = check_readable(path, "folder")
    if reason is not None:
        return f"{reason}; give the folder of a run that recorded its rollouts"
    folder = find_recorded_folder(path)
    if folder.resolve() == (Path(config.run_dir) / ROLLOUTS_FOLDER).resolve():
        return "is this run's own run_dir, whose rollouts a run replaces; choose another run_dir"
    steps = find_recorded_steps(path)
    if not steps:
        return f"{folder} has no step_N.parquet; {_RECORD}"
    missing = [step for step in range(min(steps), max(steps)) if step not in steps]
    if missing:
        return f"{folder} has no step_{missing[0]}.parquet, and later steps; put it back, or {_RECORD}"
    no_checkpoint = not Path(config.run_dir, "checkpoints").is_dir()
    if min(steps) > 1 and config.checkpointing.resume in ("auto", "none") and no_checkpoint:
        start = f"checkpointing.resume=RUN_DIR/checkpoints/step_{min(steps) - 1}"
        return f"begins with step {min(steps)}; start from the checkpoint before it, {start}"
    return None


@evaluate_rules
def _of_file(config: Config, subject: str, file: Path) -> Iterator[Rule]:
    """Problems of the file of one step."""
    try:
        found = examine_file(file)
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else error
        yield True, subject, f"{file} {text}; {_RECORD}"
        return
    recorded = found.record.run
    ours = (config.training_loop.num_prompts_per_step, config.training_loop.num_generations_per_prompt)
    theirs = (recorded.prompts_per_step, recorded.samples_per_prompt)
    for name, here, there in zip(("num_prompts_per_step", "num_generations_per_prompt"), ours, theirs, strict=True):
        text = f"the steps of debug.rollouts_from={config.debug.rollouts_from} have {there}; use {there}"
        yield here != there, f"LOOP.{name}=", text
    rollouts = recorded.prompts_per_step * recorded.samples_per_prompt
    text = f"{file} has {found.rollouts} of the {rollouts} rollouts of its step; {_RECORD}"
    yield ours == theirs and found.rollouts != rollouts, subject, text
    longest = found.record.step.longest
    text = f"{file} has a sequence of {longest} tokens; use that or more"
    yield longest > config.policy.max_total_sequence_length, "policy.max_total_sequence_length=", text
    text = f"{file} was sampled without it, and recorded rollouts are taken as they are; use false"
    sampled_so = found.record.step.dynamic_sampling
    yield config.training_loop.use_dynamic_sampling and not sampled_so, "LOOP.use_dynamic_sampling=", text
    yield from _tokens(config, found, file)


def _tokens(config: Config, found: RecordedFile, file: Path) -> Iterator[Rule]:
    """Recorded tokens that are not from the model's vocabulary."""
    shape, recorded, subject = find_model_shape(config), found.record.run, "policy.model.path="
    if shape is None:
        return
    if found.largest_token is not None and found.largest_token >= shape.vocab:
        text = f"has {shape.vocab} tokens, and {file} has token {found.largest_token}; name the model that was recorded"
        yield True, subject, text
        return
    folder = find_local_folder(config.policy.model.path)
    ours = None if folder is None else compute_vocabulary_digest(folder)
    if ours is not None and recorded.vocabulary is not None:
        text = f"has another vocabulary than the model that {file} was recorded with; name that, or one with its"
        yield ours != recorded.vocabulary, subject, f"{text} tokenizer"
    else:
        text = f"has {shape.vocab} tokens, and the model that {file} was recorded with has {recorded.vocab}; name that"
        yield shape.vocab != recorded.vocab, subject, text
