"""The recipes for GPUs, in every precision that they run in, with the config files of their models."""

from copy import deepcopy
from functools import cache

from megatron_grpo.config.overrides import RECIPES, list_config_groups
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config
from tests.support.hf_configs import config_folder

FP8 = "precision=fp8"
GPU_RECIPES = [name for name in list_config_groups()[RECIPES] if not name.startswith("quickstart")]
"""Recipes that need GPUs; the others train tiny models on a CPU."""
NO_FP8 = ("glm_4", "gpt_oss", "moonlight", "nvidia_nemotron_3", "qwen3_5")
"""Recipes in whose layouts some rank's part of a matrix is no multiple of FP8's blocks, which `--check` refuses."""
COMMANDS = [
    *((f"+exp={name}",) for name in GPU_RECIPES),
    *((f"+exp={name}", FP8) for name in GPU_RECIPES if not name.startswith(NO_FP8)),
]
"""The command line of every recipe, then of every recipe with precision=fp8, unless it chooses its own precision."""


def recipe_config(*command: str) -> Config:
    """The configuration of a recipe, whose model is the folder of its config.json in tests/data; nothing is checked
    against the model yet."""
    config = deepcopy(_compose(command))
    config.policy.model.path = str(config_folder(config.policy.model.path))
    return config


@cache
def _compose(command: tuple[str, ...]) -> Config:
    return compose_config(command)
