"""Legal layouts of a recipe on its GPUs, with the rough estimates that put them in order before any dry run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.engines import placement_problems, refit_problems
from megatron_grpo.preflight.layout import layout_problems
from megatron_grpo.preflight.model import fp8_problems
from megatron_grpo.proof.plan.generation import (
    attention_numbers,
    decoder_of,
    engine_size,
    expert_numbers,
    generate,
)
from megatron_grpo.proof.plan.hardware import Hardware
from megatron_grpo.proof.plan.whole import lengths_of
from megatron_grpo.weights.layouts import training_shards
from megatron_grpo.weights.shape import ModelShape

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A legal layout, with the estimate that decides the order in which layouts run dry."""

    config: Config
    static_gib: float
    """GiB of weights, gradients and optimizer state of the fullest rank."""
    estimated_s: float
    """Rough seconds of a pass over the samples."""


def overrides_of(config: Config) -> list[str]:
    """The overrides with which a recipe gets the layouts that a search found."""
    policy, engines = config.policy, config.generation.parallel
    names = ("tensor", "pipeline", "virtual_pipeline", "context", "expert", "data", "sequence")
    found = [f"policy.parallel.{name}={_written(getattr(policy.parallel, name))}" for name in names]
    found += ["policy.parallel.first_stage_layers=null", "policy.parallel.last_stage_layers=null"]
    found.append(f"policy.activation_checkpointing={_written(policy.activation_checkpointing)}")
    return found + [f"generation.parallel.{name}={getattr(engines, name)}" for name in ("tensor", "data", "expert")]


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def layout_name(config: Config) -> str:
    """A layout in short: TP4 PP2 DP4, recompute."""
    parallel = config.policy.parallel
    sizes = {
        "TP": parallel.tensor,
        "PP": parallel.pipeline,
        "VPP": parallel.virtual_pipeline,
        "CP": parallel.context,
        "EP": parallel.expert,
        "DP": parallel.data,
    }
    text = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"
    return text + (", recompute" if config.policy.activation_checkpointing else "")


def gpus_of(config: Config) -> tuple[int, int]:
    """GPUs of the policy and of the engines, shared out in the recipe's proportion; colocated, both have all GPUs."""
    total = config.cluster.num_nodes * config.cluster.gpus
    policy, engines = config.policy.parallel.world_size, config.generation.parallel
    if config.generation.colocated or not config.generates:
        return total, total
    share = policy / (policy + engines.ranks_per_engine * engines.data)
    for_policy = max(1, round(total * share))
    return for_policy, total - for_policy


