"""Trains a model as a recipe says: python -m megatron_grpo.train +exp=quickstart grpo.max_num_steps=3."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

from omegaconf import OmegaConf

from megatron_grpo.cluster.ray_settings import prepare_ray_environment
from megatron_grpo.config.compose import compose_values
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.help import help_text
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import load_config

FAILED, MISTAKE, INTERRUPTED = 1, 2, 130
"""Exit codes: a run that failed, a command line that cannot be run, Ctrl-C."""


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    try:
        if {"-h", "--help"} & set(arguments):
            print(help_text(), end="")
            return 0
        overrides, show = _read_options(arguments)
        if show:
            print(_resolved_yaml(overrides), end="")
            return 0
        config = load_config(overrides)
        if config.cluster.ray_address is None:
            prepare_ray_environment()
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # of torchdata, about itself
        _run(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return MISTAKE
    except RunError as error:
        print(f"run failed: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def _run(config: Config) -> None:
    """The algorithm that the configuration names, imported after the checks: torch and Ray take seconds to import."""
    if config.algorithm == "ppo":
        from megatron_grpo.algorithms.ppo import run
    else:
        from megatron_grpo.algorithms.grpo import run
    run(config)


def _read_options(arguments: Sequence[str]) -> tuple[list[str], bool]:
    """Splits the options from the overrides; True: only show the configuration."""
    overrides: list[str] = []
    show = False
    rest = iter(arguments)
    for argument in rest:
        name, _, value = argument.partition("=")
        if name in ("--cfg", "-c"):
            value = value or next(rest, "")
            if value != "job":
                raise ConfigError([Problem(f"{name} {value}".strip(), "shows one thing only: --cfg job")])
            show = True
        elif argument.startswith("-"):
            raise ConfigError([Problem(argument, "no such option; --help shows what there is")])
        else:
            overrides.append(argument)
    return overrides, show


def _resolved_yaml(overrides: Sequence[str]) -> str:
    values, problems = compose_values(overrides)
    if problems:
        raise ConfigError(problems)
    return OmegaConf.to_yaml(OmegaConf.create(values))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
