"""Tensors whose gradient is exactly zero: what is reported, when, and that it is reported once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from megatron_grpo.algorithms.context import make_save_state
from megatron_grpo.algorithms.idle_tensors import IDLE_EXPERT_STEPS, describe_idle_tensors
from megatron_grpo.algorithms.stages import combine_results
from megatron_grpo.trainer.messages import RankTrainResult
from megatron_grpo.trainer.model_ranks import MegatronPolicy, TrainResult

NORM, GATE = "model.norm.weight", "model.layers.0.mlp.experts.3.gate_proj.weight"


def learn(*names: str, grad_norm: float = 0.5) -> TrainResult:
    return TrainResult(loss=0.1, grad_norm=grad_norm, learning_rate=1e-6, zero_gradients=frozenset(names))


def remarks_by_step(results: Sequence[TrainResult | None], state: Any = None) -> dict[int, list[str]]:
    state = make_save_state() if state is None else state
    texts = {step: describe_idle_tensors(state, step, result) for step, result in enumerate(results, 1)}
    return {step: remarks for step, remarks in texts.items() if remarks}


def test_a_tensor_is_reported_after_three_steps_once_with_the_first() -> None:
    texts = remarks_by_step([learn(), learn(), *[learn(NORM)] * 20])
    assert list(texts) == [5]
    (text,) = texts[5]
    assert text.startswith(f"the gradient of a tensor has been exactly zero since step 3: {NORM}. They do not learn")


def test_adapters_that_begin_at_zero_are_healthy() -> None:
    first = learn("model.layers.0.self_attn.q_proj.weight (lora_a)")
    assert remarks_by_step([first, *[learn()] * 10]) == {}


def test_a_tensor_that_learns_in_between_begins_anew() -> None:
    assert remarks_by_step([learn(NORM), learn(NORM), learn(), learn(NORM), learn(NORM), learn()]) == {}


def test_steps_that_learn_nothing_say_nothing() -> None:
    texts = remarks_by_step([learn(NORM), None, learn(NORM, grad_norm=0.0), learn(NORM)])
    assert list(texts) == [4]
    assert "since step 1:" in texts[4][0]


def test_experts_may_be_idle_for_long_and_are_reported_together() -> None:
    other_gate = GATE.replace("3", "4")
    texts = remarks_by_step([learn(GATE)] * 10 + [learn(GATE, other_gate)] * (3 * IDLE_EXPERT_STEPS))
    assert list(texts) == [IDLE_EXPERT_STEPS, 2 * IDLE_EXPERT_STEPS]
    assert "since step 1:" in texts[IDLE_EXPERT_STEPS][0]
    assert "since step 11:" in texts[2 * IDLE_EXPERT_STEPS][0]


def test_many_tensors_are_one_line() -> None:
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(30)]
    (text,) = remarks_by_step([learn(*names)] * 3)[3]
    assert text.startswith("the gradients of 30 tensors have been exactly zero since step 1: model.layers.0.mlp")
    assert " and 24 more. " in text


def test_a_resume_goes_on_with_the_count() -> None:
    state = make_save_state()
    remarks_by_step([learn(NORM), learn(NORM)], state)
    state = json.loads(json.dumps(state))
    assert len(describe_idle_tensors(state, 3, learn(NORM))) == 1
    state = json.loads(json.dumps(state))
    assert describe_idle_tensors(state, 4, learn(NORM)) == []


def test_a_step_of_several_updates_counts_where_all_are_zero() -> None:
    assert combine_results([learn(NORM, GATE), learn(GATE)], [1.0, 1.0]).zero_gradients == {GATE}


@pytest.mark.parametrize(
    ("zeros", "expected"),
    [
        ([(NORM,), (NORM,), (), ()], {NORM}),  # two ranks of another stage have no part of it
        ([(NORM,), (), (), ()], set()),
        ([(), (), (), ()], set()),
        ([(), (), (GATE,), ()], {GATE}),
    ],
)
def test_a_tensor_is_zero_if_it_is_on_all_ranks_that_have_it(zeros: list[tuple[str, ...]], expected: set[str]) -> None:
    policy: Any = object.__new__(MegatronPolicy)
    policy._ranks_by_tensor, policy.actors = Counter(), []
    policy._gather = lambda _calls, _phase: [[NORM], [NORM], [GATE], []]
    results = [RankTrainResult(0.5, 1e-6, None, zero_gradients=names) for names in zeros]
    assert policy._join_zero_gradients(results) == expected
