"""Names of the metrics of a step, and the settings that each of them needs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.schema import Config

_ALWAYS = """
    reward reward_std unscored_rate failed_rollouts response_length response_length_p50 response_length_p90
    response_length_p99 response_length_max truncation_rate natural_termination_rate loss grad_norm learning_rate
    optimizer_steps valid_tokens probs_ratio probs_ratio_clamped probs_ratio_min probs_ratio_max clip_fraction_low
    clip_fraction_high clip_fraction_dual token_mult_prob_error token_mult_prob_error_max sampling_importance_ratio
    gen_kl_error policy_kl_error js_divergence_error effective_sample_size approx_entropy weight_version
"""

TASK_METRICS = ("reward", "accuracy", "response_length")
"""Metrics that each of several environments has by itself, under the name task_NAME/TASK."""


def _sometimes(config: Config) -> Iterator[tuple[bool, str, str]]:
    """Rows of metrics that not every run has: whether this run does, their names, and what they need, in words."""
    loop, loss = config.loop, config.loss_fn
    needs = "it needs engines, and debug.rollouts_from starts none"
    yield config.generates, "refit_bytes refit_retries engine_restarts", needs
    needs = "it needs an environment that knows which responses are correct"
    yield config.knows_correctness, "accuracy groups_all_wrong groups_mixed groups_all_right", needs
    yield loop.num_generations_per_prompt > 1, "groups_without_signal", "it needs num_generations_per_prompt above 1"
    names = (
        "filtered_reward dynamic_sampling_gen_batches dynamic_sampling_groups_without_signal "
        "dynamic_sampling_groups_sliced"
    )
    yield loop.use_dynamic_sampling, names, "it needs use_dynamic_sampling"
    names = (
        "trajectory_age trajectory_age_max trajectory_versions trajectory_versions_max buffer_depth buffer_in_flight "
        "exposed_generation_s"
    )
    yield loop.async_grpo.enabled, names, "it needs async_grpo.enabled"
    oversamples = loop.async_grpo.enabled and loop.async_grpo.oversampling_factor is not None
    needs = "it needs async_grpo.enabled and async_grpo.oversampling_factor"
    yield oversamples, "oversampling_left_over oversampling_resumed", needs
    yield config.uses_reference, "kl_penalty", "it needs loss_fn.reference_policy_kl_penalty above 0"
    truncates = loss.truncated_importance_sampling_type is not None
    yield truncates, "is_oob_ratio", "it needs loss_fn.truncated_importance_sampling_type"
    drops = loop.seq_logprob_error_threshold is not None
    yield drops, "max_seq_mult_prob_error num_masked_seqs", "it needs seq_logprob_error_threshold"
    yield loss.entropy_coef > 0, "entropy", "it needs loss_fn.entropy_coef above 0"
    imitates = loss.positive_example_nll_weight > 0
    yield imitates, "positive_nll positive_share", "it needs loss_fn.positive_example_nll_weight above 0"
    names = "value_loss value_grad_norm value_learning_rate value_mean return_mean explained_variance"
    yield config.algorithm == "ppo", f"{names} value_clip_fraction", "it needs algorithm=ppo"
    names = "moe_load_highest moe_load_lowest moe_aux_loss moe_z_loss"
    yield False, names, "it needs a mixture-of-experts model"
    names = "value_moe_load_highest value_moe_load_lowest value_moe_aux_loss value_moe_z_loss"
    yield False, names, "it needs algorithm=ppo and a mixture-of-experts model"
    yield config.policy.moe.replay_routing, "moe_routing_agreement", "it needs policy.moe.replay_routing"
    yield _forgives(config), "reward_errors", "it needs env.NAME.on_reward_error=none"
    yield False, "kl", "it is reported as kl_penalty, and under this name for those who know TRL"
    yield False, "completion_length", "it is reported as response_length too, which ranks"


def _forgives(config: Config) -> bool:
    """Whether a reward function may raise, and its reward is then missing."""
    return any(one.on_reward_error == "none" for one in config.env.values())


ALL_STEP_METRICS: dict[str, str] = dict.fromkeys(_ALWAYS.split(), "") | {
    name: needs for _, names, needs in _sometimes(Config()) for name in names.split()
}
"""Every metric of a step except those of single reward functions and tasks, with what it needs in words."""


def step_metrics(config: Config) -> set[str]:
    """Metrics that all or some steps of this run have."""
    some = {name for has_them, names, _ in _sometimes(config) if has_them for name in names.split()}
    return {*_ALWAYS.split(), *some, *_of_functions(config), *_of_tasks(config)}


def sometimes_absent(config: Config) -> set[str]:
    """Metrics that a step of this run may lack, because it had nothing to compute them from."""
    functions = _of_functions(config)
    names = functions | _of_tasks(config) | ({"reward_std"} if functions else set())
    if _forgives(config):
        names.add("reward_errors")
    if config.knows_correctness:
        names |= {"accuracy", "groups_all_wrong", "groups_mixed", "groups_all_right"}
    if config.loss_fn.positive_example_nll_weight > 0:
        names.add("positive_nll")
    return names


def _of_functions(config: Config) -> set[str]:
    functions = {name for environment in config.env.values() for name in environment.weights_by_function()}
    return {f"{metric}/{function}" for metric in ("reward", "reward_std") for function in functions}


def _of_tasks(config: Config) -> set[str]:
    tasks = config.env if len(config.env) > 1 else ()
    return {f"task_{metric}/{task}" for metric in TASK_METRICS for task in tasks}
