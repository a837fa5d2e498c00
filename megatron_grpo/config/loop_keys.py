"""GRPO and PPO share the keys of LoopConfig: each of these is one setting with two names, grpo.KEY and ppo.KEY."""

from __future__ import annotations

import dataclasses

from megatron_grpo.config.loop_schema import LoopConfig

LOOPS = ("grpo", "ppo")
"""The algorithms, and the sections of their names."""
SHARED = frozenset(field.name for field in dataclasses.fields(LoopConfig))
"""First parts of the shared keys, after the section."""
READ_BY = {"grpo": ("grpo",), "ppo": ("ppo", "value", "value_loss_fn")}
"""The sections that an algorithm alone reads, their shared keys apart."""


def is_shared(name: str) -> bool:
    """Whether a dotted name is a shared key, or a section of shared keys, under either algorithm's name."""
    section, _, rest = name.partition(".")
    return section in LOOPS and rest.partition(".")[0] in SHARED


def named_for(algorithm: str, name: str) -> str:
    """A shared key, or section of such keys, under an algorithm's name; any other name as it is."""
    return f"{algorithm}.{name.partition('.')[2]}" if is_shared(name) else name


def other_than(algorithm: str) -> str:
    """The algorithm that does not run."""
    return "grpo" if algorithm == "ppo" else "ppo"


def is_foreign_to(algorithm: str, name: str) -> bool:
    """Whether only the other algorithm reads a key."""
    return name.partition(".")[0] in READ_BY[other_than(algorithm)] and not is_shared(name)
