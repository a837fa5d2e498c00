"""Checks of prompt files, without the tokenizer, and of recorded rollouts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron_grpo.batch.rollout_files import (
    ROLLOUTS_FOLDER,
    RecordedFile,
    examine_file,
    find_recorded_folder,
    find_recorded_steps,
)
from megatron_grpo.config.data_schema import LABELLED, REWARD_FUNCTIONS, DatasetConfig
from megatron_grpo.config.errors import Problem, format_count
from megatron_grpo.config.loop_schema import SampledLoopConfig
from megatron_grpo.config.paths import check_readable
from megatron_grpo.config.schema import Config
from megatron_grpo.data.rows import SetReport, describe_too_few_rows, examine_set, find_row_kinds, join_reasons
from megatron_grpo.data.scores import AGENT_ARGUMENTS, AGENT_RESULT, INSTANCE, REWARD_ARGUMENTS
from megatron_grpo.data.sources import Row, is_named_set
from megatron_grpo.data.specs import find_spec_problems, make_task_spec
from megatron_grpo.models import source
from megatron_grpo.preflight.rules import Rule, evaluate_rules
from megatron_grpo.prepare.lessons import make_prompt_rows

_RECORD = "record a run with logger.rollouts=all"


def check_prompt_files(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Find problems of the training and validation sets, and remarks on them."""
    problems = list(find_spec_problems(config.data))
    remarks: list[Problem] = []
    if problems:
        return problems, remarks  # the form of the rows is unknown
    training, tasks, rows, left_out = config.data.training_sets, {config.data.task_name}, 0, list[str]()
    for key, dataset in [*training.items(), *config.data.validation_sets.items()]:
        if config.data.streaming and key in training:
            continue
        report, subject = examine_dataset(config, dataset, key), f"{key}={dataset.path}"
        problems += report.problems
        remarks += [  # a remark on one row names its line; a remark on the set gets its key
            Problem(subject, remark.text) if remark.subject == dataset.path else remark for remark in report.remarks
        ]
        remarks += [Problem(subject, text) for text in _find_hidden_columns(config, report)]
        tasks |= report.columns.keys()
        if key in training:
            visits = dataset.count_visits(report.rows)
            rows += min(report.rows, visits)  # a repeated visit would have the same seeds
            left_out += report.explain_left_out()
            if report.rows and not visits:
                weight = f"{key.removesuffix('path')}weight={dataset.weight:g}"
                text = f"visits none of its {format_count('row', report.rows)} in an epoch;"
                text += f" give {1 / report.rows:.2g} or more, or leave the set out"
                problems.append(Problem(weight, text))
        elif not report.problems and report.rows == 0:
            problems.append(Problem(subject, join_reasons("has no rows", report.explain_left_out())))
    if (demonstrations := config.demonstration_config) is not None and config.chord.train_path is not None:
        ((_, dataset),) = demonstrations.data.training_sets.items()
        report, subject = (
            examine_dataset(demonstrations, dataset, "chord.train_path"),
            f"chord.train_path={dataset.path}",
        )
        problems += report.problems
        remarks += [Problem(subject, remark.text) for remark in report.remarks]
    if config.data.from_rollouts is not None and not problems:
        problems += _find_vocabulary_problems(config, config.data.from_rollouts)
    if not problems and not config.data.streaming and rows < config.prompts_per_generation_batch:
        key, dataset = next(iter(training.items()))
        subject = "data.train_sets" if len(training) > 1 else f"{key}={dataset.path}"
        is_weighted = any(dataset.weight != 1 for dataset in training.values())
        count = format_count("row", rows) + (", by weight, for an epoch" if is_weighted else "")
        problems.append(Problem(subject, join_reasons(describe_too_few_rows(config, count), left_out)))
    for name in sorted(config.env.keys() - tasks) if not config.data.streaming else ():
        text = f"no prompt is for it: data.task_name is {config.data.task_name}, and no row has task_name {name};"
        text += f" mistyped? ~env.{name} removes it"
        problems.append(Problem(f"env.{name}", text))
    return problems, remarks


def _find_hidden_columns(config: Config, report: SetReport) -> Iterator[str]:
    """Find columns that reach no function, because arguments have their names."""
    for task, columns in report.columns.items():
        environment = config.env.get(task)
        if environment is None or environment.type != REWARD_FUNCTIONS:
            continue
        arguments = {"reward functions": {*REWARD_ARGUMENTS, INSTANCE}}
        if environment.agent_func is not None:
            arguments["reward functions"].add(AGENT_RESULT)
            arguments["the agent"] = {*AGENT_ARGUMENTS, INSTANCE}
        for receiver, names in arguments.items():
            if hidden := sorted(names & columns - {make_task_spec(config.data, task).prompt_key}):
                text = f"which does not reach {receiver} of env.{task}, because an argument has this name"
                yield f"has the column {', '.join(hidden)}, {text}; give the column another name to pass it"


