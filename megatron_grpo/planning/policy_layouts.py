"""Legal layouts of a recipe on a number of GPUs: those that pass the run's checks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.estimates import count_static_bytes
from megatron_grpo.planning.refusals import Refusals
from megatron_grpo.preflight.config_checks import find_problems
from megatron_grpo.preflight.layout_checks import count_gpus, count_reward_model_gpus

_OTHER_SECTIONS = ("generation.parallel", "value.parallel", "cluster.gpus_per_node")
"""Keys of problems that do not concern the policy's layout: engines, the value model, and the sum of all GPUs."""
POLICY_SIZES = (
    *("tensor", "pipeline", "virtual_pipeline", "context", "expert", "expert_tensor", "data", "sequence"),
    *("first_stage_layers", "last_stage_layers", "count_embedding", "count_loss"),
)
"""Keys of policy.parallel and value.parallel."""
ENGINE_SIZES = ("tensor", "pipeline", "expert", "data")
"""Keys of generation.parallel."""
_CHUNKS = (1, 2, 4)
"""Model chunks of a pipeline rank that are tried."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A legal layout, with the estimates that order the dry runs."""

    config: Config
    static_gib: float
    """GiB of weights, gradients and optimizer state of the fullest rank."""
    estimated_s: float
    """Rough seconds of a pass over the samples."""
    estimated_gib: float = 0.0
    """Rough GiB of the fullest rank, activations included."""


def list_overrides(config: Config) -> list[str]:
    """List the overrides that give a recipe this layout."""
    policy, engines = config.policy, config.generation.parallel
    overrides = [f"policy.parallel.{name}={write_value(getattr(policy.parallel, name))}" for name in POLICY_SIZES]
    overrides.append(f"policy.activation_checkpointing={write_value(policy.activation_checkpointing)}")
    if policy.activation_checkpointing:
        overrides.append(f"policy.recompute_modules={write_value(policy.recompute_modules)}")
    if not config.needs_generation or config.generation.server.urls:
        return overrides
    return overrides + [f"generation.parallel.{name}={getattr(engines, name)}" for name in ENGINE_SIZES]


def write_value(value: Any) -> str:
    """Write a value as on a command line."""
    if isinstance(value, list):
        return f"[{','.join(map(write_value, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def name_layout(config: Config) -> str:
    """Name a layout in short, such as TP4 PP2 DP4, recompute."""
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
    ends = parallel.first_stage_layers, parallel.last_stage_layers
    text += f" (layers {ends[0] or '='} … {ends[1] or '='})" if any(ends) else ""
    return text + (", recompute" if config.policy.activation_checkpointing else "")


def has_own_engines(config: Config) -> bool:
    """Whether the run starts engines on GPUs of its own."""
    return config.needs_generation and not config.generation.server.urls


def split_gpus(config: Config) -> list[tuple[int, int]]:
    """Split GPUs between policy and engines, in search order.

    Colocated, both sides have the same GPUs. GPUs of the value model and of reward models are left out.
    """
    # Both sides in the recipe's proportion, on all GPUs, come first. A split is as good as its side that is farthest
    # below that proportion; of equally good ones that with the fewest idle GPUs comes first.
    total = config.cluster.num_nodes * config.cluster.gpus - math.ceil(sum(count_reward_model_gpus(config).values()))
    if not has_own_engines(config) or config.generation.is_colocated:
        total -= 0 if config.generation.is_colocated else _count_other_gpus(config)
        return [(number, number if has_own_engines(config) else 0) for number in range(total, 0, -1)]
    total -= _count_other_gpus(config)
    policy, engines = config.policy.parallel.world_size, config.generation.parallel
    share = total * policy / (policy + engines.ranks_per_engine * engines.data)
    splits = [
        (policy_size, engine_size)
        for policy_size in range(1, total)
        for engine_size in range(1, total - policy_size + 1)
    ]
    return sorted(splits, key=lambda split: (-min(split[0] / share, split[1] / (total - share), 1), -sum(split)))


def _count_other_gpus(config: Config) -> int:
    value = [] if config.value_model is None else [config.value_model]
    return sum(model.parallel.world_size for model in (*value, *config.teacher_models.values()))


def count_idle_gpus(config: Config) -> int:
    """Count GPUs of the run's nodes that nothing uses."""
    return max(0, config.cluster.num_nodes * config.cluster.gpus - math.ceil(sum(count_gpus(config).values())))


