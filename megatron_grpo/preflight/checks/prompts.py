"""Checks of prompts and of the temperature that responses are sampled with."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config

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
    data = config.data
    negative = next((token for token in config.generation.stop_token_ids if token < 0), None)
    if negative is not None:
        yield Problem("generation.stop_token_ids", f"has {negative}, and tokens are numbered from 0")
    if "" in config.generation.stop_strings:
        yield Problem("generation.stop_strings", "holds an empty text, which would end every response at once")
    if not config.env:
        yield Problem(
            "env", "has no environment left, and nothing scores the responses; give env=math or env.NAME.type"
        )
    elif data.task_name not in config.env:
        text = f"no such environment under env; there is {', '.join(config.env)}"
        yield Problem(f"data.task_name={data.task_name}", text)
    if data.system_prompt is not None and not data.apply_chat_template:
        yield Problem("data.system_prompt", "has a place only in a chat; needs data.apply_chat_template=true")
