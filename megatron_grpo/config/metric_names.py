"""Names of the metrics of a step, and the settings they need."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.config.keys import fill_placeholders, is_met, load_tables
from megatron_grpo.config.schema import Config

_METRICS: Any = load_tables("metrics.yaml")
# Metrics that each of several environments has by itself, as task_NAME/TASK.
TASK_METRICS = ("reward", "accuracy", "response_length")


def _list_conditions(config: Config) -> Iterator[tuple[bool, str, str]]:
    """Yield (is the condition met, names of metrics, the condition in words)."""
    for algorithm in ALGORITHMS.values():
        yield algorithm is config.method, " ".join(algorithm.metrics), f"it needs algorithm={algorithm.name}"
    needs = "it needs algorithm=distillation and loss_fn.policy_loss_weight above 0"
    yield bool(config.named_teachers) and config.uses_rewards, "policy_loss", needs
    for switch, names in _METRICS["needs"].items():
        yield is_met(config, switch), names, f"it needs {fill_placeholders(config, switch)}"
    for name, row in _METRICS["properties"].items():
        yield attrgetter(name)(config), row["names"], row["needs"]
    for text, names in _METRICS["others"].items():
        yield False, names, text


def list_possible_metrics(config: Config) -> dict[str, str]:
    """Map each metric to its condition in words, "" for none.

    Metrics of single reward functions and tasks are left out.
    """
    conditional = {name: needs for _, names, needs in _list_conditions(config) for name in names.split()}
    return dict.fromkeys(_METRICS["always"].split(), "") | conditional


def list_step_metrics(config: Config) -> set[str]:
    """List the metrics that steps of this run have."""
    if config.method.rows:
        return {*_METRICS["supervised"].split(), *config.method.metrics}
    conditional = {name for is_present, names, _ in _list_conditions(config) if is_present for name in names.split()}
    return {*_METRICS["always"].split(), *config.method.metrics, *conditional, *_list_own_metrics(config)}


def list_optional_metrics(config: Config) -> set[str]:
    """List the metrics that a step of this run may lack."""
    # A step may have no prompt of a task, and no response that a function scored.
    names = _list_own_metrics(config)
    if any(environment.reward_funcs for environment in config.env.values()):
        names.add("reward_std")
    for name in ("has_correctness", "can_lack_rewards"):
        if getattr(config, name):
            names.update(_METRICS["properties"][name]["names"].split())
    if config.loss_fn.positive_example_nll_weight > 0:
        names.add("positive_nll")
    return names


def _list_own_metrics(config: Config) -> set[str]:
    """List the metrics of single reward functions and of tasks."""
    functions = {name for environment in config.env.values() for name in environment.function_weights}
    tasks = config.env if len(config.env) > 1 else ()
    return {
        *(f"{metric}/{function}" for metric in ("reward", "reward_std") for function in functions),
        *(f"task_{metric}/{task}" for metric in TASK_METRICS for task in tasks),
    }
