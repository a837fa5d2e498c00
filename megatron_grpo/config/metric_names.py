"""Names of the metrics of a step, and the settings that each of them needs."""

from __future__ import annotations

from collections.abc import Callable

from megatron_grpo.config.schema import Config

_ALWAYS = """
    reward reward_std unscored_rate failed_rollouts response_length response_length_p50 response_length_p90
    response_length_p99 response_length_max truncation_rate natural_termination_rate loss grad_norm learning_rate
    optimizer_steps valid_tokens probs_ratio probs_ratio_clamped probs_ratio_min probs_ratio_max clip_fraction_low
    clip_fraction_high clip_fraction_dual token_mult_prob_error token_mult_prob_error_max sampling_importance_ratio
    gen_kl_error policy_kl_error js_divergence_error effective_sample_size approx_entropy weight_version
"""

TASK_METRICS = ("reward", "accuracy", "response_length")
"""Metrics of single environments, when there are several: task_NAME/TASK."""

_Condition = tuple[str, Callable[[Config], bool], str]
"""Names of metrics, whether a run has them, and what they need in words."""

_SOMETIMES: tuple[_Condition, ...] = (
    (
        "refit_bytes refit_retries engine_restarts",
        lambda config: config.generates,
        "it needs engines, and debug.rollouts_from starts none",
    ),
    (
        "accuracy groups_all_wrong groups_mixed groups_all_right",
        lambda config: config.knows_correctness,
        "it needs an environment that knows which responses are correct",
    ),
    (
        "groups_without_signal",
        lambda config: config.loop.num_generations_per_prompt > 1,
        "it needs num_generations_per_prompt above 1",
    ),
    (
        "filtered_reward dynamic_sampling_gen_batches dynamic_sampling_groups_without_signal "
        "dynamic_sampling_groups_sliced",
        lambda config: config.loop.use_dynamic_sampling,
        "it needs use_dynamic_sampling",
    ),
    (
        "trajectory_age trajectory_age_max trajectory_versions trajectory_versions_max buffer_depth buffer_in_flight "
        "exposed_generation_s",
        lambda config: config.loop.async_grpo.enabled,
        "it needs async_grpo.enabled",
    ),
    (
        "oversampling_left_over oversampling_resumed",
        lambda config: config.loop.async_grpo.enabled and config.loop.async_grpo.oversampling_factor is not None,
        "it needs async_grpo.enabled and async_grpo.oversampling_factor",
    ),
    ("kl_penalty", lambda config: config.uses_reference, "it needs loss_fn.reference_policy_kl_penalty above 0"),
    (
        "is_oob_ratio",
        lambda config: config.loss_fn.truncated_importance_sampling_type is not None,
        "it needs loss_fn.truncated_importance_sampling_type",
    ),
    (
        "max_seq_mult_prob_error num_masked_seqs",
        lambda config: config.loop.seq_logprob_error_threshold is not None,
        "it needs seq_logprob_error_threshold",
    ),
    ("entropy", lambda config: config.loss_fn.entropy_coef > 0, "it needs loss_fn.entropy_coef above 0"),
    (
        "positive_nll positive_share",
        lambda config: config.loss_fn.positive_example_nll_weight > 0,
        "it needs loss_fn.positive_example_nll_weight above 0",
    ),
    (
        "value_loss value_grad_norm value_learning_rate value_mean return_mean explained_variance value_clip_fraction",
        lambda config: config.algorithm == "ppo",
        "it needs algorithm=ppo",
    ),
    (
        "moe_load_highest moe_load_lowest moe_aux_loss moe_z_loss",
        lambda config: False,
        "it needs a mixture-of-experts model",
    ),
    (
        "value_moe_load_highest value_moe_load_lowest value_moe_aux_loss value_moe_z_loss",
        lambda config: False,
        "it needs algorithm=ppo and a mixture-of-experts model",
    ),
    (
        "moe_routing_agreement",
        lambda config: config.policy.moe.replay_routing,
        "it needs policy.moe.replay_routing",
    ),
    (
        "reward_errors",
        lambda config: any(one.on_reward_error == "none" for one in config.env.values()),
        "it needs env.NAME.on_reward_error=none",
    ),
    ("kl", lambda config: False, "it is reported as kl_penalty, and under this name for those who know TRL"),
    ("completion_length", lambda config: False, "it is reported as response_length too, which ranks"),
)

ALL_STEP_METRICS: dict[str, str] = dict.fromkeys(_ALWAYS.split(), "") | {
    name: needs for names, _, needs in _SOMETIMES for name in names.split()
}
"""Every metric of a step except those of single reward functions and tasks, with what it needs in words."""


def step_metrics(config: Config) -> set[str]:
    """Metrics that all or some steps of this run have."""
    names = set(_ALWAYS.split())
    for some, has_them, _ in _SOMETIMES:
        if has_them(config):
            names |= set(some.split())
    return names | _of_functions(config) | _of_tasks(config)


def sometimes_absent(config: Config) -> set[str]:
    """Metrics that a step of this run may lack, because it had nothing to compute them from."""
    functions = _of_functions(config)
    names = functions | _of_tasks(config) | ({"reward_std"} if functions else set())
    if any(one.on_reward_error == "none" for one in config.env.values()):
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
