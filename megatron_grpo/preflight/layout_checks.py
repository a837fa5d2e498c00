"""Checks of layouts against the model, the GPUs of the machines and the batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import find_value_shape
from megatron_grpo.preflight.rules import Rule, evaluate_rules, list_trained_models


def check_split(section: str, parallel: ParallelConfig, shape: ModelShape) -> Iterator[Rule]:
    """Check that a training layout fits the model; section: policy.parallel, for instance."""
    yield _check_tensor(section, parallel.tensor, shape)
    yield from _check_mamba(section, parallel, shape)
    yield from _check_pipeline(section, parallel, shape)
    yield from _check_experts(section, parallel, shape)
    if (delta := shape.delta) is not None:
        ranks, heads = parallel.tensor * parallel.context, delta.key_heads
        usable = [size for size in _list_divisors(heads) if heads % (size * parallel.tensor) == 0] or [1]
        is_broken = heads % parallel.tensor == 0 and heads % ranks
        text = f"times tensor={parallel.tensor} does not divide the {heads} key heads of the model's delta nets,"
        text += f" which these ranks share; use {_join(usable)}"
        yield is_broken, f"{section}.context={parallel.context}", text
    kind = "a mixture of experts" if shape.experts is not None else "latent attention"
    needs_sequence = parallel.tensor > 1 and (shape.experts is not None or shape.latent is not None)
    text = f"{kind} with {section}.tensor={parallel.tensor} needs it; use true"
    yield needs_sequence and not parallel.sequence, f"{section}.sequence=False", text


def _check_tensor(section: str, tensor: int, shape: ModelShape, *, is_engine: bool = False) -> Rule:
    sizes = range(1, shape.attention_heads + 1)
    usable = [size for size in sizes if _find_undivided(size, shape, is_engine=is_engine) is None]
    undivided = _find_undivided(tensor, shape, is_engine=is_engine)
    return undivided, f"{section}.tensor={tensor}", f"does not divide the model's {undivided}; use {_join(usable)}"


def _check_mamba(section: str, parallel: ParallelConfig, shape: ModelShape) -> Iterator[Rule]:
    if shape.mamba is None:
        return
    # Context-parallel ranks share the heads of a tensor-parallel rank: whole groups, or equal parts of one.
    heads, ranks = shape.mamba.heads // parallel.tensor, range(1, shape.mamba.heads + 1)
    shared = shape.mamba.heads // shape.mamba.groups
    usable = [n for n in ranks if heads % n == 0 and (heads // n % shared == 0 or shared % (heads // n) == 0)]
    text = f"does not divide the {heads} heads of Mamba of a tensor-parallel rank into whole groups of {shared}, or"
    text += f" into equal parts of them; use {_join(usable)}"
    yield parallel.context not in usable, f"{section}.context={parallel.context}", text


def _find_undivided(tensor: int, shape: ModelShape, *, is_engine: bool) -> str | None:
    """Describe the first size that `tensor` ranks cannot split; None: none."""
    sizes = [(shape.attention_heads, "attention heads")]
    if shape.count_layers("dense"):
        sizes.append((shape.ffn_hidden, "feed-forward width"))
    if shape.mamba is not None:
        sizes.append((shape.mamba.groups, "groups of Mamba"))
    if shape.experts is not None and shape.experts.shared_ffn_hidden:
        sizes.append((shape.experts.shared_ffn_hidden, "shared experts' width"))
    if shape.delta is not None:
        sizes.append((shape.delta.key_heads, "key heads of delta nets"))
    for size, name in sizes:
        if size % tensor:
            return f"{size} {name}"
    if shape.output_gate and not is_engine and shape.key_value_heads % tensor:
        return f"{shape.key_value_heads} key/value heads, whose queries have gates that ranks cannot share"
    for heads in {shape.find_heads(layer) for layer in range(shape.layers)} if shape.latent is None else ():
        groups = heads.key_value_heads
        if groups % tensor == 0:
            continue
        if tensor % groups:
            return f"{groups} key/value heads, nor is it a multiple of them"
        # With more ranks than key/value heads a rank has an equal part of a head's queries, key and value; an engine's
        # has the whole key and value.
        rows = (shape.attention_heads // groups + (1 if heads.key_is_value else 2)) * heads.head_dim
        if not is_engine and rows % (tensor // groups):
            return f"{rows} rows of a key/value head, which {tensor // groups} ranks would share"
    return None


def _join(numbers: list[int]) -> str:
    """Write numbers as "1, 2 or 4"."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def _list_divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _check_divisor(key: str, parts: int, number: int, description: str) -> Rule:
    return number % parts, f"{key}={parts}", f"does not divide {description}; use {_join(_list_divisors(number))}"


