"""Whether programs that the model writes can be kept apart here as far as the configuration requires."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.data_schema import EnvironmentConfig
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.environments.sandbox.opening import open_sandbox
from megatron_grpo.environments.sandbox.sandbox import SandboxUnavailableError


def sandbox_problems(config: Config) -> Iterator[Problem]:
    """Run a trial program, if any environment runs programs, and the environments are on this machine."""
    if config.cluster.ray_address is not None or not any(map(_runs_programs, config.env.values())):
        return
    try:
        open_sandbox(config.sandbox)
    except SandboxUnavailableError as error:
        subject = f"sandbox.required={config.sandbox.required}"
        yield Problem(subject, str(error).removeprefix(subject).strip())


def _runs_programs(environment: EnvironmentConfig) -> bool:
    tools = environment.options.get("tools")
    return environment.type == "code" or (environment.type == "tools" and isinstance(tools, list) and "python" in tools)