def engine_layout(config: Config, shape: ModelShape, hardware: Hardware, gpus: int) -> Config:
    """The configuration with the engines that answer a step's prompts soonest, on this many GPUs.

    Raises:
        ValueError: no engine of a node has room for the longest sequence.
    """
    recipe, best = config.generation.parallel, None
    lengths, longest = lengths_of(config), config.policy.max_total_sequence_length
    for tensor in _SIZES:
        ranks = tensor * recipe.pipeline
        if tensor > config.cluster.gpus or gpus % ranks:
            continue
        expert = tensor if recipe.expert > 1 else 1
        parallel = replace(recipe, tensor=tensor, expert=expert, data=gpus // ranks)
        one = replace(config, generation=replace(config.generation, parallel=parallel))
        if any("generation" in problem.subject for problem in layout_problems(one, shape)):
            continue
        size = engine_size(one, shape, hardware)
        most = min(one.generation.sequences_per_engine, size.most_sequences(float(lengths.totals.mean())))
        if size.most_sequences(longest) < 1 or most < 1:
            continue
        own = lengths.responses[:: parallel.data]
        copies = config.loop.num_generations_per_prompt
        seconds = generate(decoder_of(one, shape, hardware), lengths.prompt, own, most, copies).seconds
        if best is None or seconds < best[0]:
            best = seconds, one
    if best is None:
        raise ValueError(f"no engine of tensor <= {config.cluster.gpus} on {gpus} GPUs has room for {longest} tokens")
    return best[1]


def legal_layouts(config: Config, shape: ModelShape, gpus: int) -> Iterator[Config]:
    """Every layout of the policy on this many GPUs that the model, the machines and the batches allow."""
    tensors = [one for one in _SIZES if one <= config.cluster.gpus]
    experts = [1] if shape.experts is None else [one for one in _SIZES if shape.experts.count % one == 0]
    stages = [one for one in range(1, min(shape.layers, gpus) + 1) if gpus % one == 0 and shape.layers % one == 0]
    if config.policy.parallel.first_stage_layers or config.policy.parallel.last_stage_layers:
        stages.append(config.policy.parallel.pipeline)  # layers that do not divide evenly, as the recipe has them
    for tensor, pipeline, context, expert in product(tensors, dict.fromkeys(stages), (1, 2, 4, 8), experts):
        if gpus % (tensor * pipeline * context):
            continue
        uneven = shape.layers % pipeline != 0
        for chunks in _chunk_counts(shape.layers, pipeline, uneven):
            parallel = ParallelConfig(
                tensor=tensor,
                pipeline=pipeline,
                virtual_pipeline=chunks,
                first_stage_layers=config.policy.parallel.first_stage_layers if uneven else None,
                last_stage_layers=config.policy.parallel.last_stage_layers if uneven else None,
                context=context,
                expert=expert,
                data=gpus // (tensor * pipeline * context),
                sequence=tensor > 1,
            )
            for recompute in (False, True):
                policy = replace(config.policy, parallel=parallel, activation_checkpointing=recompute)
                one = replace(config, policy=policy)
                if not _broken(one, shape):
                    yield one


def _chunk_counts(layers: int, pipeline: int, uneven: bool) -> list[int]:
    """Model chunks of a rank to try: 1, 2 and 4, where they divide its layers."""
    if pipeline == 1 or uneven:
        return [1]
    return [one for one in (1, 2, 4) if layers // pipeline % one == 0]


def _broken(config: Config, shape: ModelShape) -> bool:
    checks = (layout_problems, fp8_problems, refit_problems)
    return any(any(check(config, shape)) for check in checks) or any(placement_problems(config))


def static_bytes(config: Config, shape: ModelShape) -> int:
    """Bytes of weights, gradients and optimizer state of the fullest rank, without padding; with adapters, of weights.

    A trained number takes 2 bytes as weight, 4 as gradient, and 12 in the optimizer: main weight and two moments, which
    a distributed optimizer splits over replicas.
    """
    policy, parallel = config.policy, config.policy.parallel
    each = parallel.world_size // parallel.pipeline
    weights = 4 if config.uses_reference and not config.reference.offload else 2
    parts = parallel.expert * parallel.expert_tensor
    worst = 0.0
    for shard in training_shards(parallel, shape)[::each]:
        ends = int(shard.embedding) + int(shard.end and not (shape.tied_embeddings and shard.embedding))
        dense, routed = _numbers(shape, shard.layers)
        dense += ends * shape.vocab * shape.hidden
        total = 0.0
        for numbers, replicas in (
            (dense / parallel.tensor, parallel.data * parallel.context),
            (routed / parts, each // parts),
        ):
            state = 12 * (1 - policy.optimizer.cpu_offload) / (replicas if policy.optimizer.distributed else 1)
            total += numbers * (weights + (0 if policy.lora.rank else 4 + state))
        worst = max(worst, total)
    return int(worst)


def _numbers(shape: ModelShape, layers: Sequence[int]) -> tuple[float, float]:
    """Numbers in the matrices of layers, and of these layers' routed experts."""
    dense, routed = 0.0, 0.0
    for layer in layers:
        dense += attention_numbers(shape, 1)
        if shape.has_experts(layer):
            assert shape.experts is not None
            routed += shape.experts.count * expert_numbers(shape)
            dense += shape.hidden * (3 * shape.experts.shared_ffn_hidden + shape.experts.count)
        else:
            dense += 3 * shape.hidden * shape.ffn_hidden
    return dense, routed


def estimate(config: Config, shape: ModelShape, hardware: Hardware) -> float:
    """Rough seconds of an optimizer step on the samples of a step, by which layouts are put in order.

    Products at half of the peak; messages of tensor, context and expert parallelism that nothing hides, at the speed of
    the slowest link between their ranks; the pipeline's bubble, (stages - 1) / (chunks * microbatches).
    """
    policy, parallel, tokens = config.policy, config.policy.parallel, float(lengths_of(config).totals.sum())
    passes = 4.0 if policy.activation_checkpointing else 3.0
    experts = shape.experts
    active = shape.vocab * shape.hidden * 1.0
    for layer in range(shape.layers):
        dense, routed = _numbers(shape, [layer])
        active += dense + (routed * experts.top_k / experts.count if experts is not None else 0.0)
    compute = 2 * passes * active * tokens / parallel.world_size / (0.5 * hardware.flops["bfloat16"])
    own = tokens / parallel.data / parallel.context / parallel.pipeline * shape.layers

    def speed(ranks: int) -> float:
        within = ranks <= hardware.gpus_per_domain
        return hardware.nvlink_bytes_per_s if within else hardware.network_bytes_per_s

    row = 2.0 * shape.hidden
    split = 4 * own * row * (parallel.tensor - 1) / parallel.tensor / hardware.nvlink_bytes_per_s
    ring = parallel.context - 1
    keys = 2.0 * 2 * shape.key_value_heads * shape.head_dim / parallel.tensor
    split += ring * own * keys / speed(parallel.tensor * parallel.context)
    if experts is not None and parallel.expert > 1:
        copies = own / parallel.tensor * experts.top_k * row
        split += 2 * copies * (parallel.expert - 1) / parallel.expert / speed(parallel.expert)
    microbatches = max(1, math.ceil(tokens / parallel.data / policy.microbatch_tokens))
    bubble = (parallel.pipeline - 1) / parallel.virtual_pipeline / microbatches
    wasted = math.ceil(microbatches / parallel.pipeline) * parallel.pipeline / microbatches
    return (compute + passes * split) * (1 + bubble) * (wasted if parallel.virtual_pipeline > 1 else 1.0)
