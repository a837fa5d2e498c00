"""Learning rates of an optimizer against transformers' schedules of the same names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from megatron_grpo.config.schema import OptimizerConfig
from megatron_grpo.trainer.optimizer import Schedule

STEPS, WARMUP, LR = 40, 5, 1e-2


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize(
    ("style", "settings", "theirs"),
    [
        ("polynomial", {"decay_power": 2.0, "min_lr": 1e-3}, {"power": 2.0, "lr_end": 1e-3}),
        ("polynomial", {"min_lr": 1e-4}, {"lr_end": 1e-4}),
        ("cosine_with_restarts", {"decay_cycles": 3}, {"num_cycles": 3}),
        ("cosine_with_restarts", {}, {}),
        ("warmup_stable_decay", {"final_decay_steps": 8}, {"num_decay_steps": 8, "decay_type": "linear"}),
        ("warmup_stable_decay", {}, {"num_decay_steps": 4, "decay_type": "linear"}),
        ("linear", {}, {}),
        ("cosine", {}, {}),
    ],
)
def test_a_schedule_is_that_of_transformers(
    style: Any, settings: dict[str, Any], theirs: dict[str, Any], warmup: int
) -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{"max_lr": LR, "min_lr": settings.get("min_lr", 0.0)}])
    ours = Schedule(optimizer, OptimizerConfig(lr=LR, warmup_steps=warmup, decay_style=style, **settings), STEPS)
    adam = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=LR)
    expected = get_scheduler(
        style, adam, num_warmup_steps=warmup, num_training_steps=STEPS, scheduler_specific_kwargs=theirs
    )
    for step in range(1, STEPS + 1):
        ours.step(1)
        adam.step()
        expected.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected.get_last_lr()[0], abs=1e-12), step


def test_a_schedule_stays_at_its_end() -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    ours = Schedule(optimizer, OptimizerConfig(lr=LR, min_lr=1e-3, decay_style="polynomial"), STEPS)
    ours.step(STEPS + 7)
    assert optimizer.param_groups[0]["lr"] == 1e-3
