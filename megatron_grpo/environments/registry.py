"""Environments by task name, each a pool of Ray actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from megatron_grpo.cluster.futures import gather
from megatron_grpo.cluster.heartbeat import phase
from megatron_grpo.cluster.process_log import begin_process_log
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.schema import EnvironmentConfig
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.environments.interface import EnvironmentInterface
from megatron_grpo.environments.reward_functions import RewardFunctionEnvironment, load_reward_function

Columns = tuple[tuple[Any, ...], ...]
"""Requests or returns as one tuple per field: many small objects pickle several times slower."""


class EnvironmentWorker:
    """One environment in a process of its own, as a Ray actor."""

    def __init__(self, name: str, config: EnvironmentConfig) -> None:
        begin_process_log(name)
        self._environment = create_environment(config)

    @phase("scoring")
    def step(self, columns: Columns) -> Columns:
        """(prompts, responses, stop reasons, extra_env_infos) -> (rewards, correct, parts)."""
        requests = [
            EnvironmentRequest(prompt=prompt, response=response, stop_reason=stop_reason, extra_env_info=info)
            for prompt, response, stop_reason, info in zip(*columns, strict=True)
        ]
        returns = self._environment.step(requests)
        return tuple(zip(*((one.reward, one.correct, one.parts) for one in returns), strict=True))


class EnvironmentPool:
    """The workers of one environment; they start in the background."""

    def __init__(self, name: str, config: EnvironmentConfig) -> None:
        """
        Args:
            name: task name, for messages.
            config: kind, workers and deadline. Ray must be running.
        """
        self.name = name
        self.config = config
        actor = ray.remote(num_cpus=0)(EnvironmentWorker)
        self._process = f"environment {name} worker {{}}".format
        self._workers = [actor.remote(self._process(index), config) for index in range(config.num_workers)]

    def step(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Scores in the order of the requests, which are split evenly over the workers.

        Raises:
            RunError: a worker died or raised, or timeout_s passed; says which worker and why.
        """
        share, larger = divmod(len(requests), len(self._workers))
        refs, start = [], 0
        for index, worker in enumerate(self._workers):
            end = start + share + (index < larger)
            if end > start:
                refs.append(worker.step.remote(_columns(requests[start:end])))
            start = end
        results = gather(
            refs,
            deadline_s=self.config.timeout_s,
            what=f"environment {self.name}",
            name="worker {}".format,
            process=self._process,
        )
        return [EnvironmentReturn(*one) for columns in results for one in zip(*columns, strict=True)]

    def shutdown(self) -> None:
        """End the workers; idempotent."""
        for worker in self._workers:
            ray.kill(worker)
        self._workers = []


def build_environments(config: Mapping[str, EnvironmentConfig]) -> dict[str, EnvironmentPool]:
    """A pool for each entry of the configuration's `env`, by task name."""
    return {name: EnvironmentPool(name, environment) for name, environment in config.items()}


def check_reward_functions(config: Mapping[str, EnvironmentConfig]) -> None:
    """Import every reward function here, before processes are started that would fail one by one.

    Raises:
        ConfigError: some cannot be imported, or not be called with prompts and completions.
    """
    problems = []
    for name, environment in config.items():
        for path in environment.reward_funcs:
            try:
                load_reward_function(path)
            except RunError as error:
                problems.append(Problem(f"env.{name}.reward_funcs={path}", str(error)))
    if problems:
        raise ConfigError(problems)


def create_environment(config: EnvironmentConfig) -> EnvironmentInterface:
    """The environment that `config.type` names; imports only what that one needs.

    Raises:
        ValueError: there is no such environment.
    """
    if config.type == "reward_functions":
        functions = {path.rpartition(".")[2]: load_reward_function(path) for path in config.reward_funcs}
        return RewardFunctionEnvironment(functions, config.weights_by_function(), config.correctness_function())
    if config.type == "addition":
        from megatron_grpo.environments.addition import AdditionEnvironment

        return AdditionEnvironment()
    if config.type == "math":
        from megatron_grpo.environments.math_environment import MathEnvironment

        return MathEnvironment()
    raise ValueError(f'no environment of type "{config.type}"')


def _columns(requests: list[EnvironmentRequest]) -> Columns:
    return (
        tuple(request.prompt for request in requests),
        tuple(request.response for request in requests),
        tuple(request.stop_reason for request in requests),
        tuple(request.extra_env_info for request in requests),
    )
