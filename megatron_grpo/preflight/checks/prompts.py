"""Checks of prompts and of the temperature that responses are sampled with."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.data_schema import DataConfig, PromptConfig
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.hub import is_hub_name
from megatron_grpo.config.schema import MISSING, Config

MIN_TEMPERATURE = 0.01
"""vLLM silently takes this in place of anything between it and 0, and training would divide by what was asked for."""


def prompt_problems(config: Config) -> Iterator[Problem]:
    """Temperatures that cannot be had, and prompts that nobody scores or renders."""
    yield from _temperatures(config)
    yield from _prompts(config)


def _temperatures(config: Config) -> Iterator[Problem]:
    for key, value in (
        ("generation.temperature", config.generation.temperature),
        (f"{config.algorithm}.val_temperature", config.loop.val_temperature),
    ):
        if 0 < value < MIN_TEMPERATURE:
            text = f"vLLM samples with {MIN_TEMPERATURE} or more; use that, or 0 for greedy"
            yield Problem(f"{key}={value:g}", text)


def _prompts(config: Config) -> Iterator[Problem]:
    yield from scorer_problems(config)
    if config.env:
        yield from _tasks(config)
    yield from _sets(config)
    yield from system_prompt_problems(config.data)


def scorer_problems(config: Config) -> Iterator[Problem]:
    """Whether there is anything that scores responses."""
    if not config.env:
        text = "has no environment left, and nothing scores the responses; give env=math or env.NAME.type"
        yield Problem("env", text)


def system_prompt_problems(data: DataConfig) -> Iterator[Problem]:
    """System messages of prompts that are plain text: those of a task, or of all that take the one of data."""
    chats = dict.fromkeys(data.tasks, data.apply_chat_template)
    chats |= {task: one.apply_chat_template for task, one in data.tasks.items() if one.apply_chat_template is not None}
    sections: list[tuple[str, PromptConfig, bool]] = [("data", data, data.apply_chat_template or any(chats.values()))]
    sections += [(f"data.tasks.{task}", one, chats[task]) for task, one in data.tasks.items()]
    for section, prompts, is_chat in sections:
        for name in ("system_prompt", "system_prompt_file"):
            if getattr(prompts, name) is not None and not is_chat:
                text = f"has a place only in a chat; needs {section}.apply_chat_template=true"
                yield Problem(f"{section}.{name}", text)


def _tasks(config: Config) -> Iterator[Problem]:
    """Names of tasks that no environment has."""
    data, known = config.data, ", ".join(config.env)
    named = {"data.task_name": data.task_name}
    for section in ("train_sets", "val_sets"):
        named |= {f"data.{section}.{name}.task_name": one.task_name for name, one in getattr(data, section).items()}
    for key, task in named.items():
        if task is not None and task not in config.env:
            yield Problem(f"{key}={task}", f"no such environment under env; there is {known}")
    for task in data.tasks:
        if task not in config.env:
            yield Problem(f"data.tasks.{task}", f"says how prompts of no environment look; env has {known}")


def _sets(config: Config) -> Iterator[Problem]:
    """Sets of rows that are given twice or not at all, and streams of what is none."""
    data = config.data
    if data.train_sets and data.train_path not in (MISSING, None):
        yield Problem(f"data.train_path={data.train_path}", "and data.train_sets say the same; give one of them")
    for section in ("train_sets", "val_sets"):
        for name, one in getattr(data, section).items():
            if one.path == MISSING:
                yield Problem(f"data.{section}.{name}.path", "is required: a file, a folder or a hub name")
    if data.streaming and (data.train_sets or not is_hub_name(data.train_path)):
        yield Problem("data.streaming=True", "is for a data.train_path that is a hub name; files are not loaded anyway")
