"""Our calls into Megatron-Core fit its installed version; `make cuda-check` does the same for all libraries."""

from __future__ import annotations

import pkgutil
from typing import Any

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_grpo import models, planning, trainer
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families import parse_model_shape
from megatron_grpo.models.weight_layouts import split_policy
from tests.cuda import contracts
from tests.support.hf_configs import QWEN3_MOE


def test_calls_and_overridden_methods_fit_the_installed_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts, "LIBRARIES", ("megatron",))
    monkeypatch.setattr(contracts, "NCCL", "(none)")
    findings = contracts.Findings()
    for package in (models, planning, trainer):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            contracts.check_module(module.name, findings)
    assert findings.problems == []
    assert findings.checked > 60


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2, "expert": 2},
        {"tensor": 2, "expert": 4, "data": 2},
        {"tensor": 2, "expert": 2, "expert_tensor": 2, "data": 2},
        {"tensor": 4, "expert": 2, "expert_tensor": 2},
        {"context": 2, "expert": 2, "data": 2, "pipeline": 2},
        {"data": 4, "expert": 2, "pipeline": 2},
    ],
    ids=str,
)
def test_ranks_hold_the_parts_that_megatron_core_gives_them(sizes: dict[str, int]) -> None:
    layout, shape = ParallelConfig(sequence=True, **sizes), parse_model_shape(QWEN3_MOE)
    assert shape.experts is not None
    stages: dict[str, Any] = {"pp": layout.pipeline, "order": "tp-cp-ep-dp-pp"}
    dense = RankGenerator(tp=layout.tensor, ep=1, cp=layout.context, dp=layout.data, **stages)
    replicas = layout.world_size // (layout.pipeline * layout.expert * layout.expert_tensor)
    sparse = RankGenerator(tp=layout.expert_tensor, ep=layout.expert, cp=1, dp=replicas, **stages)

    def find_index(ranks: RankGenerator, axis: str, rank: int) -> int:
        return next(group.index(rank) for group in ranks.get_ranks(axis) if rank in group)

    per_rank = shape.experts.count // layout.expert
    for rank, shard in enumerate(split_policy(layout, shape)):
        assert shard.tensor.index == find_index(dense, "tp", rank)
        assert shard.expert_tensor.index == find_index(sparse, "tp", rank)
        assert shard.experts[0] == per_rank * find_index(sparse, "ep", rank)
        assert shard.has_embedding == (find_index(dense, "pp", rank) == 0)
