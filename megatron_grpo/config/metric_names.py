"""Names of metrics that the configuration alone decides about."""

from __future__ import annotations

from megatron_grpo.config.schema import Config


def sometimes_absent(config: Config) -> set[str]:
    """Metrics that some steps of this run have and others may not: nothing in such a step says what they are."""
    functions = {name for environment in config.env.values() for name in environment.weights_by_function()}
    names = {f"{metric}/{function}" for metric in ("reward", "reward_std") for function in functions}
    if functions:
        names.add("reward_std")
    if config.knows_correctness:
        names |= {"accuracy", "groups_all_wrong", "groups_mixed", "groups_all_right"}
    if config.loss_fn.positive_example_nll_weight > 0:
        names.add("positive_nll")
    return names
