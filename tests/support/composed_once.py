"""Composing each choice of recipe and options once a process: the tests compose some thousands of command lines."""

import pickle
from functools import cache

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.grammar_parser import parse

parse_once = cache(parse)
"""For `omegaconf.base`, which parses the same interpolations of conf/ for each configuration."""


def compose_with_settings(config_name: str, overrides: list[str]) -> DictConfig:
    """Compose as Hydra does, which itself applies settings of single keys after all files.

    Settings begin with ++, as `read_overrides` writes them. A command line with a folder of its own or a removed
    environment goes to Hydra whole.
    """
    settings = [override for override in overrides if override.startswith("++")]
    choices = [override for override in overrides if not override.startswith("++")]
    if any(choice.startswith(("~", "hydra.")) for choice in choices):
        return compose(config_name, overrides)
    composed: DictConfig = pickle.loads(_compose_choices(config_name, tuple(choices)))  # quicker than a deep copy
    OmegaConf.clear_cache(composed)  # the time in the name of a run is that of its own command line
    parsed = OverridesParser.create().parse_overrides(settings)
    ConfigLoaderImpl._apply_overrides_to_config(parsed, composed)
    return composed


@cache
def _compose_choices(config_name: str, choices: tuple[str, ...]) -> bytes:
    return pickle.dumps(compose(config_name, [*choices]))