def count_training_rows(config: Config) -> int:
    """Count the visits to training rows in an epoch."""
    sets = config.data.training_sets.items()
    return sum(dataset.count_visits(examine_dataset(config, dataset, key).rows) for key, dataset in sets)


def examine_rows(
    config: Config, subject: str, dataset: DatasetConfig, kinds: Mapping[str, str] | None = None
) -> SetReport:
    """Examine a set's rows; problems of its file have this subject (KEY=PATH).

    `kinds`: what the rows of each task have to be (`find_row_kinds`); None: prompts for the environments.
    """
    is_file = not is_named_set(dataset.path) and not os.path.isdir(dataset.path)
    reason = check_readable(dataset.path) if is_file else None
    if reason is not None:
        advice = "; give a JSONL file, one object with prompt and answer a line" if reason == "no such file" else ""
        return SetReport(problems=[Problem(subject, reason + advice)])
    return examine_set(dataset, config.data, kinds or find_row_kinds(config, trains=False))


def examine_dataset(config: Config, dataset: DatasetConfig, key: str = "") -> SetReport:
    """Examine a set's rows, also before they are made (`key`: for messages)."""
    subject = f"{key}={dataset.path}"
    if not source.is_made_before_run(config, dataset.path):
        # Without engines, validation computes the loss of its rows.
        kinds = find_row_kinds(config, trains=key in config.data.training_sets or not config.needs_generation)
        return examine_rows(config, subject, dataset, kinds)
    assert config.prepare.name is not None
    files = make_prompt_rows(config.prepare.name)
    name = str(Path(dataset.path).relative_to(config.prepare.folder))
    if name not in files:
        text = f"is not among what prepare.name={config.prepare.name} makes: {', '.join(files)}"
        return SetReport(problems=[Problem(subject, text)])
    rows = files[name]
    problems = list(_find_unfit_settings(config, rows)) if key in config.data.training_sets else []
    return SetReport(rows=len(rows), columns={row["task_name"]: {*row} for row in rows}, problems=problems)


@evaluate_rules
def _find_unfit_settings(config: Config, rows: list[Row]) -> Iterator[Rule]:
    """Check settings against prompts that are made before the run."""
    data, name = config.data, f"prepare.name={config.prepare.name}"
    columns, longest = rows[0].keys(), max(len(row["prompt"]) for row in rows)  # a token for each character
    keys = {"data.prompt_key=": data.prompt_key, "data.answer_key=": data.answer_key}
    if config.has_pairs:
        keys |= {"data.chosen_key=": data.chosen_key, "data.rejected_key=": data.rejected_key}
    elif config.row_kind == LABELLED:
        keys |= {"data.label_key=": data.label_key}
    for key, column in (keys | {"data.response_key=": data.response_key}).items():
        yield column is not None and column not in columns, key, f"{name} makes rows with {', '.join(columns)}"
    for task in dict.fromkeys(row["task_name"] for row in rows):
        text = f"{name} makes rows of the task {task}, and env has {', '.join(sorted(config.env))}; use env={task}"
        yield task not in config.env, "env", text
    text = f"the tokenizer that {name} makes has no chat template; use false"
    lacks_template = config.prepare.name not in source.WITH_TEMPLATE
    yield data.apply_chat_template and lacks_template, "data.apply_chat_template=", text
    text = "makes prompts without responses; name the column to learn from"
    learns_responses = config.method.rows is not None and not config.has_pairs
    yield learns_responses and data.response_key is None, "data.response_key=", f"{name} {text}"
    text = f"leaves out every row: the prompts that {name} makes have {longest} tokens"
    yield data.max_input_seq_length < longest and not data.apply_chat_template, "data.max_input_seq_length=", text


def check_recording(config: Config) -> tuple[list[Problem], list[Problem]]:
    """Find problems of the recording in debug.rollouts_from, and remarks on it."""
    assert config.debug.rollouts_from is not None
    subject = f"debug.rollouts_from={config.debug.rollouts_from}"
    text = _explain_unusable_recording(config, config.debug.rollouts_from)
    if text is not None:
        return [Problem(subject, text)], []
    steps = find_recorded_steps(config.debug.rollouts_from)
    last, planned = max(steps), config.loop.max_num_steps
    for step, file in steps.items():
        problems = list(_find_file_problems(config, subject, file)) if step <= planned else []
        if problems:  # other steps likely have the same problems
            return problems, []
    text = f"ends with step {last}, and the run with it, before {config.loop_name}.max_num_steps={planned}"
    return [], [Problem(subject, text)] if last < planned else []


