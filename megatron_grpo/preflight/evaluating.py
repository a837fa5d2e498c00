"""Checks of a configuration that a model is evaluated under: those of a run that do not concern what is trained."""

from __future__ import annotations

from megatron_grpo.cluster.gpus import find_gpus
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.data.specs import spec_problems
from megatron_grpo.models.source import known_shape
from megatron_grpo.preflight.checks.prompts import scorer_problems, system_prompt_problems
from megatron_grpo.preflight.checks.rewards import environment_problems
from megatron_grpo.preflight.checks.sampling import request_problems
from megatron_grpo.preflight.checks.servers import server_problems
from megatron_grpo.preflight.engine import engine_problems
from megatron_grpo.preflight.layout import engine_layout_problems
from megatron_grpo.preflight.lengths import sequence_problems
from megatron_grpo.preflight.machine import cluster_problems
from megatron_grpo.preflight.sandbox import sandbox_problems
from megatron_grpo.preflight.vllm_fields import vllm_argument_problems


def evaluation_problems(config: Config) -> list[Problem]:
    """What keeps engines from answering prompts here, or environments from scoring them.

    Args:
        config: a configuration whose values are all of their types and in their ranges.
    """
    find_gpus(config.cluster)
    shape = known_shape(config)
    problems = [
        *engine_layout_problems(config, shape),
        *sequence_problems(config, shape),
        *scorer_problems(config),
        *system_prompt_problems(config.data),
        *request_problems(config.generation),
        *server_problems(config),
        *environment_problems(config),
        *engine_problems(config),
        *vllm_argument_problems(config),
        *spec_problems(config.data),
    ]
    return problems or [*cluster_problems(config), *sandbox_problems(config)]
