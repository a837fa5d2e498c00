"""Checks of prompts and responses: their lengths, the temperature they are sampled with, who scores them."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.model_shape import ModelShape
from megatron_grpo.config.schema import Config

MIN_TEMPERATURE = 0.01
"""vLLM silently takes this in place of anything between it and 0, and training would divide by what was asked for."""


def sampling_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Lengths against each other and the model's positions; with shape None, without the model. And the rest."""
    yield from _lengths(config, shape)
    yield from _temperatures(config)
    yield from _prompts(config)


def _lengths(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    policy, longest = config.policy, config.policy.max_total_sequence_length
    prompt, response = config.data.max_input_seq_length, config.generation.max_new_tokens
    if prompt + response > longest:
        yield Problem(
            f"policy.max_total_sequence_length={longest}",
            f"data.max_input_seq_length + generation.max_new_tokens = {prompt} + {response} = {prompt + response} "
            "tokens do not fit",
        )
    if shape is not None and 0 < shape.max_positions < longest:
        text = f"the model has {shape.max_positions} positions; use at most that"
        yield Problem(f"policy.max_total_sequence_length={longest}", text)
    for key, tokens in (
        ("policy.microbatch_tokens", policy.microbatch_tokens),
        ("policy.logprob_microbatch_tokens", policy.logprob_microbatch_tokens),
        ("value.microbatch_tokens", config.value.microbatch_tokens),
    ):
        if tokens is not None and tokens < longest:
            text = f"the longest sequence, policy.max_total_sequence_length={longest}, does not fit"
            yield Problem(f"{key}={tokens}", text)


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
    if "" in config.generation.stop_strings:
        yield Problem("generation.stop_strings", "holds an empty text, which would end every response at once")
    if data.task_name not in config.env:
        text = f"no such environment under env; there is {', '.join(config.env) or 'none'}"
        yield Problem(f"data.task_name={data.task_name}", text)
    if data.system_prompt is not None and not data.apply_chat_template:
        yield Problem("data.system_prompt", "has a place only in a chat; needs data.apply_chat_template=true")