def read_recorded_max_num_steps(config: Config) -> int:
    """Read max_num_steps of the recorded run; `check_recording` must have passed."""
    assert config.debug.rollouts_from is not None
    file = next(iter(find_recorded_steps(config.debug.rollouts_from).values()))
    return examine_file(file).record.run.max_num_steps


def _explain_unusable_recording(config: Config, path: str) -> str | None:
    reason = check_readable(path, "folder")
    if reason is not None:
        return f"{reason}; give the folder of a run that recorded its rollouts"
    folder = find_recorded_folder(path)
    if folder.resolve() == (Path(config.run_dir) / ROLLOUTS_FOLDER).resolve():
        return "is this run's own run_dir, whose rollouts it would overwrite; choose another run_dir"
    steps = find_recorded_steps(path)
    if not steps:
        return f"{folder} has no step_N.parquet; {_RECORD}"
    missing = [step for step in range(min(steps), max(steps)) if step not in steps]
    if missing:
        return f"{folder} has no step_{missing[0]}.parquet, and later steps; put it back, or {_RECORD}"
    has_checkpoints = Path(config.run_dir, "checkpoints").is_dir()
    if min(steps) > 1 and config.checkpointing.resume in ("auto", "none") and not has_checkpoints:
        start = f"checkpointing.resume=RUN_DIR/checkpoints/step_{min(steps) - 1}"
        return f"begins with step {min(steps)}; start from the checkpoint before it, {start}"
    return None


@evaluate_rules
def _find_file_problems(config: Config, subject: str, file: Path) -> Iterator[Rule]:
    try:
        recorded = examine_file(file)
    except (OSError, ValueError) as error:
        text = error.strerror if isinstance(error, OSError) else error
        yield True, subject, f"{file} {text}; {_RECORD}"
        return
    run, step = recorded.record.run, recorded.record.step
    loop, has_equal_sizes = config.loop, True
    for name, recorded_size in (
        ("num_prompts_per_step", run.prompts_per_step),
        ("num_generations_per_prompt", run.samples_per_prompt),
    ):
        is_other_size = getattr(loop, name) != recorded_size
        has_equal_sizes = has_equal_sizes and not is_other_size
        text = f"the steps of debug.rollouts_from={config.debug.rollouts_from} have {recorded_size};"
        text += f" use {recorded_size}"
        yield is_other_size, f"LOOP.{name}=", text
    rollouts = run.prompts_per_step * run.samples_per_prompt
    text = f"{file} has {recorded.rollouts} of the {rollouts} rollouts of its step; {_RECORD}"
    yield has_equal_sizes and recorded.rollouts != rollouts, subject, text
    text = f"{file} has a sequence of {step.longest} tokens; use that or more"
    yield step.longest > config.policy.max_total_sequence_length, "policy.max_total_sequence_length=", text
    text = f"{file} was sampled without it, and recorded rollouts are taken as they are; use false"
    fills_steps = isinstance(loop, SampledLoopConfig) and loop.use_dynamic_sampling
    yield fills_steps and not step.dynamic_sampling, "LOOP.use_dynamic_sampling=", text
    yield from _check_vocabulary(config, file, recorded)


@evaluate_rules
def _find_vocabulary_problems(config: Config, path: str) -> Iterator[Rule]:
    """Check that the model has the tokens of recorded rollouts."""
    for file in find_recorded_steps(path).values():
        try:
            recorded = examine_file(file)
        except (OSError, ValueError) as error:
            yield True, f"data.from_rollouts={path}", f"{file} {error}"
            return
        rules = [rule for rule in _check_vocabulary(config, file, recorded) if rule[0]]
        yield from rules
        if rules:  # other steps have the same problem
            return


def _check_vocabulary(config: Config, file: Path, recorded: RecordedFile) -> Iterator[Rule]:
    run, shape = recorded.record.run, source.find_model_shape(config)
    if shape is None:
        return
    subject = "policy.model.path="
    largest = recorded.largest_token
    if largest is not None and largest >= shape.vocab:
        text = f"has {shape.vocab} tokens, and {file} has token {largest}; name the model that was recorded"
        yield True, subject, text
        return
    folder = source.find_local_folder(config.policy.model.path)
    digest = None if folder is None else source.compute_vocabulary_digest(folder)
    if digest is not None and run.vocabulary is not None:
        text = f"has another vocabulary than the model that {file} was recorded with; name that,"
        text += " or one with its tokenizer"
        yield digest != run.vocabulary, subject, text
    else:  # without both digests only the sizes can be compared
        text = f"has {shape.vocab} tokens, and the model that {file} was recorded with has {run.vocab}; name that"
        yield shape.vocab != run.vocab, subject, text
