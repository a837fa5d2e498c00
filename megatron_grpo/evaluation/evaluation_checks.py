"""Checks of the configuration and the machine for sampling and scoring alone."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.cluster.machines import fill_in_address, fill_in_gpus
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.passthrough import check_owned_fields, select_passed_fields
from megatron_grpo.config.schema import Config
from megatron_grpo.config.secret_values import find_secret_problems
from megatron_grpo.data.specs import find_spec_problems
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.source import find_model_shape
from megatron_grpo.preflight import machine_checks as machine
from megatron_grpo.preflight.engine_checks import check_sequences, find_engine_problems
from megatron_grpo.preflight.layout_checks import (
    check_devices,
    check_engines,
    count_engine_gpus,
    count_reward_model_gpus,
)
from megatron_grpo.preflight.model_file_checks import explain_unusable_model
from megatron_grpo.preflight.reward_checks import check_environments, check_system_prompts
from megatron_grpo.preflight.rules import Rule, evaluate_rules
from megatron_grpo.preflight.sampling_checks import check_requests, check_servers


def find_evaluation_problems(config: Config) -> list[Problem]:
    """Check the configuration and the machine for sampling and scoring alone."""
    fill_in_address(config.cluster)
    fill_in_gpus(config.cluster)
    shape = find_model_shape(config)
    arguments = {key: values for key, values in select_passed_fields(config).items() if key.startswith("generation.")}
    path, has_score = config.policy.model.path, config.trains_reward_model
    problems = [
        *find_secret_problems(config),
        *explain_unusable_model(f"policy.model.path={path}", path, has_score=has_score),
        *_find_config_problems(config, shape),
        *find_engine_problems(config, shape),
        *check_owned_fields(arguments),
        *find_spec_problems(config.data),
    ]
    return problems or [
        *(list(machine.find_gpu_problems(config)) or machine.find_cluster_problems(config)),
        *machine.find_sandbox_problems(config),
        *machine.find_library_problems(arguments),
    ]


@evaluate_rules
def _find_config_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    yield from check_devices(config, count_engine_gpus(config) | count_reward_model_gpus(config), ())
    if shape is not None:
        yield from check_engines(config, shape)
    yield from check_sequences(config, shape)
    yield from check_system_prompts(config)
    yield from check_requests(config)
    yield from check_servers(config)
    yield from check_environments(config)
