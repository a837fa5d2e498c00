"""What the configuration says of each task's prompts, with the files that it names read in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Formatter
from typing import TypeVar

from megatron_grpo.config.data_schema import DataConfig, PromptConfig, TaskConfig
from megatron_grpo.config.errors import Problem
from megatron_grpo.data.interfaces import TaskDataSpec
from megatron_grpo.data.row_forms import ROW_FORMS, processor_of

T = TypeVar("T")

_FILES = ("prompt_file", "system_prompt_file", "chat_template", "tools")


def task_spec(data: DataConfig, task: str) -> TaskDataSpec:
    """How rows of a task become prompts: as data.tasks.TASK says, and for what that leaves open, as data says.

    Raises:
        ValueError: a file that the task names cannot be read, or holds something else.
    """
    own = data.tasks.get(task, TaskConfig())
    form = processor_name(data, task) in ROW_FORMS
    system = _first(own.system_prompt, _read(own.system_prompt_file, str))
    return TaskDataSpec(
        task_name=task,
        prompt_key="prompt" if form else _first(own.prompt_key, data.prompt_key) or "",
        answer_key=_answer_key(data, own, form),
        apply_chat_template=bool(_first(own.apply_chat_template, data.apply_chat_template)),
        system_prompt=_first(system, _first(data.system_prompt, _read(data.system_prompt_file, str))),
        prompt=_read(own.prompt_file or data.prompt_file, str),
        chat_template=_read(own.chat_template or data.chat_template, str),
        chat_template_kwargs={**data.chat_template_kwargs, **own.chat_template_kwargs},
        tools=_read(own.tools or data.tools, _definitions),
        long_prompts=data.long_prompts,
    )


def processor_name(data: DataConfig, task: str) -> str | None:
    """Name of the processor of a task's rows."""
    return data.tasks.get(task, TaskConfig()).processor or data.processor


def spec_problems(data: DataConfig) -> Iterator[Problem]:
    """What is wrong with the files and names that prompts are made with."""
    for section, config in _sections(data).items():
        for name in _FILES:
            file = getattr(config, name)
            own = name == "prompt_file" and _is_import_path(config.processor or data.processor or "")
            try:
                _read(file, str if own else _FORMS.get(name, str))
            except ValueError as error:
                yield Problem(f"{section}.{name}={file}", str(error))
        if config.system_prompt is not None and config.system_prompt_file is not None:
            text = f"and {section}.system_prompt say the same; give one of them"
            yield Problem(f"{section}.system_prompt_file", text)
        processor = config.processor
        if processor is not None and processor not in ROW_FORMS and not _is_import_path(processor):
            text = f"is no processor; there is {', '.join(ROW_FORMS)}, or give a function as package.module.function"
            yield Problem(f"{section}.processor={processor}", text)


def processor_problems(data: DataConfig) -> Iterator[Problem]:
    """Which processors cannot be imported, or not be called; imports a user's own."""
    for section, config in _sections(data).items():
        try:
            processor_of(config.processor)
        except ValueError as error:
            yield Problem(f"{section}.processor={config.processor}", str(error))


def _sections(data: DataConfig) -> dict[str, PromptConfig]:
    """Where the configuration says how prompts are made, by key."""
    return {"data": data, **{f"data.tasks.{name}": one for name, one in data.tasks.items()}}


def _answer_key(data: DataConfig, own: TaskConfig, form: bool) -> str | None:
    if form:
        return "answer"
    return own.answer_key if own.answer_key is not None else data.answer_key


def _is_import_path(name: str) -> bool:
    return "." in name and all(part.isidentifier() for part in name.split("."))


def _first(value: T | None, otherwise: T | None) -> T | None:
    return otherwise if value is None else value


def _read(file: str | None, form: Callable[[str], T]) -> T | None:
    """What a file holds; None where there is none.

    Raises:
        ValueError: it cannot be read, or is not of the form.
    """
    if file is None:
        return None
    try:
        return form(Path(file).expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None


def _words(text: str) -> str:
    """Words around a prompt, which have a place for what differs between rows."""
    try:
        places = [place for _, place, _, _ in Formatter().parse(text) if place is not None]
    except ValueError as error:
        raise ValueError(f"has a brace too many: {error}; braces that are meant are written {{{{ and }}}}") from None
    if not places:
        raise ValueError("has neither {} nor a {column}, so all prompts would be the same; write {} where they stand")
    return text


def _definitions(text: str) -> list[dict[str, object]]:
    """A JSON list of tool definitions."""
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise ValueError("is no list of tool definitions: [{...}, ...]")
    return tools


_FORMS: dict[str, Callable[[str], object]] = {"prompt_file": _words, "tools": _definitions}
"""What is more than a text; a user's own processor may use the words of prompt_file otherwise."""
