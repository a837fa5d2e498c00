"""Effects of changes on log-probabilities to first order, compared with small changes that are really made."""

from __future__ import annotations

import pytest
import torch

from megatron_grpo.verification.doctor.evidence import read_rollout
from megatron_grpo.verification.doctor.law import Law
from megatron_grpo.verification.doctor.suspects.effects import compute_effects, make_part_probe
from megatron_grpo.verification.doctor.suspects.parts import list_heads
from megatron_grpo.verification.doctor.suspects.reordered import Axis, list_axes
from megatron_grpo.verification.doctor.suspects.side import Side
from megatron_grpo.verification.oracle import Oracle
from tests.support.recorded_runs import make_run, sampled

STEP = 1e-3
"""Share of a change that is made."""


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Side:
    """The record of two rollouts of a small mixture of experts."""
    run = make_run(tmp_path_factory.mktemp("run"), "qwen3_moe")
    drawn = sampled(run.versions[0], run.prompts()[:2], samples=1)
    rows = [
        {
            "token_ids": one.token_ids,
            "logprobs": one.logprobs,
            "spans": [tuple(span) for span in one.spans],
        }
        for one in drawn
    ]
    rollouts = [rollout for row in rows if (rollout := read_rollout(row, 0, recomputed=False))]
    recorded = torch.cat([rollout.read_column("logprobs") for rollout in rollouts])
    return Side("engine", Oracle(run.versions[0]), rollouts, [one.tokens for one in rollouts], Law(), recorded)


def measure_slope(side: Side, changed: dict[str, torch.Tensor]) -> torch.Tensor:
    """The change of log-probabilities by a small share of a change of the weights, divided by the share."""
    ours = side.oracle.list_tensors()
    sides = []
    for share in (STEP, -STEP):
        with side.oracle.replaced({name: ours[name] + share * (value - ours[name]) for name, value in changed.items()}):
            sides.append(side.predict().double())
    return ((sides[0] - sides[1]) / (2 * STEP)).float()


def check(effects: torch.Tensor, slope: torch.Tensor) -> None:
    assert float((effects - slope).norm()) < 0.03 * float(slope.norm()) + 3e-3


@pytest.mark.parametrize(
    "name",
    [
        "heads of model.layers.1.self_attn.o_proj.weight",
        "8 blocks of rows of model.layers.1.mlp.gate_proj.weight",
        "columns of model.layers.1.mlp.down_proj.weight",
        "model.layers.2.mlp.experts",
    ],
)
def test_the_effect_of_an_order_is_its_slope(side: Side, name: str) -> None:
    tensors = side.oracle.list_tensors()
    (axis,) = [axis for axis in list_axes(tensors, side.oracle.model.config) if axis.name == name]
    present = axis.reorder(tensors, axis.units)
    (effects,) = compute_effects(side, [lambda gradients: axis.predict_effects(gradients, present)], list(present))
    assert effects.columns.shape[1] == axis.count_orders()
    for number in (0, axis.count_orders() // 2, axis.count_orders() - 1):
        changed = axis.reorder(tensors, axis.change_order(axis.units, number))
        check(effects.columns[:, number], measure_slope(side, changed))


def test_the_effect_of_a_head_is_its_slope(side: Side) -> None:
    tensors = side.oracle.list_tensors()
    parts = [part for part in list_heads(tensors, side.oracle.model.config) if "layers.2" in part.name]
    (effects,) = compute_effects(side, [make_part_probe(parts, tensors)])
    for number in (0, 5, len(parts) - 1):
        check(effects.columns[:, number], measure_slope(side, parts[number].scale(tensors, 2.0)))


def test_every_order_of_few_units_is_made_once() -> None:
    axis = Axis("rows", {"weight": 0}, 4)
    start = (2, 0, 1, 3)
    orders = {axis.change_order(start, number) for number in range(axis.count_orders())}
    assert len(orders) == 23
    assert start not in orders
    value = {"weight": torch.arange(8.0).view(4, 2)}
    assert axis.reorder(value, start)["weight"].tolist() == [[4.0, 5.0], [0.0, 1.0], [2.0, 3.0], [6.0, 7.0]]


def test_units_that_the_record_does_not_show_stay() -> None:
    axis = Axis("rows", {"weight": 0}, 6, (1, 4, 5))
    value = {"weight": torch.arange(6.0)[:, None]}
    assert axis.reorder(value, (4, 1, 5))["weight"].flatten().tolist() == [0.0, 4.0, 2.0, 3.0, 1.0, 5.0]
