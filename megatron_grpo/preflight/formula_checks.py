"""Checks of the user's own objective, advantages and decay: they are imported and tried on small steps."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem, RunError
from megatron_grpo.config.formulas import ADVANTAGES, OBJECTIVES
from megatron_grpo.config.keys import list_changes
from megatron_grpo.config.schema import Config, GRPOConfig, OptimizerConfig
from megatron_grpo.config.started_values import list_code_folders
from megatron_grpo.losses.named_formula import NamedFormula


def find_formula_problems(config: Config) -> Iterator[Problem]:
    """Find problems of the user's functions; without any, nothing is imported."""
    loop = config.loop
    if not config.debug.train:
        return
    yield from _find_decay_problems("policy", config.policy.optimizer, config.decay_steps, config)
    if config.value_model is not None:
        yield from _find_decay_problems("value", config.value.optimizer, config.value_decay_steps, config)
    if config.method.rows or not config.uses_rewards:
        return
    if config.loss_fn.objective_entry is None:
        yield from _find_objective_problems(config)
    if isinstance(loop, GRPOConfig) and loop.adv_estimator.entry is None:
        yield from _find_estimator_problems(config, loop)


def find_formula_remarks(config: Config) -> Iterator[Problem]:
    """Find functions of the user that work and may not do what is meant."""
    loss = config.loss_fn
    is_used = not config.method.rows and config.uses_rewards and config.debug.train
    if not is_used or loss.objective_entry is not None or not loss.use_importance_sampling_correction:
        return
    from megatron_grpo.losses.formula_trials import divides_by_sampling
    from megatron_grpo.losses.policy_loss import make_objective

    if divides_by_sampling(make_objective(loss, list_code_folders(config))):
        text = f"divides by the sampling probability, and so does loss_fn.objective={loss.objective} itself: each token"
        text += " is corrected twice. Set it to false, or take the ratio of the objective to old_logprobs"
        yield Problem("loss_fn.use_importance_sampling_correction=true", text)


def _find_objective_problems(config: Config) -> Iterator[Problem]:
    # Imported here, because torch takes long to import.
    from megatron_grpo.losses.formula_trials import find_objective_problem
    from megatron_grpo.losses.policy_loss import make_objective

    subject = f"loss_fn.objective={config.loss_fn.objective}"
    try:
        objective = make_objective(config.loss_fn, list_code_folders(config))
    except RunError as error:
        yield Problem(subject, str(error))
        return
    if reason := find_objective_problem(objective):
        yield Problem(subject, reason)
    keys = frozenset().union(*(entry.keys for entry in OBJECTIVES.values()))
    yield from _find_unread_keys(config, "loss_fn", keys, objective)


def _find_estimator_problems(config: Config, loop: GRPOConfig) -> Iterator[Problem]:
    from megatron_grpo.losses.advantages import make_estimator
    from megatron_grpo.losses.formula_trials import find_advantages_problem

    subject = f"grpo.adv_estimator.name={loop.adv_estimator.name}"
    try:
        estimator = make_estimator(loop, list_code_folders(config))
    except RunError as error:
        yield Problem(subject, str(error))
        return
    if reason := find_advantages_problem(estimator, loop.num_generations_per_prompt):
        yield Problem(subject, reason)
    keys = frozenset().union(*(entry.reads for entry in ADVANTAGES.values()))
    yield from _find_unread_keys(config, "grpo", keys, estimator)


def _find_decay_problems(section: str, optimizer: OptimizerConfig, steps: int, config: Config) -> Iterator[Problem]:
    from megatron_grpo.losses.decay import find_decay_problem, make_decay

    subject = f"{section}.optimizer.decay_style={optimizer.decay_style}"
    try:
        decay = make_decay(section, optimizer, list_code_folders(config))
    except RunError as error:
        yield Problem(subject, str(error))
        return
    if decay is not None and (reason := find_decay_problem(decay, steps, optimizer.count_warmup_steps(steps))):
        yield Problem(subject, reason)


def _find_unread_keys(config: Config, section: str, keys: frozenset[str], formula: NamedFormula) -> Iterator[Problem]:
    """Find changed keys that only other formulas read."""
    for key, value in list_changes(config, section):
        name = key.rpartition(".")[2]
        if name in keys - formula.arguments.keys():
            text = f"is no parameter of {formula.path}, so nothing reads it; leave it out, or take {name} there"
            yield Problem(f"{key}={value}", text)
