"""Checks of layouts against the model's sizes, the GPUs of the machines, and the sizes of batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import find_value_shape
from megatron_grpo.models.weight_map import count_group_rows
from megatron_grpo.preflight.rules import Rule, evaluate_rules


def check_split(section: str, parallel: ParallelConfig, shape: ModelShape) -> Iterator[Rule]:
    """Sizes of a training layout that do not fit the model; `section` is its key, such as policy.parallel."""
    yield _tensor(section, parallel.tensor, shape)
    yield from _pipeline(section, parallel, shape)
    yield from _experts(section, parallel, shape)
    what = "a mixture of experts" if shape.experts is not None else "latent attention"
    needed = parallel.tensor > 1 and (shape.experts is not None or shape.latent is not None)
    text = f"{what} with {section}.tensor={parallel.tensor} needs it; use true"
    yield needed and not parallel.sequence, f"{section}.sequence=False", text


def _tensor(section: str, tensor: int, shape: ModelShape) -> Rule:
    """A tensor-parallel size has to divide the model's sizes; `section` is the key of the layout."""
    usable = [size for size in range(1, shape.attention_heads + 1) if _undivided(size, shape) is None]
    what = _undivided(tensor, shape)
    return what, f"{section}.tensor={tensor}", f"does not divide the model's {what}; use {_listed(usable)}"


def _listed(numbers: list[int]) -> str:
    """Numbers as text for a message: "1, 2 or 4"."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _divides(key: str, parts: int, number: int, what: str) -> Rule:
    return number % parts, f"{key}={parts}", f"does not divide {what}; use {_listed(_divisors(number))}"


def _undivided(tensor: int, shape: ModelShape) -> str | None:
    """The size of the model that this many ranks cannot split evenly, or None."""
    heads, groups = shape.attention_heads, shape.key_value_heads
    sizes = [(heads, "attention heads"), (shape.ffn_hidden, "feed-forward width")]
    if shape.experts is not None and shape.experts.shared_ffn_hidden:
        sizes.append((shape.experts.shared_ffn_hidden, "shared experts' width"))
    for size, what in sizes:
        if size % tensor:
            return f"{size} {what}"
    if groups % tensor == 0 or shape.latent is not None:
        return None
    # More ranks than key/value heads: every rank has an equal part of one head's queries, key and value.
    if tensor % groups or sum(count_group_rows(shape)) % (tensor // groups):
        return f"{groups} key/value heads, nor is it a multiple of them"
    return None


def _pipeline(section: str, parallel: ParallelConfig, shape: ModelShape) -> Iterator[Rule]:
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    if chunks > 1 and stages == 1:
        yield True, f"{section}.virtual_pipeline={chunks}", f"needs {section}.pipeline > 1"
        return
    ends = {"first_stage_layers": parallel.first_stage_layers, "last_stage_layers": parallel.last_stage_layers}
    given = {name: layers for name, layers in ends.items() if layers is not None}
    flags = {"count_embedding": parallel.count_embedding, "count_loss": parallel.count_loss}
    counted = sum(flags.values())
    uneven = {**given, **{name: True for name, counts in flags.items() if counts}}
    if uneven and (stages == 1 or (given and counted)):
        name, value = next(iter(uneven.items()))
        both = "and count_embedding or count_loss both shift layers between stages; use one of the two ways"
        yield True, f"{section}.{name}={value}", f"needs {section}.pipeline > 1" if stages == 1 else both
        return
    middle, left = stages - len(given), shape.layers + counted - sum(given.values())
    if left < 0 or (middle == 0 and left) or (middle and (left % middle or left < middle)):
        yield True, f"{section}.pipeline={stages}", _uneven(shape.layers, counted, given, left, middle)
        return
    of_ranks = {*given.values(), *([left // middle] if middle else [])}
    layers = next((layers for layers in of_ranks if layers % chunks), chunks)
    yield _divides(f"{section}.virtual_pipeline", chunks, layers, f"the {layers} layers of a pipeline rank")


def _uneven(layers: int, counted: int, given: dict[str, int], left: int, middle: int) -> str:
    """The message for layers that cannot be distributed over the pipeline."""
    if given:
        names = " and ".join(f"{name}={number}" for name, number in given.items())
        return f"with {names} {left} of the {layers} layers are left for {middle} ranks, which need equally many each"
    if counted:
        usable = _listed(_divisors(layers + counted))
        return f"does not divide the model's {layers} layers and what is counted as {counted} more; use {usable}"
    return f"does not divide the model's {layers} layers; use {_listed(_divisors(layers))}, or first_stage_layers"


def _experts(section: str, parallel: ParallelConfig, shape: ModelShape) -> Iterator[Rule]:
    expert, tensor = parallel.expert, parallel.expert_tensor
    if shape.experts is None:
        for name, size in (("expert", expert), ("expert_tensor", tensor)):
            yield size > 1, f"{section}.{name}={size}", "the model has no experts; use 1"
        return
    count, width = shape.experts.count, shape.experts.ffn_hidden
    yield _divides(f"{section}.expert", expert, count, f"the model's {count} experts")
    yield _divides(f"{section}.expert_tensor", tensor, width, f"an expert's width of {width}")
    ranks = parallel.tensor * parallel.context * parallel.data
    text = f"times expert_tensor={tensor} does not divide tensor * context * data = {ranks}; use "
    usable = [size for size in _divisors(count) if ranks % (size * tensor) == 0]
    more = f"{_listed(usable)}, or more replicas" if usable else "fewer of expert_tensor, or more replicas"
    yield ranks % (expert * tensor), f"{section}.expert={expert}", text + more


@evaluate_rules
def find_layout_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Layouts that do not fit model, machines or batches; with shape None, checks that need the model are left out."""
    for section, parallel in _trained(config):
        needs = f"needs {section}.parallel.tensor > 1"
        yield parallel.sequence and parallel.tensor == 1, f"{section}.parallel.sequence=", needs
    yield from _devices(config, _gpus_of_models(config), _trained(config))
    yield from _batch(config)
    yield from _replay(config, shape)
    if shape is not None:
        yield from check_split("policy.parallel", config.policy.parallel, shape)
        for name in ("aux_loss_coeff", "z_loss_coeff", "bias_update_rate"):
            lacking = getattr(config.policy.moe, name) and shape.experts is None
            yield lacking, f"policy.moe.{name}=", "the model has no experts; use 0"
        unbiased = shape.experts is not None and not shape.experts.selection_bias
        text = "the model chooses experts without a bias; use 0"
        yield config.policy.moe.bias_update_rate and unbiased, "policy.moe.bias_update_rate=", text
        yield from _generation(config, shape)
        yield from _value_model(config, shape)


