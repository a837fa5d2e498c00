"""Settings that are no mistakes and change nothing because a switch that they belong to is off.

A recipe's values stay while its switch is turned off, but nobody should compare a variant that is a no-op.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.changes import changed
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.checks.idle_learning import LEARNING
from megatron_grpo.preflight.checks.idle_surroundings import SURROUNDINGS


def idle_settings(config: Config) -> Iterator[Problem]:
    """Each setting that differs from its default and changes nothing in this run, once, with what it needs."""
    words = {"LOOP": config.algorithm, "PASSES": config.passes_key}
    of_ppo = ("value", "value_loss_fn") if config.loop.has_value_model else ()
    learning = ("loss_fn", config.algorithm, "reference", "policy", *of_ppo)
    sections = (*learning, "data", "generation", "refit", "checkpointing", "logger")
    for section in sections:
        for key, value in changed(config, section):
            for names, is_idle, text in (*LEARNING, *SURROUNDINGS):
                if any(_covers(_worded(name, words), key) for name in names) and is_idle(config):
                    yield Problem(f"{key}={value}", _worded(text, words))
                    break


def _covers(name: str, key: str) -> bool:
    """Whether a key is meant: it has this name, or it is in the section whose name ends in a point."""
    return key.startswith(name) if name.endswith(".") else key == name


def _worded(text: str, words: dict[str, str]) -> str:
    for placeholder, word in words.items():
        text = text.replace(placeholder, word)
    return text
