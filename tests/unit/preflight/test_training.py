"""Settings of training that exclude each other on GPUs."""

from __future__ import annotations

from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.model_checks import find_training_problems


def test_a_loss_without_a_deterministic_form_on_gpus_is_refused() -> None:
    made = Config()
    made.cluster.gpus_per_node = 8
    made.policy.deterministic = True
    assert list(find_training_problems(made, None)) == []
    made.loss_fn.kl_score_function_gradient = True
    (problem,) = find_training_problems(made, None)
    assert problem.subject == "policy.deterministic=True"
    assert problem.text.startswith("excludes loss_fn.kl_score_function_gradient")
    made.cluster.gpus_per_node = 0
    assert list(find_training_problems(made, None)) == []