def _check_pipeline(section: str, parallel: ParallelConfig, shape: ModelShape) -> Iterator[Rule]:
    stages, chunks, layers = parallel.pipeline, parallel.virtual_pipeline, shape.layers
    if chunks > 1 and stages == 1:
        yield True, f"{section}.virtual_pipeline={chunks}", f"needs {section}.pipeline > 1"
        return
    ends = {name: getattr(parallel, name) for name in ("first_stage_layers", "last_stage_layers")}
    ends = {name: number for name, number in ends.items() if number is not None}
    flags = {name: True for name in ("count_embedding", "count_loss") if getattr(parallel, name)}
    uneven = {**ends, **flags}
    if uneven and (stages == 1 or (ends and flags)):
        name, value = next(iter(uneven.items()))
        text = "and count_embedding or count_loss both shift layers between stages; use one of the two ways"
        yield True, f"{section}.{name}={value}", f"needs {section}.pipeline > 1" if stages == 1 else text
        return
    # Stages without a set number of layers share the rest evenly; embedding and loss may count as layers.
    middle, remaining = stages - len(ends), layers + len(flags) - sum(ends.values())
    if remaining < 0 or (middle == 0 and remaining) or (middle and (remaining % middle or remaining < middle)):
        usable = _join(_list_divisors(layers + len(flags)))
        if ends:
            names = " and ".join(f"{name}={number}" for name, number in ends.items())
            text = f"with {names} {remaining} of {layers} layers remain for {middle} ranks, which need equal parts"
        elif flags:
            text = f"does not divide the model's {layers} layers and {len(flags)} that are counted too; use {usable}"
        else:
            text = f"does not divide the model's {layers} layers; use {usable}, or first_stage_layers"
        yield True, f"{section}.pipeline={stages}", text
        return
    # With virtual stages each stage cuts its layers into equal chunks.
    even = remaining // middle if middle else 0
    stage_layers = {*ends.values(), *([even] if middle else [])}
    layers = next((layers for layers in stage_layers if layers % chunks), chunks)
    yield _check_divisor(f"{section}.virtual_pipeline", chunks, layers, f"the {layers} layers of a pipeline rank")
    if shape.indexer is not None and layers == chunks:
        sizes = [ends.get("first_stage_layers", even), *[even] * (stages - 2), ends.get("last_stage_layers", even)]
        counts = [size // chunks for size in sizes] * chunks
        counts[0] -= parallel.count_embedding
        # Layers that share the choice of an indexer get it from the last layer with one in the same stage or chunk.
        firsts = [sum(counts[:number]) for number in range(len(counts))]
        name, size = ("virtual_pipeline", chunks) if chunks > 1 else ("pipeline", stages)
        first = next((layer for layer in firsts if stages > 1 and not shape.indexer.layers[layer]), None)
        text = f"begins a part with layer {first}, which has no indexer and shares the choice of a layer before it;"
        text += " use parts that begin with one that has"
        yield first is not None, f"{section}.{name}={size}", text


def _check_experts(section: str, parallel: ParallelConfig, shape: ModelShape) -> Iterator[Rule]:
    expert, tensor = parallel.expert, parallel.expert_tensor
    if shape.experts is None:
        for name, size in (("expert", expert), ("expert_tensor", tensor)):
            yield size > 1, f"{section}.{name}={size}", "the model has no experts; use 1"
        return
    count, width = shape.experts.count, shape.experts.ffn_hidden
    yield _check_divisor(f"{section}.expert", expert, count, f"the model's {count} experts")
    yield _check_divisor(f"{section}.expert_tensor", tensor, width, f"an expert's width of {width}")
    text = "Megatron-Core does not split experts with biases; use 1"
    yield shape.experts.bias and tensor > 1, f"{section}.expert_tensor={tensor}", text
    # Experts are spread over the ranks that hold one pipeline stage, so their own layout has to divide these.
    ranks = parallel.tensor * parallel.context * parallel.data
    usable = [size for size in _list_divisors(count) if ranks % (size * tensor) == 0]
    advice = _join(usable) if usable else "fewer of expert_tensor"
    text = f"times expert_tensor={tensor} does not divide tensor * context * data = {ranks}; use {advice},"
    text += " or more replicas"
    yield ranks % (expert * tensor), f"{section}.expert={expert}", text


@evaluate_rules
def find_layout_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check layouts against machines, batches and model (None: unknown)."""
    trained, moe = [(key, model.parallel) for key, model in list_trained_models(config).items()], config.policy.moe
    for section, layout in trained:
        text = f"needs {section}.parallel.tensor > 1"
        yield layout.sequence and layout.tensor == 1, f"{section}.parallel.sequence=", text
    yield from check_devices(config, count_gpus(config), trained)
    # Only ranks that train need equally many samples: prompts go to whichever engine has the least to do.
    generations, prompts = config.loop.num_generations_per_prompt, config.loop.num_prompts_per_step
    samples = f"{prompts} prompts x {generations} generations = {prompts * generations} samples"
    for section, layout in trained:
        multiple = layout.data // math.gcd(layout.data, generations)
        nearest = [count for count in (prompts // multiple * multiple, -(-prompts // multiple) * multiple) if count]
        advice = f"use LOOP.num_prompts_per_step={_join(nearest)}"
        text = f"{samples} do not share out evenly over {layout.data} data-parallel ranks; {advice}"
        yield prompts * generations % layout.data, f"{section}.parallel.data=", text
    if shape is None:
        return
    yield from check_split("policy.parallel", config.policy.parallel, shape)
    context, on_gpus = config.policy.parallel.context, config.cluster.gpus and config.policy.precision == "bfloat16"
    text = "Transformer Engine's attention has no sinks in packed sequences that ranks share; use 1"
    yield context > 1 and on_gpus and shape.sinks, "policy.parallel.context=", text
    for name in ("aux_loss_coeff", "z_loss_coeff", "bias_update_rate"):
        has_no_experts = getattr(moe, name) and shape.experts is None
        yield has_no_experts, f"policy.moe.{name}=", "the model has no experts; use 0"
    if shape.experts is None:
        for name in ("replay_routing", "freeze_router"):
            yield getattr(moe, name), f"policy.moe.{name}=", "the model has no experts; use false"
    else:
        yield from _check_routers(config)
    has_no_bias = shape.experts is not None and not shape.experts.selection_bias
    text = "the model chooses experts without a bias; use 0"
    yield moe.bias_update_rate and has_no_bias, "policy.moe.bias_update_rate=", text
    yield from check_engines(config, shape)
    yield from _check_value_model(config, shape)


def _check_routers(config: Config) -> Iterator[Rule]:
    moe, engine, on_cpu = config.policy.moe, config.generation.engine, config.cluster.gpus == 0
    text = "trains routers, which policy.moe.freeze_router=true leaves as they are; use 0"
    yield moe.freeze_router and moe.aux_loss_coeff > 0, "policy.moe.aux_loss_coeff=", text
    yield moe.freeze_router and moe.z_loss_coeff > 0, "policy.moe.z_loss_coeff=", text
    if not moe.replay_routing:
        return
    text = "a CPU engine records experts, for policy.moe.replay_routing=true, only without compilation; use true"
    yield on_cpu and not engine.enforce_eager, "generation.engine.enforce_eager=", text
    text = "vLLM returns routed experts, for policy.moe.replay_routing=true, with prefix caching only; use true"
    yield not on_cpu and not engine.enable_prefix_caching, "generation.engine.enable_prefix_caching=", text
    text = "vLLM returns no routed experts, for policy.moe.replay_routing=true, from a pipeline; use 1, and tensor"
    yield config.generation.parallel.pipeline > 1, "generation.parallel.pipeline=", text


def _check_value_model(config: Config, policy: ModelShape) -> Iterator[Rule]:
    has_path = config.value.model.path is not None
    shape = find_value_shape(config) if has_path else policy
    if config.value_model is None or shape is None:
        return
    yield from check_split("value.parallel", config.value.parallel, shape)
    longest = config.policy.max_total_sequence_length
    text = f"has {shape.max_positions} positions, fewer than policy.max_total_sequence_length={longest}"
    yield has_path and 0 < shape.max_positions < longest, "value.model.path=", text
    text = f"has {shape.vocab} tokens, and the policy, whose tokens it reads, {policy.vocab}"
    yield shape.vocab < policy.vocab, "value.model.path=", text


def check_engines(config: Config, shape: ModelShape) -> Iterator[Rule]:
    """Check that the layout of the engines fits the model."""
    parallel, experts, subject = config.generation.parallel, shape.experts, "generation.parallel.expert="
    tensor, expert = parallel.tensor, parallel.expert
    yield _check_tensor("generation.parallel", tensor, shape, is_engine=True)
    text = f"exceeds the {shape.key_value_heads} key/value heads, of which vLLM has no copies for {shape.family}"
    yield shape.sinks and tensor > shape.key_value_heads, "generation.parallel.tensor=", text
    # vLLM need not give every stage equally many layers.
    text = f"exceeds the model's {shape.layers} layers"
    yield parallel.pipeline > shape.layers, "generation.parallel.pipeline=", text
    is_shared = shape.indexer is not None and not all(shape.indexer.layers)
    text = f"layers of this {shape.family} share an indexer's choice, which vLLM does not send to other ranks; use 1"
    yield is_shared and parallel.pipeline > 1, "generation.parallel.pipeline=", text
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


def check_devices(
    config: Config, needs: Mapping[str, float], trained: Sequence[tuple[str, ParallelConfig]]
) -> Iterator[Rule]:
    """Check that the nodes have the GPUs that components need."""
    cluster, parallel = config.cluster, config.generation.parallel
    if cluster.gpus == 0:
        return
    available = cluster.num_nodes * cluster.gpus
    (section, ranks), *further_needs = needs.items()
    uses = " and ".join([f"{section} takes {ranks}", *(f"{section} {ranks:g}" for section, ranks in further_needs)])
    advice = "make the layouts smaller, or give more GPUs, or 0 for a run on CPU"
    is_enough = sum(needs.values()) <= available
    text = f"{cluster.num_nodes} node(s) have {available} GPUs, but {uses}; {advice}"
    yield not is_enough, "cluster.gpus_per_node=", text
    if is_enough and config.needs_generation and not config.generation.server.urls:
        yield from _check_scattered_engines(config, trained)
    # Tensor parallelism reduces activations in every layer, for which only links within a node are fast enough.
    text = f"matrices are split within a node, which has {cluster.gpus} GPUs; use pipeline across nodes"
    for section, tensor in [*((name, layout.tensor) for name, layout in trained), ("generation", parallel.tensor)]:
        yield tensor > cluster.gpus, f"{section}.parallel.tensor=", text


def _check_scattered_engines(config: Config, trained: Sequence[tuple[str, ParallelConfig]]) -> Iterator[Rule]:
    """Check that engines which fit a node get GPUs of one node."""
    node_gpus, ranks = config.cluster.gpus, config.generation.parallel.ranks_per_engine
    if config.generation.is_colocated or ranks > node_gpus:
        return
    # Models fill the nodes rank by rank before the engines start.
    free = [node_gpus] * config.cluster.num_nodes
    for _, layout in trained:
        for part in (*[node_gpus] * (layout.world_size // node_gpus), layout.world_size % node_gpus):
            node = next((index for index, gpus in enumerate(free) if gpus >= part), None)
            if node is None:
                return
            free[node] -= part
    fitting, remaining = sum(gpus // ranks for gpus in free), " + ".join(str(gpus) for gpus in free if gpus)
    advice = f"use data={fitting}, or smaller engines"
    text = f"engines of {ranks} GPUs fit {fitting} times into the {remaining} GPUs that the models leave of the nodes;"
    text += f" {advice}"
    yield fitting < config.generation.parallel.data, "generation.parallel.data=", text


def count_gpus(config: Config) -> dict[str, float]:
    """Count the GPUs of models, engines and reward models, by key."""
    gpus: dict[str, float]
    if not config.debug.train:
        gpus = count_engine_gpus(config)
    elif config.generation.is_colocated:  # engines and value model share the policy's GPUs
        gpus = {"policy.parallel": config.policy.parallel.world_size}
    else:
        gpus = {f"{key}.parallel": model.parallel.world_size for key, model in list_trained_models(config).items()}
        teachers = config.teacher_models.items()
        gpus |= {f"{section}.parallel": teacher.parallel.world_size for section, teacher in teachers}
        if config.needs_generation and not config.generation.server.urls:
            gpus |= count_engine_gpus(config)
    return gpus | count_reward_model_gpus(config)


def count_reward_model_gpus(config: Config) -> dict[str, float]:
    """Count the GPUs of environments with reward models, by key."""
    gpus = {}
    for name, environment in config.env.items():
        model = environment.reward_model
        gpus[f"env.{name}.reward_model.gpus"] = model.gpus * model.num_workers * len(environment.reward_model_folders)
    return {key: count for key, count in gpus.items() if count}


def count_engine_gpus(config: Config) -> dict[str, float]:
    """Count the GPUs of the engines, by key."""
    parallel = config.generation.parallel
    return {"generation.parallel": parallel.ranks_per_engine * parallel.data}
