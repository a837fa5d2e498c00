"""From a command line to a configuration that was checked as a whole: by itself, against the model, on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_grpo.cluster.gpus import find_gpus
from megatron_grpo.composition.compose import Composed, compose_typed
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.source import known_shape
from megatron_grpo.preflight.adapters import adapter_problems
from megatron_grpo.preflight.checks import config_problems
from megatron_grpo.preflight.checks.cautions import remarks
from megatron_grpo.preflight.engine import engine_problems, recorded_routing_problems
from megatron_grpo.preflight.fp8 import fp8_problems
from megatron_grpo.preflight.layout import layout_problems
from megatron_grpo.preflight.lengths import length_problems
from megatron_grpo.preflight.machine import MachineReport, examine_machine
from megatron_grpo.preflight.megatron_fields import megatron_field_problems
from megatron_grpo.preflight.placement import placement_problems
from megatron_grpo.preflight.quantization import quantization_problems
from megatron_grpo.preflight.refit import refit_problems
from megatron_grpo.preflight.steps import leave_steps_open, settle_steps
from megatron_grpo.preflight.training import training_problems
from megatron_grpo.preflight.vllm_fields import vllm_argument_problems


@dataclass(slots=True)
class Checked:
    """A command line after all checks."""

    config: Config | None
    """None: nothing could be made of the command line."""
    values: dict[str, Any]
    """What the configuration is made of, as plain values; empty when nothing could be composed."""
    problems: list[Problem] = field(default_factory=list)
    """What keeps it from running, under the names that the user gave."""
    remarks: list[Problem] = field(default_factory=list)
    """What may be meant, and may not."""

    def require(self) -> Config:
        """The configuration.

        Raises:
            ConfigError: there are problems.
        """
        if self.problems:
            raise ConfigError(self.problems)
        assert self.config is not None
        return self.config


def check_overrides(overrides: Sequence[str]) -> Checked:
    """Check a command line: the configuration by itself, and if it is right, what it asks of this machine.

    Args:
        overrides: Hydra's syntax, as on the command line: "+exp=quickstart", "grpo.max_num_steps=3"; and "job=FILE".
    """
    composed = compose_typed(overrides)
    checked = _by_itself(composed)
    if checked.problems or checked.config is None:
        return checked
    machine = _of_machine(checked.config)
    checked.problems += composed.named(machine.problems)
    checked.remarks = composed.named([*remarks(checked.config), *machine.remarks])
    return checked


def check_config(config: Config) -> Checked:
    """Check a configuration that was made by a script, as `check_overrides` does that of a command line."""
    checked = Checked(config, asdict(config), _problems(config))
    if not checked.problems:
        machine = _of_machine(config)
        checked.problems, checked.remarks = machine.problems, [*remarks(config), *machine.remarks]
    return checked


def load_config(overrides: Sequence[str]) -> Config:
    """The configuration of a run that can start on this machine.

    Args:
        overrides: words of the command line, like "grpo.seed=1" or "--config-name=NAME" (`check_overrides`).

    Raises:
        ConfigError: anything is wrong, in the configuration or with what it asks of the machine (files, GPUs); names
            every problem.
    """
    return check_overrides(overrides).require()


def compose_config(overrides: Sequence[str]) -> Config:
    """The configuration, checked by itself: names, types, ranges, layout and batch arithmetic, but no file and no GPU.

    Raises:
        ConfigError: names every problem.
    """
    return _by_itself(compose_typed(overrides)).require()


def _of_machine(config: Config) -> MachineReport:
    """What this machine says; the steps of the run are settled once its rows are counted."""
    machine = examine_machine(config)
    if not machine.problems:
        machine.problems += settle_steps(config)
    return machine


def _by_itself(composed: Composed) -> Checked:
    config, problems = composed.config, list(composed.problems)
    if config is not None:
        problems += [
            problem
            for problem in _problems(config)
            if problem.key not in composed.already and not any(key in problem.text for key in composed.defaulted)
        ]
    return Checked(config, composed.values, composed.named(problems))


def _problems(config: Config) -> list[Problem]:
    """What is wrong with a configuration by itself."""
    find_gpus(config.cluster)
    leave_steps_open(config)
    shape = known_shape(config)
    return [
        *layout_problems(config, shape),
        *length_problems(config, shape),
        *adapter_problems(config, shape),
        *fp8_problems(config, shape),
        *quantization_problems(config, shape),
        *config_problems(config),
        *training_problems(config, shape),
        *megatron_field_problems(config),
        *engine_problems(config),
        *recorded_routing_problems(config),
        *vllm_argument_problems(config),
        *refit_problems(config, shape),
        *placement_problems(config),
    ]
