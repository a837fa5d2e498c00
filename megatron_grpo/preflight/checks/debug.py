"""Checks of the debug modes: what one half of a run cannot do without the other."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config


def debug_problems(config: Config) -> Iterator[Problem]:
    """Settings that need the half of the run that is left out."""
    if not config.generates and not config.debug.train:
        text = f"leaves nothing to do beside debug.rollouts_from={config.debug.rollouts_from}; give one of them"
        yield Problem("debug.train=False", text)
    elif not config.generates:
        yield from _without_engines(config)
    elif not config.debug.train:
        yield from _without_policy(config)


def _without_engines(config: Config) -> Iterator[Problem]:
    """What a run that reads its rollouts cannot do."""
    because = "and debug.rollouts_from starts no engine"
    loop, section = config.loop, config.algorithm
    if loop.async_grpo.enabled:
        yield Problem(f"{section}.async_grpo.enabled=True", f"samples ahead, {because}; use false")
    when = {
        f"{section}.val_period={loop.val_period}": loop.val_period > 0,
        f"{section}.val_at_start=True": loop.val_at_start,
        f"{section}.val_at_end=True": loop.val_at_end,
    }
    if config.data.validation and any(when.values()):
        asked = " and ".join(setting for setting, is_on in when.items() if is_on)
        off = "data.val_path=null" if config.data.val_path is not None else "data.val_sets={}"
        key, one = next(iter(config.data.validation.items()))
        yield Problem(f"{key}={one.path}", f"is sampled by {asked}, {because}; use {off}")
    if config.policy.moe.replay_routing:
        text = "needs the experts that engines chose, which recorded rollouts do not have; use false"
        yield Problem("policy.moe.replay_routing=True", text)


def _without_policy(config: Config) -> Iterator[Problem]:
    """What a run without ranks cannot do."""
    because = "and debug.train=false starts no rank of the policy"
    if config.loop.async_grpo.enabled:
        text = f"samples while steps train, {because}; use false"
        yield Problem(f"{config.algorithm}.async_grpo.enabled=True", text)
    if config.checkpointing.resume not in ("auto", "none"):
        text = (
            f"is read by ranks of the policy, {because[4:]}; export the checkpoint (python -m megatron_grpo.export), "
            "and give its folder as policy.model.path"
        )
        yield Problem(f"checkpointing.resume={config.checkpointing.resume}", text)
    if config.generation.server.urls:
        text = f"serves weights that a refit sends, {because}; use engines of the run's own, generation.server.urls=[]"
        yield Problem(f"generation.server.urls={config.generation.server.urls}", text)
    if config.policy.quantization is not None:
        text = f"rounds the weights on their way to the engines, {because}; use null"
        yield Problem(f"policy.quantization={config.policy.quantization}", text)
