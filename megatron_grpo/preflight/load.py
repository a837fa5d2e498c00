"""From a command line to a configuration that was checked as a whole: by itself, against the model, on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_grpo.config.checks import config_problems
from megatron_grpo.config.compose import Composed, compose_typed
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.schema import Config
from megatron_grpo.models.source import known_shape
from megatron_grpo.preflight.layout import layout_problems
from megatron_grpo.preflight.lengths import length_problems
from megatron_grpo.preflight.machine import machine_problems


def load_config(overrides: Sequence[str]) -> Config:
    """The configuration of a run that can start on this machine.

    Args:
        overrides: Hydra's syntax, as on the command line: "+exp=quickstart", "grpo.max_num_steps=3"; and "job=FILE".

    Raises:
        ConfigError: anything is wrong, in the configuration or with what it asks of the machine (files, GPUs); names
            every problem.
    """
    composed = compose_typed(overrides)
    config = _checked(composed)
    problems = machine_problems(config)
    if problems:
        raise ConfigError(composed.job.named(problems))
    return config


def compose_config(overrides: Sequence[str]) -> Config:
    """The configuration, checked by itself: names, types, ranges, layout and batch arithmetic, but no file and no GPU.

    Raises:
        ConfigError: names every problem.
    """
    return _checked(compose_typed(overrides))


def _checked(composed: Composed) -> Config:
    config, problems = composed.config, list(composed.problems)
    if config is not None:
        shape = known_shape(config)
        others = [*layout_problems(config, shape), *length_problems(config, shape), *config_problems(config)]
        problems += [
            problem
            for problem in others
            if problem.key not in composed.already and not any(key in problem.text for key in composed.defaulted)
        ]
    if problems:
        raise ConfigError(composed.job.named(problems))
    assert config is not None
    return config