@evaluate_rules
def find_engine_layout_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Sizes of the engines' layout that do not fit the model or the machines, when no model is trained."""
    yield from _devices(config, _gpus_of_engines(config), ())
    if shape is not None:
        yield from _generation(config, shape)


def _value_model(config: Config, policy: ModelShape) -> Iterator[Rule]:
    own = config.value.model.path is not None
    shape = find_value_shape(config) if own else policy
    if config.value_model is None or shape is None:
        return
    yield from check_split("value.parallel", config.value.parallel, shape)
    longest = config.policy.max_total_sequence_length
    text = f"has {shape.max_positions} positions, fewer than policy.max_total_sequence_length={longest}"
    yield own and 0 < shape.max_positions < longest, "value.model.path=", text
    text = f"has {shape.vocab} tokens, and the policy, whose tokens it reads, {policy.vocab}"
    yield shape.vocab < policy.vocab, "value.model.path=", text


def _replay(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Settings that cannot be combined with policy.moe.replay_routing, for which engines record experts."""
    subject, engine, on_cpu = "policy.moe.replay_routing=", config.generation.engine, config.cluster.gpus == 0
    if not config.policy.moe.replay_routing:
        return
    text = "records experts of tokens that speculative decoding takes back; use false for one of them"
    yield engine.speculative.num_speculative_tokens, subject, text
    if shape is None or shape.experts is None:
        yield shape is not None, subject, "the model has no experts; use false"
        return
    text = "a CPU engine records experts, for policy.moe.replay_routing=true, only without compilation; use true"
    yield on_cpu and not engine.enforce_eager, "generation.engine.enforce_eager=", text
    text = "vLLM returns routed experts, for policy.moe.replay_routing=true, with prefix caching only; use true"
    yield not on_cpu and not engine.enable_prefix_caching, "generation.engine.enable_prefix_caching=", text
    text = "vLLM returns no routed experts, for policy.moe.replay_routing=true, from a pipeline; use 1, and tensor"
    yield not on_cpu and config.generation.parallel.pipeline > 1, "generation.parallel.pipeline=", text


def _generation(config: Config, shape: ModelShape) -> Iterator[Rule]:
    """Sizes of an engine's layout that do not fit the model."""
    parallel, experts, subject = config.generation.parallel, shape.experts, "generation.parallel.expert="
    tensor, expert = parallel.tensor, parallel.expert
    yield _tensor("generation.parallel", tensor, shape)
    text = f"is more than the model's {shape.layers} layers"  # vLLM need not give every stage equally many layers
    yield parallel.pipeline > shape.layers, "generation.parallel.pipeline=", text
    if experts is None:
        yield expert > 1, subject, "the model has no experts; use 1"
    elif expert not in (1, tensor):
        text = f"vLLM shares experts over all ranks of generation.parallel.tensor={tensor} or over none; use 1"
        yield True, subject, f"{text} or {tensor}" if tensor > 1 else f"{text}, or a larger tensor"
    else:
        text = f"does not divide the model's {experts.count} experts; use 1, or another tensor"
        yield expert > 1 and experts.count % expert, subject, text
        text = f"does not divide an expert's width of {experts.ffn_hidden}; use generation.parallel.expert={tensor}"
        yield expert == 1 and experts.ffn_hidden % tensor, "generation.parallel.tensor=", text


def _trained(config: Config) -> list[tuple[str, ParallelConfig]]:
    """The layouts of the models that are trained, by section."""
    value = [("value", config.value.parallel)] if config.training_loop.has_value_model else []
    return [("policy", config.policy.parallel), *value]


def _devices(
    config: Config, wanted: Mapping[str, int], trained: Sequence[tuple[str, ParallelConfig]]
) -> Iterator[Rule]:
    """GPUs that the machines lack for models and engines (`wanted`: by section) and for reward models."""
    cluster, parallel = config.cluster, config.generation.parallel
    if cluster.gpus == 0:
        return
    needs: dict[str, float] = {**wanted, **count_reward_model_gpus(config)}
    there = cluster.num_nodes * cluster.gpus
    first, *rest = needs.items()
    taken = " and ".join([f"{first[0]} takes {first[1]}", *(f"{section} {ranks:g}" for section, ranks in rest)])
    fix = "make the layouts smaller, or give more GPUs, or 0 for a run on CPU"
    text = f"{cluster.num_nodes} node(s) have {there} GPUs, but {taken}; {fix}"
    yield sum(needs.values()) > there, "cluster.gpus_per_node=", text
    yield from _scattered_engines(config, trained, sum(needs.values()) <= there)
    text = f"matrices are split within a node, which has {cluster.gpus} GPUs; use pipeline across nodes"
    for section, tensor in [*((name, layout.tensor) for name, layout in trained), ("generation", parallel.tensor)]:
        yield tensor > cluster.gpus, f"{section}.parallel.tensor=", text


def _scattered_engines(config: Config, trained: Sequence[tuple[str, ParallelConfig]], enough: bool) -> Iterator[Rule]:
    """Engines that would need GPUs of two nodes, because the models fill nodes rank by rank before them."""
    parallel, each, ranks = config.generation.parallel, config.cluster.gpus, config.generation.parallel.ranks_per_engine
    has_own = config.needs_generation and not config.generation.server.urls and not config.generation.is_colocated
    if not has_own or not enough or ranks > each:
        return
    free = [each] * config.cluster.num_nodes
    for _, layout in trained:
        for part in (*[each] * (layout.world_size // each), layout.world_size % each):
            node = next((number for number, left in enumerate(free) if left >= part), None)
            if node is None:
                return
            free[node] -= part
    fitting = sum(left // ranks for left in free)
    text = (
        f"engines of {ranks} GPUs fit {fitting} times into what the models leave of the nodes, which is "
        f"{' + '.join(str(left) for left in free if left)} GPUs; use data={fitting}, or smaller engines"
    )
    yield fitting < parallel.data, "generation.parallel.data=", text


def count_gpus(config: Config) -> dict[str, float]:
    """GPUs that each model, the engines and reward models take, by key."""
    return {**_gpus_of_models(config), **count_reward_model_gpus(config)}


def count_reward_model_gpus(config: Config) -> dict[str, float]:
    """GPUs that the reward models of each environment take, by key; environments without any are left out."""
    found = {
        f"env.{name}.reward_model.gpus": env.reward_model.gpus
        * env.reward_model.num_workers
        * len(env.reward_model_folders)
        for name, env in config.env.items()
    }
    return {key: gpus for key, gpus in found.items() if gpus}


def _gpus_of_models(config: Config) -> dict[str, int]:
    """GPUs that each model and the engines take, by section."""
    of_engines = _gpus_of_engines(config)
    if not config.debug.train:
        return of_engines
    if config.generation.is_colocated:  # engines and value model share the policy's GPUs
        return {"policy.parallel": config.policy.parallel.world_size}
    needs = {f"{section}.parallel": layout.world_size for section, layout in _trained(config)}
    return needs if config.generation.server.urls or not config.needs_generation else {**needs, **of_engines}


def _gpus_of_engines(config: Config) -> dict[str, int]:
    parallel = config.generation.parallel
    return {"generation.parallel": parallel.ranks_per_engine * parallel.data}


def _batch(config: Config) -> Iterator[Rule]:
    """Replicas that cannot have equally many samples of a step; engines need not, since prompts go to the idlest."""
    generations, prompts = config.training_loop.num_generations_per_prompt, config.training_loop.num_prompts_per_step
    for section, layout in _trained(config):
        parts = layout.data
        multiple = parts // math.gcd(parts, generations)
        nearest = [number for number in (prompts // multiple * multiple, -(-prompts // multiple) * multiple) if number]
        text = (
            f"{prompts} prompts x {generations} generations = {prompts * generations} samples do not share out evenly "
            f"over {parts} data-parallel ranks; use LOOP.num_prompts_per_step={_listed(nearest)}"
        )
        yield prompts * generations % parts, f"{section}.parallel.data=", text