def iterate_legal_layouts(
    config: Config, shape: ModelShape, gpus: int, refusals: Refusals | None = None, *, needs_all: bool = True
) -> Iterator[Config]:
    """Yield every layout on this many GPUs that passes the checks.

    Args:
        config: the recipe.
        shape: sizes of the model.
        gpus: ranks of the policy.
        refusals: gets the problems of the sizes and layouts that are refused.
        needs_all: whether a layout has to pass the checks of the whole run too: engines, value model, sum of all GPUs.
    """
    check = find_problems if needs_all else _find_size_problems
    refusals = Refusals() if refusals is None else refusals
    for layout in iterate_possible_layouts(config, shape, gpus, refusals):
        if not refusals.refuse(check(layout, shape)):
            yield layout


def iterate_possible_layouts(config: Config, shape: ModelShape, gpus: int, refusals: Refusals) -> Iterator[Config]:
    """Yield layouts of sizes that pass the checks by themselves.

    Arguments are those of `iterate_legal_layouts`.
    """
    # Most sizes are refused by themselves, so the product of the others is short.
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]

    def filter_usable(layouts: Iterable[ParallelConfig]) -> list[ParallelConfig]:
        return [
            layout
            for layout in layouts
            if not refusals.refuse(_find_size_problems(_with_layout(config, layout), shape))
        ]

    tensors = filter_usable(ParallelConfig(tensor=size, sequence=size > 1) for size in sizes)
    stages = filter_usable(
        layout for size in sizes if size <= shape.layers for layout in _iterate_pipelines(config, shape, size)
    )
    replicas = {layout.data for layout in filter_usable(ParallelConfig(data=size) for size in sizes)}
    experts = [1] if shape.experts is None else [size for size in range(1, gpus + 1) if shape.experts.count % size == 0]
    for tensor, stage, expert in product(tensors, stages, experts):
        remaining, rest = divmod(gpus, tensor.tensor * stage.pipeline)
        if rest or remaining * tensor.tensor % expert:
            continue
        for data in (size for size in replicas if remaining % size == 0):
            parallel = replace(
                stage,
                tensor=tensor.tensor,
                sequence=tensor.sequence,
                context=remaining // data,
                expert=expert,
                data=data,
            )
            yield from _with_recomputation(config, parallel)


def find_least_static_gib(config: Config, shape: ModelShape, gpus: int) -> float:
    """Find the least static GiB of the fullest GPU, over layouts."""
    layouts = iterate_possible_layouts(config, shape, gpus, Refusals())
    return min((count_static_bytes(layout, shape) / 2**30 for layout in layouts), default=float("inf"))


def _iterate_pipelines(config: Config, shape: ModelShape, size: int) -> Iterator[ParallelConfig]:
    """Yield pipelines: with the recipe's ends, equal stages, or smaller ends."""
    recipe = config.policy.parallel
    if size == recipe.pipeline and (recipe.first_stage_layers or recipe.last_stage_layers):
        first, last = recipe.first_stage_layers, recipe.last_stage_layers
        yield ParallelConfig(pipeline=size, first_stage_layers=first, last_stage_layers=last)
    elif shape.layers % size == 0:
        for chunks in _CHUNKS if size > 1 else (1,):
            if shape.layers // size % chunks == 0:
                yield ParallelConfig(pipeline=size, virtual_pipeline=chunks)
    else:
        # The ends hold the embedding and the head, so they get fewer layers than the stages between them.
        middle = -(-shape.layers // size)
        layers_at_ends = shape.layers - (size - 2) * middle
        if layers_at_ends < 2:
            middle -= 1
            layers_at_ends = shape.layers - (size - 2) * middle
        yield ParallelConfig(
            pipeline=size, first_stage_layers=-(-layers_at_ends // 2), last_stage_layers=layers_at_ends // 2
        )


def _with_recomputation(config: Config, parallel: ParallelConfig) -> Iterator[Config]:
    for recompute in (False, True):
        modules = [] if recompute else config.policy.recompute_modules
        policy = replace(config.policy, activation_checkpointing=recompute, recompute_modules=modules)
        yield _with_layout(replace(config, policy=policy), parallel)


def _with_layout(config: Config, parallel: ParallelConfig) -> Config:
    return replace(config, policy=replace(config.policy, parallel=parallel))


def _find_size_problems(config: Config, shape: ModelShape) -> list[Problem]:
    return [problem for problem in find_problems(config, shape) if not problem.key.startswith(_OTHER_SECTIONS)]
