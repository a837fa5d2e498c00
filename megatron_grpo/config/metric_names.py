"""Names of the metrics of a step, and the settings they need."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.algorithms import ALGORITHMS
from megatron_grpo.config.data_schema import LABELLED
from megatron_grpo.config.loop_schema import SampledLoopConfig
from megatron_grpo.config.schema import Config

# Metrics of runs that sample, and of runs that learn from rows, beside those of the algorithm.
_ALWAYS = (
    "reward reward_std unscored_rate failed_rollouts response_length response_length_p50 response_length_p90 "
    "response_length_p99 response_length_max truncation_rate natural_termination_rate loss grad_norm learning_rate "
    "optimizer_steps valid_tokens probs_ratio probs_ratio_clamped probs_ratio_min probs_ratio_max clip_fraction_low "
    "clip_fraction_high clip_fraction_dual token_mult_prob_error token_mult_prob_error_max sampling_importance_ratio "
    "gen_kl_error policy_kl_error js_divergence_error effective_sample_size approx_entropy weight_version"
)
_SUPERVISED = "loss grad_norm learning_rate optimizer_steps valid_tokens sequence_length"
_OF_CORRECTNESS, _OF_ERRORS = "accuracy groups_all_wrong groups_mixed groups_all_right", "reward_errors"
# Metrics that cannot rank checkpoints, by the reason: they depend on the model, or repeat another metric.
_UNRANKED = {
    "it needs a mixture-of-experts model": "moe_load_highest moe_load_lowest moe_aux_loss moe_z_loss",
    "it needs algorithm=ppo and a mixture-of-experts model": (
        "value_moe_load_highest value_moe_load_lowest value_moe_aux_loss value_moe_z_loss"
    ),
    "it is a sign of undeserved rewards, and no aim": "suspects_left_out",
    "it is a sign that samples are copies, and no aim": "repeated_samples",
    "it counts failures of environments, and is no aim": "scoring_retries faulty_responses",
    "it is a sign that training and generation disagree, and no aim": (
        "token_mult_prob_error_bound token_mult_prob_error_off gen_kl_error_bound"
    ),
    "it is reported as kl_penalty, and as in TRL under this name too": "kl",
    "it is reported as response_length too, which ranks": "completion_length",
}
# Metrics that each of several environments has by itself, as task_NAME/TASK.
TASK_METRICS = ("reward", "accuracy", "response_length")


def _list_conditions(config: Config) -> Iterator[tuple[bool, str, str]]:
    """Yield (is the condition met, names of metrics, the condition in words)."""
    for algorithm in ALGORITHMS.values():
        yield algorithm is config.method, " ".join(algorithm.metrics), f"algorithm={algorithm.name}"
    needs = "algorithm=distillation or self_distillation, and loss_fn.policy_loss_weight above 0"
    follows_teacher = bool(config.named_teachers) or config.teaches_itself
    yield follows_teacher and config.uses_rewards, "policy_loss", needs
    loop, loss, name = config.loop, config.loss_fn, config.loop_name
    yield loop.num_generations_per_prompt > 1, "groups_without_signal", f"{name}.num_generations_per_prompt above 1"
    if isinstance(loop, SampledLoopConfig):
        yield from _list_of_sampling(loop, name)
    needs = "loss_fn.truncated_importance_sampling_type or loss_fn.corrections"
    yield bool(loss.chosen_corrections), "is_oob_ratio", needs
    yield loss.entropy_coef > 0, "entropy", "loss_fn.entropy_coef above 0"
    needs = "loss_fn.positive_example_nll_weight above 0"
    yield loss.positive_example_nll_weight > 0, "positive_nll positive_share", needs
    yield config.imitates_environment, "environment_nll", "loss_fn.environment_nll_weight above 0"
    yield config.policy.moe.replay_routing, "moe_routing_agreement", "policy.moe.replay_routing=true"
    needs = "engines, and debug.rollouts_from starts none"
    yield config.needs_generation, "refit_bytes refit_retries engine_restarts", needs
    yield config.has_correctness, _OF_CORRECTNESS, "an environment that knows which responses are correct"
    yield config.uses_reference, "kl_penalty", "loss_fn.reference_policy_kl_penalty above 0"
    needs = "a filter that training repeats: generation.top_p, generation.top_k or generation.min_p"
    yield config.generation.has_training_filter, "outside_filter_fraction", needs
    yield can_lack_rewards(config), _OF_ERRORS, "env.NAME.on_reward_error=none"


def _list_of_sampling(loop: SampledLoopConfig, name: str) -> Iterator[tuple[bool, str, str]]:
    names = "filtered_reward dynamic_sampling_gen_batches dynamic_sampling_groups_without_signal"
    names += " dynamic_sampling_groups_sliced"
    yield loop.use_dynamic_sampling, names, f"{name}.use_dynamic_sampling=true"
    names = "trajectory_age trajectory_age_max trajectory_versions trajectory_versions_max buffer_depth"
    names += " buffer_in_flight exposed_generation_s"
    asynchrony = loop.async_grpo
    yield asynchrony.enabled, names, f"{name}.async_grpo.enabled=true"
    is_oversampled = asynchrony.enabled and asynchrony.oversampling_factor is not None
    needs = f"{name}.async_grpo.enabled=true and {name}.async_grpo.oversampling_factor"
    yield is_oversampled, "oversampling_left_over oversampling_resumed", needs
    names, needs = "max_seq_mult_prob_error num_masked_seqs", f"{name}.seq_logprob_error_threshold"
    yield loop.seq_logprob_error_threshold is not None, names, needs


def list_possible_metrics(config: Config) -> dict[str, str]:
    """Map each metric to its condition in words, "" for none.

    Metrics of single reward functions and tasks are left out.
    """
    conditional = {name: f"it needs {needs}" for _, names, needs in _list_conditions(config) for name in names.split()}
    unranked = {name: reason for reason, names in _UNRANKED.items() for name in names.split()}
    return dict.fromkeys(_ALWAYS.split(), "") | conditional | unranked


def list_step_metrics(config: Config) -> set[str]:
    """List the metrics that steps of this run have."""
    if config.method.rows:
        return {*_SUPERVISED.split(), *config.method.metrics}
    conditional = {name for is_present, names, _ in _list_conditions(config) if is_present for name in names.split()}
    return {*_ALWAYS.split(), *config.method.metrics, *conditional, *_list_own_metrics(config)}


def list_optional_metrics(config: Config) -> set[str]:
    """List the metrics that a step of this run may lack."""
    # A step may have no prompt of a task, and no response that a function scored.
    names = _list_own_metrics(config)
    if any(environment.reward_funcs for environment in config.env.values()):
        names.add("reward_std")
    if config.has_correctness:
        names.update(_OF_CORRECTNESS.split())
    if can_lack_rewards(config):
        names.update(_OF_ERRORS.split())
    if config.loss_fn.positive_example_nll_weight > 0:
        names.add("positive_nll")
    if config.demonstration_config is not None:
        names.add("demonstration_nll")  # absent in a step that gives experts no weight
    if config.row_kind == LABELLED:
        names.update(("rewards_chosen_mean", "rewards_rejected_mean"))
    return names


def can_lack_rewards(config: Config) -> bool:
    """True if a reward function may raise without failing its rollout."""
    return any(task.on_reward_error == "none" for task in config.env.values())


def _list_own_metrics(config: Config) -> set[str]:
    """List the metrics of single reward functions and of tasks."""
    functions = {name for environment in config.env.values() for name in environment.function_weights}
    tasks = config.env if len(config.env) > 1 else ()
    return {
        *(f"{metric}/{function}" for metric in ("reward", "reward_std") for function in functions),
        *(f"task_{metric}/{task}" for metric in TASK_METRICS for task in tasks),
    }
