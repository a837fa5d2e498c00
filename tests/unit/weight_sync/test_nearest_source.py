"""Plans for engines beside the policy: what a rank has itself comes from nobody else."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.models.families import build_weight_map, parse_model_shape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.models.weight_map import index_tensors
from megatron_grpo.planning.refit_summary import summarize_refit
from megatron_grpo.weight_sync.pieces import find_ranges, read_ranges
from megatron_grpo.weight_sync.transfer_plan import plan_messages
from tests.support.engine_table import table_boxes
from tests.support.refit_models import DENSE


@pytest.mark.parametrize(
    ("training", "generation"), [({"data": 4}, {"tensor": 2, "data": 2}), ({"tensor": 2, "data": 2}, {"data": 4})]
)
def test_beside_each_other_nothing_comes_from_further_than_it_must(
    training: dict[str, int], generation: dict[str, int]
) -> None:
    """Rank n of the policy and rank n of the engines share a device: what it has is not sent by another."""
    shape = parse_model_shape(DENSE)
    sources = split_policy(ParallelConfig(**training), shape)
    engine = table_boxes(GenerationParallelConfig(**generation), shape)
    dtypes = ["float32"] * len(build_weight_map(shape))
    engines = generation["data"]
    plans = [plan_messages(shape, sources, engine, engines, dtypes, 2**21, devices_per_node=node) for node in (4, None)]
    near, far = (plan["source"] == plan["target"] for plan in plans)
    assert far.mean() < near.mean() or "tensor" in training, "else the shares have it so already"
    if "tensor" not in training:
        assert near.all()
        return
    entries = build_weight_map(shape)
    keys = list(index_tensors(entries, shape).values())
    for piece in plans[0][~near]:
        entry = entries[piece["entry"]]
        assert entry.axis is not None, "what is not split is everywhere"
        slices = [entry.list_slices(shape, keys[piece["tensor"]].layer, part, 2, 0) for part in range(2)]
        parts = [find_ranges(rank_slices[piece["section"]]) for rank_slices in slices]
        own, sent = parts[piece["target"] % 2], read_ranges(piece)
        assert not all(have.begin <= want.begin and want.end <= have.end for have, want in zip(own, sent, strict=True))
        assert piece["source"] % 2 != piece["target"] % 2
    unchanged = [name for name in plans[0].dtype.names or () if name != "source"]
    assert all(np.array_equal(plans[0][name], plans[1][name]) for name in unchanged)


@pytest.mark.parametrize(
    ("training", "is_apart"), [({"tensor": 2, "data": 2}, False), ({"tensor": 2, "pipeline": 2}, True)]
)
def test_what_another_node_has_is_counted_apart(training: dict[str, int], is_apart: bool) -> None:
    """Two nodes of two GPUs, with an engine of two ranks on each; a stage of the policy is on one of them."""
    shape, generation = parse_model_shape(DENSE), GenerationParallelConfig(tensor=2, data=2)
    summary = summarize_refit(shape, ParallelConfig(**training), generation, "float32", 2**21, devices_per_node=2)
    crossing = {link: size for link, size in summary.links.items() if link[0] // 2 != link[1] // 2}
    by_rank = [sum(size for link, size in crossing.items() if link[end] == rank) for end in (0, 1) for rank in range(4)]
    assert summary.relayed_bytes == max(by_rank)
    assert (summary.relayed_bytes > 0) == is_apart
