"""Layouts of vLLM engines against the experts of a model."""

from __future__ import annotations

import pytest

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.models.source import PREPARED_MODELS
from megatron_grpo.preflight.layout_checks import find_layout_problems
from megatron_grpo.preflight.load import compose_config


def problems(tensor: int, expert: int, **sizes: int) -> dict[str, str]:
    """Of an engine with this layout and a model with 4 experts, each 128 wide, or other sizes."""
    config = compose_config(["+exp=quickstart_moe"])
    config.generation.parallel = GenerationParallelConfig(tensor=tensor, expert=expert)
    config.policy.parallel.expert = 1  # an odd number of experts is no concern of this test there
    shape = parse_model_shape({**PREPARED_MODELS["addition_moe"], **sizes})
    return {problem.subject: problem.text for problem in find_layout_problems(config, shape)}


@pytest.mark.parametrize(
    ("tensor", "expert", "sizes", "key", "text"),
    [
        (1, 2, {}, "expert=2", "over all ranks of generation.parallel.tensor=1 or over none; use 1, or a larger"),
        (4, 2, {}, "expert=2", "over all ranks of generation.parallel.tensor=4 or over none; use 1 or 4"),
        (2, 2, {"num_experts": 5}, "expert=2", "does not divide the model's 5 experts; use 1"),
        (2, 1, {"moe_intermediate_size": 63}, "tensor=2", "an expert's width of 63; use generation.parallel.expert=2"),
    ],
)
def test_what_does_not_fit(tensor: int, expert: int, sizes: dict[str, int], key: str, text: str) -> None:
    found = problems(tensor, expert, **sizes)
    assert list(found) == [f"generation.parallel.{key}"]
    assert text in found[f"generation.parallel.{key}"]


def test_experts_are_shared_or_their_matrices_split() -> None:
    assert problems(tensor=2, expert=1) == problems(tensor=2, expert=2) == problems(tensor=4, expert=4) == {}
    assert problems(tensor=2, expert=2, moe_intermediate_size=63) == {}, "ranks have whole experts"
