"""Settings of training that exclude each other on GPUs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.preflight.model_checks import find_training_problems
from tests.support.config_problems import SMALL


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


def offload(made: Config) -> None:
    made.policy.optimizer.cpu_offload = 0.5


def own_adam(made: Config) -> None:
    made.policy.optimizer.precision_aware = True


def adapters(made: Config) -> None:
    made.policy.lora.rank = 8


def fp8_weights(made: Config) -> None:
    made.policy.fp8.parameters = True


def split_heads(made: Config) -> None:
    made.policy.parallel.tensor = 2 * parse_model_shape(SMALL).key_value_heads


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (offload, "excludes policy.optimizer.cpu_offload"),
        (own_adam, "excludes policy.optimizer.precision_aware"),
        (adapters, "policy.lora.rank=8 trains adapters alone; use adamw"),
        (fp8_weights, "excludes policy.fp8.parameters"),
        (split_heads, "orthogonalizes queries, keys and values apart"),
    ],
)
def test_muon_names_what_it_does_not_go_with(change: Callable[[Config], None], text: str) -> None:
    made = Config()
    made.cluster.gpus_per_node = 8
    change(made)
    assert not list(find_training_problems(made, parse_model_shape(SMALL)))
    made.policy.optimizer.name = "muon"
    (problem,) = find_training_problems(made, parse_model_shape(SMALL))
    assert problem.subject == "policy.optimizer.name=muon"
    assert text in problem.text


def test_fields_of_muon_need_it() -> None:
    made = Config()
    made.policy.megatron_optimizer = {"muon_split_qkv": False}
    (problem,) = find_training_problems(made, None)
    assert problem.subject == "policy.megatron_optimizer.muon_split_qkv=False"
    made.policy.optimizer.name = "muon"
    assert not list(find_training_problems(made, None))
