"""Checks of the files of prompts, row by row, as far as they can be without the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.data.prepared import PREPARED_PROMPTS, PreparedPrompts
from megatron_grpo.data.rows import FileReport, examine
from megatron_grpo.models.source import made_before_the_run
from megatron_grpo.preflight.paths import unreadable


def check_prompt_files(config: Config) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with data.train_path and data.val_path, and what is worth a remark."""
    problems: list[Problem] = []
    remarks: list[Problem] = []
    tasks = {config.data.task_name}
    for key, path in (("data.train_path", config.data.train_path), ("data.val_path", config.data.val_path)):
        if path is None:
            continue
        subject = f"{key}={path}"
        if made_before_the_run(config, path):
            report = _prepared(config, path, subject)
        else:
            report = _examined(config, path, subject)
        problems += report.problems
        tasks |= report.tasks
        if not report.problems:
            problems += _too_few(config, key, subject, report.rows)
            if report.alike and report.rows > 1:
                remarks.append(Problem(subject, f"has the same prompt in all of its {report.rows} rows"))
    for name in sorted(config.env.keys() - tasks):
        text = f"no prompt is for it: data.task_name is {config.data.task_name}, and no row has task_name {name}"
        problems.append(Problem(f"env.{name}", f"{text}; mistyped?"))
    return problems, remarks


def _examined(config: Config, path: str, subject: str) -> FileReport:
    reason = unreadable(path)
    if reason is not None:
        advice = "; give a JSONL file, one object with prompt and answer a line" if reason == "no such file" else ""
        return FileReport(problems=[Problem(subject, reason + advice)])
    return examine(Path(path), config.data, {name: one.type for name, one in config.env.items()})


def _too_few(config: Config, key: str, subject: str, rows: int) -> Iterator[Problem]:
    wanted = config.prompts_per_generation_batch
    if key == "data.train_path" and rows < wanted:
        yield Problem(subject, f"has {rows} rows, fewer than the {wanted} prompts that are sampled together")
    if key == "data.val_path" and rows == 0:
        yield Problem(subject, "has no rows")


def _prepared(config: Config, path: str, subject: str) -> FileReport:
    """What is known of a file that is made before the run."""
    assert config.prepare.name is not None
    made = PREPARED_PROMPTS[config.prepare.name]
    name = str(Path(path).relative_to(config.prepare.folder))
    if name not in made.rows:
        text = f"is not among what prepare.name={config.prepare.name} makes: {', '.join(made.rows)}"
        return FileReport(problems=[Problem(subject, text)])
    problems = list(_unfit(config, made)) if subject.startswith("data.train_path") else []
    return FileReport(rows=made.rows[name], tasks=set(made.tasks), alike=False, problems=problems)


def _unfit(config: Config, made: PreparedPrompts) -> Iterator[Problem]:
    """Settings that do not fit prompts which are made before the run."""
    data, made_by = config.data, f"prepare.name={config.prepare.name}"
    for key, column in (("data.prompt_key", data.prompt_key), ("data.answer_key", data.answer_key)):
        if column is not None and column not in made.columns:
            yield Problem(f"{key}={column}", f"{made_by} makes rows with {', '.join(made.columns)}")
    for task in made.tasks:
        if task not in config.env:
            known = ", ".join(sorted(config.env))
            yield Problem("env", f"{made_by} makes rows of the task {task}, and env has {known}; use env={task}")
    if data.apply_chat_template:
        text = f"the tokenizer that {made_by} makes has no chat template; use false"
        yield Problem("data.apply_chat_template=True", text)
    elif data.max_input_seq_length < made.prompt_tokens:
        text = f"leaves out every row: the prompts that {made_by} makes have {made.prompt_tokens} tokens"
        yield Problem(f"data.max_input_seq_length={data.max_input_seq_length}", text)
