"""All checks of a configuration that read neither files nor the machine."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.passthrough import check_owned_fields, select_passed_fields
from megatron_grpo.config.schema import Config
from megatron_grpo.config.secret_values import find_secret_problems
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.preflight import distillation_checks as distillation
from megatron_grpo.preflight import engine_checks as engines
from megatron_grpo.preflight import layout_checks as layouts
from megatron_grpo.preflight import loop_checks as loop
from megatron_grpo.preflight import model_checks as models
from megatron_grpo.preflight import reward_checks as rewards
from megatron_grpo.preflight import sampling_checks as sampling
from megatron_grpo.preflight.image_checks import find_image_problems
from megatron_grpo.preflight.loss_checks import check_loss
from megatron_grpo.preflight.mixture_checks import check_mixture
from megatron_grpo.preflight.rules import Rule, evaluate_rules


def find_problems(config: Config, shape: ModelShape | None) -> list[Problem]:
    """Check a configuration by itself and against its model (None: unknown).

    Values are of their types and in their ranges; addresses and GPUs of the machines are settled.
    """
    secrets = list(find_secret_problems(config))
    problems = [
        *layouts.find_layout_problems(config, shape),
        *distillation.find_distillation_problems(config, shape),
        *engines.find_length_problems(config, shape),
        *models.find_adapter_problems(config, shape),
        *models.find_fp8_problems(config, shape),
        *models.find_quantization_problems(config, shape),
        *find_image_problems(config, shape),
        *find_config_problems(config),
        *models.find_training_problems(config, shape),
        *check_owned_fields(select_passed_fields(config)),
        *engines.find_engine_problems(config, shape),
        *engines.find_refit_problems(config, shape),
        *engines.find_placement_problems(config),
    ]
    secret_keys = {problem.key for problem in secrets}  # whose other problems are of the same text
    return [*secrets, *(problem for problem in problems if problem.key not in secret_keys)]


@evaluate_rules
def find_config_problems(config: Config) -> Iterator[Rule]:
    """Check settings against each other."""
    yield from rewards.check_prompts(config)
    yield from sampling.check_requests(config)
    yield from sampling.check_filters(config)
    yield from sampling.check_servers(config)
    yield from loop.check_loop(config)
    yield from loop.check_oversampling(config)
    yield from rewards.check_rewards(config)
    yield from check_loss(config)
    yield from check_mixture(config)
    yield from loop.check_read_keys(config)
    yield from loop.check_algorithm(config)
    yield from loop.check_debug_modes(config)
