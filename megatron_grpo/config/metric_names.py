"""Names of the metrics of a step, and the settings they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_grpo.config.keys import fill_placeholders, is_met, load_tables
from megatron_grpo.config.schema import Config

_METRICS: Any = load_tables("metrics.yaml")
TASK_METRICS = ("reward", "accuracy", "response_length")
"""Metrics that each of several environments has by itself, as task_NAME/TASK."""


def _list_conditions(config: Config) -> Iterator[tuple[object, str, str]]:
    """Yield (is the condition met, names of metrics, the condition in words)."""
    for switch, names in _METRICS["needs"].items():
        condition = fill_placeholders(config, switch)
        yield is_met(config, condition), names, f"it needs {condition}"
    for text, names in _METRICS["others"].items():
        yield False, names, text
    needs = "it needs engines, and debug.rollouts_from starts none"
    yield config.needs_generation, "refit_bytes refit_retries engine_restarts", needs
    needs = "it needs an environment that knows which responses are correct"
    yield config.has_correctness, "accuracy groups_all_wrong groups_mixed groups_all_right", needs
    options = config.training_loop.async_grpo
    oversamples = options.enabled and options.oversampling_factor is not None
    needs = "it needs async_grpo.enabled and async_grpo.oversampling_factor"
    yield oversamples, "oversampling_left_over oversampling_resumed", needs
    yield config.uses_reference, "kl_penalty", "it needs loss_fn.reference_policy_kl_penalty above 0"
    needs = "it needs a filter that training repeats: generation.top_p, generation.top_k or generation.min_p"
    yield config.generation.has_training_filter, "outside_filter_fraction", needs
    yield _can_lack_rewards(config), "reward_errors", "it needs env.NAME.on_reward_error=none"


def _can_lack_rewards(config: Config) -> bool:
    """True if a reward function may raise without failing its rollout."""
    return any(environment.on_reward_error == "none" for environment in config.env.values())


def list_possible_metrics(config: Config) -> dict[str, str]:
    """Map each metric to its condition in words, "" for none.

    Metrics of single reward functions and tasks are left out.
    """
    conditional = {name: needs for _, names, needs in _list_conditions(config) for name in names.split()}
    return dict.fromkeys(_METRICS["always"].split(), "") | conditional


def list_step_metrics(config: Config) -> set[str]:
    """List the metrics that steps of this run have."""
    conditional = {name for is_present, names, _ in _list_conditions(config) if is_present for name in names.split()}
    return {*_METRICS["always"].split(), *conditional, *_list_function_metrics(config), *_list_task_metrics(config)}


def list_optional_metrics(config: Config) -> set[str]:
    """List the metrics that a step of this run may lack."""
    function_metrics = _list_function_metrics(config)
    names = function_metrics | _list_task_metrics(config) | ({"reward_std"} if function_metrics else set())
    if _can_lack_rewards(config):
        names.add("reward_errors")
    if config.has_correctness:
        names |= {"accuracy", "groups_all_wrong", "groups_mixed", "groups_all_right"}
    if config.loss_fn.positive_example_nll_weight > 0:
        names.add("positive_nll")
    return names


def _list_function_metrics(config: Config) -> set[str]:
    functions = {name for environment in config.env.values() for name in environment.function_weights}
    return {f"{metric}/{function}" for metric in ("reward", "reward_std") for function in functions}


def _list_task_metrics(config: Config) -> set[str]:
    tasks = config.env if len(config.env) > 1 else ()
    return {f"task_{metric}/{task}" for metric in TASK_METRICS for task in tasks}
