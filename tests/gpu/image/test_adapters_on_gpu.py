"""Refits that send adapters alone through the memory of one GPU.

vLLM's CPU build has no slots for adapters of experts, so these are tested here only.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from megatron_grpo.config.schema import LoraConfig, ParallelConfig
from tests.integration.test_adapter_refit import Case, check_adapters, ray_cluster, start_pair

__all__ = ["ray_cluster"]  # a fixture of every test here


def mixture(**sizes: Any) -> Qwen3MoeConfig:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return Qwen3MoeConfig(**sizes, **experts)


DENSE = Case(ParallelConfig(), {"colocated": True}, precision="bfloat16", tolerance=0.1)
MIXTURE = replace(DENSE, lora=LoraConfig(rank=8, alpha=16.0), family=mixture)


@pytest.mark.parametrize("case", [DENSE, MIXTURE], ids=["dense", "experts"])
def test_an_engine_adds_what_the_adapters_of_the_policy_add(case: Case, tmp_path: Path) -> None:
    with start_pair(case, tmp_path) as pair:
        check_adapters(pair, case, tmp_path)
