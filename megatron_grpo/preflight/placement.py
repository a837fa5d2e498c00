"""Checks of engines that share the GPUs of the policy (generation.placement=colocated)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config

_SUBJECT = "generation.placement=colocated"


def placement_problems(config: Config) -> Iterator[Problem]:
    """What stands against engines and models taking turns on the same devices."""
    if not config.generation.colocated:
        return
    if config.loop.async_grpo.enabled:
        text = "engines that sleep while models train cannot sample ahead of them; use separate, or "
        yield Problem(_SUBJECT, f"{text}{config.algorithm}.async_grpo.enabled=false")
    if config.cluster.gpus:
        yield from _on_gpus(config)


def _on_gpus(config: Config) -> Iterator[Problem]:
    if config.cluster.num_nodes > 1:
        text = "weights reach engines in the memory of one node, and the run has "
        yield Problem(_SUBJECT, f"{text}cluster.num_nodes={config.cluster.num_nodes}; use separate, or one node")
    if config.refit.mode == "broadcast":
        text = "goes over NCCL, which has one rank a GPU, and with generation.placement=colocated there are two; "
        yield Problem("refit.mode=broadcast", f"{text}use reshard")
    if config.policy.fp8.parameters:
        text = "keeps weights in a form that cannot leave a GPU and come back, for generation.placement=colocated"
        yield Problem("policy.fp8.parameters=True", f"{text}; use false")
    yield from _layouts(config)


def _layouts(config: Config) -> Iterator[Problem]:
    """Every rank of the policy shares its GPU with one rank of an engine, and with one of the value model at most."""
    policy, engines = config.policy.parallel.world_size, config.generation.parallel
    ranks = engines.ranks_per_engine * engines.data
    if ranks != policy:
        size = f"tensor={engines.tensor} x pipeline={engines.pipeline} x data={engines.data}"
        have, left = ("more", "") if ranks > policy else ("fewer", ", some of which no engine would use")
        fix = f"data={policy // engines.ranks_per_engine}" if policy % engines.ranks_per_engine == 0 else "other sizes"
        text = f"has {ranks} ranks ({size}), {have} than the {policy} GPUs of the policy that engines share{left}; use "
        yield Problem("generation.parallel", f"{text}{fix}")
    if config.value_model is not None and config.value_model.parallel.world_size > policy:
        ranks = config.value_model.parallel.world_size
        text = f"has {ranks} ranks, more than the {policy} GPUs of the policy that it shares; make it smaller"
        yield Problem("value.parallel", text)
