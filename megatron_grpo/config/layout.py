"""Checks of a configuration against itself and against the model's sizes: layouts, batch and length arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from megatron_grpo.config.algorithm import algorithm_problems
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.loop import VALIDATION_PREFIX, loop_problems, validates
from megatron_grpo.config.model_shape import ModelShape
from megatron_grpo.config.model_source import known_value_shape
from megatron_grpo.config.ppo import ppo_problems
from megatron_grpo.config.schema import Config, ParallelConfig


def layout_problems(config: Config, shape: ModelShape | None) -> list[Problem]:
    """Everything that does not fit together; with shape None, what depends on the model is left out."""
    problems = [
        *_parallel(config),
        *_devices(config),
        *_batch(config),
        *_lengths(config, shape),
        *_optimizer(config),
        *loop_problems(config),
        *algorithm_problems(config),
        *_reward_scaling(config),
        *_data(config),
        *_checkpointing(config),
    ]
    if shape is not None:
        policy, generation = config.policy.parallel, config.generation.parallel
        problems += _split("policy.parallel", policy.tensor, policy.pipeline, shape)
        problems += _split("generation.parallel", generation.tensor, generation.pipeline, shape)
        problems += _value_model(config, shape)
    if config.algorithm == "ppo":
        # The checks of the loop speak of grpo; its keys have the same names under ppo.
        problems = [Problem(_of_ppo(config, one.subject), _of_ppo(config, one.text)) for one in problems]
    return [*problems, *ppo_problems(config)]


def _of_ppo(config: Config, text: str) -> str:
    for key in dataclasses.asdict(config.ppo):
        text = text.replace(f"grpo.{key}", f"ppo.{key}")
    return text


def _value_model(config: Config, policy: ModelShape) -> Iterator[Problem]:
    if config.value_model is None:
        return
    shape = policy if config.value.model.path is None else known_value_shape(config)
    if shape is None:
        return
    parallel = config.value.parallel
    yield from _split("value.parallel", parallel.tensor, parallel.pipeline, shape)
    if shape.vocab < policy.vocab:
        text = f"has {shape.vocab} tokens, and the policy, whose tokens it reads, {policy.vocab}"
        yield Problem(f"value.model.path={config.value.model.path}", text)


def divisors(number: int, *others: int) -> str:
    """For a message: what divides all of the numbers ("1, 2 or 4")."""
    found = [str(d) for d in range(1, number + 1) if all(n % d == 0 for n in (number, *others))]
    return f"{', '.join(found[:-1])} or {found[-1]}" if len(found) > 1 else found[0]


def _split(section: str, tensor: int, pipeline: int, shape: ModelShape) -> Iterator[Problem]:
    heads, groups, ffn = shape.attention_heads, shape.key_value_heads, shape.ffn_hidden
    usable = divisors(heads, groups, ffn)
    for size, what in ((heads, "attention heads"), (groups, "key/value heads"), (ffn, "feed-forward width")):
        if size % tensor:
            text = f"does not divide the model's {size} {what}; use {usable}"
            yield Problem(f"{section}.tensor={tensor}", text)
            break
    if shape.layers % pipeline:
        text = f"does not divide the model's {shape.layers} layers; use {divisors(shape.layers)}"
        yield Problem(f"{section}.pipeline={pipeline}", text)


def _parallel(config: Config) -> Iterator[Problem]:
    for section, parallel in _trained(config):
        if parallel.context != 1:
            text = "context parallelism is not supported yet; use 1"
            yield Problem(f"{section}.parallel.context={parallel.context}", text)
        if parallel.expert != 1:
            text = "expert parallelism needs a mixture-of-experts model, and only dense ones are supported yet; use 1"
            yield Problem(f"{section}.parallel.expert={parallel.expert}", text)
        if parallel.sequence and parallel.tensor == 1:
            yield Problem(f"{section}.parallel.sequence=True", f"needs {section}.parallel.tensor > 1")


def _trained(config: Config) -> list[tuple[str, ParallelConfig]]:
    """The layouts of the models that are trained, by section."""
    value = [("value", config.value.parallel)] if config.algorithm == "ppo" else []
    return [("policy", config.policy.parallel), *value]


def _devices(config: Config) -> Iterator[Problem]:
    cluster, parallel = config.cluster, config.generation.parallel
    if cluster.gpus_per_node == 0:
        return
    needs = {f"{section}.parallel": layout.world_size for section, layout in _trained(config)}
    needs["generation.parallel"] = parallel.ranks_per_engine * parallel.data
    there = cluster.num_nodes * cluster.gpus_per_node
    if sum(needs.values()) > there:
        first, *rest = needs.items()
        taken = " and ".join([f"{first[0]} takes {first[1]}", *(f"{section} {ranks}" for section, ranks in rest)])
        yield Problem(
            f"cluster.gpus_per_node={cluster.gpus_per_node}",
            f"{cluster.num_nodes} node(s) have {there} GPUs, but {taken}; make the layouts smaller or give more GPUs",
        )
    tensors = [(section, layout.tensor) for section, layout in _trained(config)]
    for section, tensor in [*tensors, ("generation", parallel.tensor)]:
        if tensor > cluster.gpus_per_node:
            text = (
                f"matrices are split within a node, which has {cluster.gpus_per_node} GPUs; use pipeline across nodes"
            )
            yield Problem(f"{section}.parallel.tensor={tensor}", text)


def _batch(config: Config) -> Iterator[Problem]:
    generations = config.loop.num_generations_per_prompt
    step, together = config.loop.num_prompts_per_step, config.prompts_per_generation_batch
    trained = [(f"{name}.parallel.data", layout.data, "data-parallel ranks", step) for name, layout in _trained(config)]
    engines = ("generation.parallel.data", config.generation.parallel.data, "engines", together)
    for key, parts, what, prompts in [*trained, engines]:
        samples = prompts * generations
        if samples % parts:
            yield Problem(
                f"{key}={parts}",
                f"{prompts} prompts x {generations} generations = {samples} samples do not share out evenly over "
                f"{parts} {what}",
            )


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


def _optimizer(config: Config) -> Iterator[Problem]:
    value = [("value", config.value.optimizer)] if config.algorithm == "ppo" else []
    for section, optimizer in [("policy", config.policy.optimizer), *value]:
        if optimizer.min_lr > optimizer.lr:
            text = f"is above {section}.optimizer.lr={optimizer.lr:g}, which it is the end of"
            yield Problem(f"{section}.optimizer.min_lr={optimizer.min_lr:g}", text)
        # Without decay_steps the schedule follows the length of the run, and a short run may end while it warms up.
        decay = optimizer.decay_steps
        if optimizer.decay_style != "constant" and decay is not None and optimizer.warmup_steps >= decay:
            text = f"leaves no step for the decay, which ends at step {decay}"
            yield Problem(f"{section}.optimizer.warmup_steps={optimizer.warmup_steps}", text)


def _reward_scaling(config: Config) -> Iterator[Problem]:
    scaling = config.loop.reward_scaling
    if scaling.enabled and scaling.source_min >= scaling.source_max:
        text = f"must be below grpo.reward_scaling.source_max={scaling.source_max:g}"
        yield Problem(f"grpo.reward_scaling.source_min={scaling.source_min:g}", text)


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.task_name not in config.env:
        text = f"no such environment under env; there is {', '.join(config.env) or 'none'}"
        yield Problem(f"data.task_name={data.task_name}", text)
    if data.system_prompt is not None and not data.apply_chat_template:
        yield Problem("data.system_prompt", "has a place only in a chat; needs data.apply_chat_template=true")


def _checkpointing(config: Config) -> Iterator[Problem]:
    checkpointing = config.checkpointing
    ranked = checkpointing.enabled and checkpointing.keep_top_k is not None
    if ranked and checkpointing.metric_name.startswith(VALIDATION_PREFIX) and not validates(config):
        text = "ranks checkpoints, but there is no validation; give data.val_path and grpo.val_period"
        yield Problem(f"checkpointing.metric_name={checkpointing.metric_name}", text)
