"""Checks of how long prompts and responses may be, and of the tokens that end one."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape


def length_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Lengths against each other and the model's positions; with shape None, without the model."""
    yield from sequence_problems(config, shape)
    policy, longest = config.policy, config.policy.max_total_sequence_length
    for key, tokens in (
        ("policy.microbatch_tokens", policy.microbatch_tokens),
        ("policy.logprob_microbatch_tokens", policy.logprob_microbatch_tokens),
        ("value.microbatch_tokens", config.value.microbatch_tokens),
    ):
        if tokens is not None and tokens < longest:
            text = f"the longest sequence, policy.max_total_sequence_length={longest}, does not fit"
            yield Problem(f"{key}={tokens}", text)


def sequence_problems(config: Config, shape: ModelShape | None) -> Iterator[Problem]:
    """Lengths of prompts and responses, and tokens that end one, against the model; with shape None, without it."""
    longest = config.policy.max_total_sequence_length
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
    beyond = [token for token in config.generation.stop_token_ids if shape is not None and token >= shape.vocab]
    if shape is not None and beyond:
        text = f"has {beyond[0]}, and the model's tokens are numbered from 0 to {shape.vocab - 1}"
        yield Problem("generation.stop_token_ids", text)
