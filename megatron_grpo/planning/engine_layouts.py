"""Layouts of engines on some GPUs: the one that answers a step's prompts soonest, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.generation_batches import find_room, simulate_generation
from megatron_grpo.planning.generation_cost import build_decoder, find_lengths, size_engine
from megatron_grpo.planning.refusals import Refusals
from megatron_grpo.platform.hardware import Hardware
from megatron_grpo.preflight.config_checks import find_problems
from megatron_grpo.preflight.refit_memory import find_refit_remarks

_STAGES = 8
"""Most pipeline stages of an engine that are tried."""


def iterate_engine_layouts(config: Config, shape: ModelShape, gpus: int) -> Iterator[GenerationParallelConfig]:
    """Yield every layout of engines on these GPUs, the recipe's pipeline first."""
    recipe = config.generation.parallel
    stages = [size for size in range(1, _STAGES + 1) if gpus % size == 0]
    for pipeline in dict.fromkeys([recipe.pipeline] * (gpus % recipe.pipeline == 0) + stages):
        for tensor in range(1, min(config.cluster.gpus, gpus) + 1):
            if gpus % (tensor * pipeline):
                continue
            for expert in [1] if shape.experts is None or tensor == 1 else [1, tensor]:
                data = gpus // tensor // pipeline
                yield replace(recipe, tensor=tensor, pipeline=pipeline, expert=expert, data=data)


def find_best_engines(
    config: Config, shape: ModelShape, hardware: Hardware, policy_gpus: int, gpus: int, refusals: Refusals
) -> Config | None:
    """Find the layout of engines that answers a step's prompts soonest.

    Args:
        config: the recipe.
        shape: sizes of the model.
        hardware: the GPUs.
        policy_gpus: GPUs of the policy, which is placed on the nodes before the engines.
        gpus: GPUs of the engines.
        refusals: gets the problems of the layouts that are refused.

    Returns:
        The recipe with these engines; None: none fit on this many GPUs.
    """
    best: tuple[float, Config] | None = None
    # Context-parallel ranks need not divide batches, and a layout that passes is checked together with the engines.
    policy = replace(config.policy, parallel=ParallelConfig(context=policy_gpus))
    for parallel in iterate_engine_layouts(config, shape, gpus):
        tried = replace(config, generation=replace(config.generation, parallel=parallel))
        # The search looks for the policy's layout afterwards; here only its GPUs count.
        problems = [
            problem for problem in find_problems(replace(tried, policy=policy), shape) if is_of_engines(problem)
        ]
        if refusals.refuse(problems):
            continue
        lacking = find_room_problems(tried, shape, hardware)
        if lacking:
            refusals.note_lack_of_room(_compute_lacking_gib(tried, shape, hardware), lacking[0])
            continue
        seconds = _time_share(tried, shape, hardware)
        if best is None or seconds < best[0]:
            best = seconds, tried
    return None if best is None else best[1]


def is_of_engines(problem: Problem) -> bool:
    """True if a problem may come from the engines' layout."""
    return problem.key.startswith(("generation.", "refit."))  # also batches and blocks that the layout divides


def find_room_problems(config: Config, shape: ModelShape, hardware: Hardware) -> list[Problem]:
    """Find that an engine lacks memory for its longest sequence, or for a refit."""
    return [*_find_cache_problems(config, shape, hardware), *find_refit_remarks(config, shape, hardware)]


def _find_cache_problems(config: Config, shape: ModelShape, hardware: Hardware) -> list[Problem]:
    size, parallel = size_engine(config, shape, hardware), config.generation.parallel
    longest, share = config.policy.max_total_sequence_length, config.generation.engine.gpu_memory_utilization
    if size.count_sequences(longest) >= 1:
        return []
    stages = f" x pipeline={parallel.pipeline}" if parallel.pipeline > 1 else ""
    weights, activations = size.weight_bytes / 2**30, size.activation_bytes / 2**30
    text = (
        f"has {weights:.1f} GiB of weights and {activations:.1f} GiB of activations on a GPU, of which "
        f"generation.engine.gpu_memory_utilization={share:g} gives it {share * hardware.memory_gib:.1f} GiB; "
        f"that leaves a cache of {size.cache_tokens} tokens, and policy.max_total_sequence_length={longest}"
    )
    return [Problem(f"generation.parallel.tensor={parallel.tensor}{stages}", text)]


def _compute_lacking_gib(config: Config, shape: ModelShape, hardware: Hardware) -> float:
    """GiB that an engine's GPU lacks for the longest sequence."""
    size, longest = size_engine(config, shape, hardware), config.policy.max_total_sequence_length
    available = config.generation.engine.gpu_memory_utilization * hardware.memory_gib
    return (size.weight_bytes + size.activation_bytes + longest * size.kv_bytes_per_token) / 2**30 - available


def _time_share(config: Config, shape: ModelShape, hardware: Hardware) -> float:
    """Seconds of an engine for its share of a step's prompts."""
    lengths, room = find_lengths(config), find_room(config, size_engine(config, shape, hardware))
    # Responses are in the order of their lengths, so every data-th one makes a typical share of an engine.
    share = lengths.responses[:: config.generation.parallel.data]
    copies = config.loop.num_generations_per_prompt
    return simulate_generation(build_decoder(config, shape, hardware), lengths.prompt, share, room, copies).seconds
