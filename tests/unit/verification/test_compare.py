"""Comparisons of two sides of a step: what counts as rounding, and where the sides first differ."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_grpo.batch.replay_files import StateFigure, StepFigures, TensorFigure
from megatron_grpo.config.schema import Fp8Config, PolicyConfig
from megatron_grpo.trainer.model_ranks import TrainResult
from megatron_grpo.trainer.step_record import sketch
from megatron_grpo.verification.replay.compare import TOLERANCES, Difference, choose_tolerances, compare, read_recorded
from megatron_grpo.verification.replay.record import RecordedStep, open_step
from megatron_grpo.verification.replay.replayed_step import Replayed
from tests.support.recorded_run import make_recorded_run

LIMITS = TOLERANCES["float32"]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> RecordedStep:
    return open_step(make_recorded_run(tmp_path_factory.mktemp("run")), 1)


def side(record: RecordedStep, **changes: Any) -> Replayed:
    """Hidden states of ones, log-probabilities of -1, and tensors of norm 1 whose sketch has one number."""
    tokens = int(record.lengths.sum())
    points = ["embedding", "layers.0.mlp", "layers.0", "layers.1.mlp", "layers.1", "norm"]
    names = [
        "model.embed_tokens.weight",
        *(f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 1, 10)),
        "lm_head.weight",
    ]
    tensors = [TensorFigure(kind, 0, name, 1.0, [1.0]) for kind in ("weight", "gradient", "update") for name in names]
    hidden = {point: torch.ones(tokens, 4) for point in points}
    given = {
        "logprobs": -torch.ones(tokens),
        "result": TrainResult(0.5, 2.0, 0.1),
        "tensors": tensors,
        "hidden": hidden,
        "captured": np.arange(tokens),
    }
    return Replayed(**{**given, **changes})


def apart(record: RecordedStep, other: Replayed) -> dict[str, Difference]:
    found = compare(("other", "one"), record, (other, side(record)), LIMITS)
    return {one.quantity: one for one in found.differences}


def moved(record: RecordedStep, kind: str, *names: str, by: float) -> Replayed:
    """Tensors of a kind whose names contain one of these, moved by a share of their norm."""

    def change(one: TensorFigure) -> TensorFigure:
        hit = one.kind == kind and any(name in one.name for name in names)
        return TensorFigure(one.kind, 0, one.name, 1.0, [1.0 + by]) if hit else one

    return side(record, tensors=[change(one) for one in side(record).tensors])


def test_equal_sides_agree_in_everything(record: RecordedStep) -> None:
    found = compare(("a", "b"), record, (side(record), side(record)), LIMITS)
    assert found.agrees
    assert found.first_difference is None
    assert [one.quantity for one in found.differences] == list(LIMITS), "in the order of computation"
    assert {one.difference for one in found.differences} == {0.0}


def test_a_token_that_a_filter_removes_on_one_side_is_no_difference(record: RecordedStep) -> None:
    logprobs = side(record).logprobs
    logprobs[4] = -math.inf
    assert apart(record, side(record, logprobs=logprobs))["log-probabilities"].difference == 0.0
    both = compare(("a", "b"), record, (side(record, logprobs=logprobs), side(record, logprobs=logprobs)), LIMITS)
    assert both.agrees
    logprobs[5] = math.nan
    assert not apart(record, side(record, logprobs=logprobs))["log-probabilities"].agrees


def test_what_only_one_side_knows_is_not_compared(record: RecordedStep) -> None:
    found = apart(record, side(record, logprobs=None, tensors=[], hidden={}))
    assert list(found) == ["loss", "gradient norm"]
    assert not apart(record, side(record, logprobs=None, tensors=[], hidden={}, result=None))


def test_the_first_point_in_the_order_of_computation_is_named_with_its_first_token(record: RecordedStep) -> None:
    hidden = side(record).hidden
    first = int(record.lengths[0])
    hidden["layers.1.mlp"][first + 2, 1] += 1e-2  # the third token of the second sequence
    hidden["layers.1.mlp"][first + 3, 1] += 5.0
    hidden["layers.1"][0] += 9.0
    found = apart(record, side(record, hidden=hidden))["hidden states"]
    assert (found.tensor, found.layer, found.sequence, found.token) == ("layers.1.mlp", 1, 1, 2)
    assert found.token_id == record.trajectories[1].token_ids[2]
    assert found.difference == pytest.approx(2.5, rel=1e-3), (
        "the largest of the point, relative to the token's norm of 2"
    )


def test_only_tokens_that_both_sides_captured_are_compared_and_nan_is_a_difference(record: RecordedStep) -> None:
    hidden = {"norm": torch.ones(5, 4)}
    part = side(record, hidden=hidden, captured=np.arange(5))
    whole = side(record)
    whole.hidden["norm"][5:] = 9.0
    assert compare(("a", "b"), record, (part, whole), LIMITS).agrees
    hidden["norm"][2, 3] = math.nan
    (broken,) = [one for one in compare(("a", "b"), record, (part, whole), LIMITS).differences if not one.agrees]
    assert (broken.quantity, broken.token) == ("hidden states", 2)


@pytest.mark.parametrize("precision", TOLERANCES)
def test_hidden_states_of_tokens_that_predict_nothing_are_left_out(record: RecordedStep, precision: str) -> None:
    """The last sampled token of a sequence, and an environment's words behind it."""
    limits = TOLERANCES[precision]
    long = [number for number, one in enumerate(record.trajectories) if one.spans[-1].end - one.spans[-1].start > 2]
    others = list(record.trajectories)
    for number in long:
        one, last_span = others[number], others[number].spans[-1]
        spans = [*one.spans[:-1], last_span._replace(end=last_span.end - 2)]
        others[number] = replace(one, spans=spans, logprobs=one.logprobs[:-2])
    ends = np.cumsum(record.lengths)
    last = side(record)
    for states in last.hidden.values():
        states[ends - 1] += 5.0
    assert compare(("a", "b"), record, (last, side(record)), limits).agrees
    observed = replace(record, trajectories=others)
    for states in last.hidden.values():
        states[ends[long] - 2] += 5.0
        states[ends[long] - 3] += 5.0
    pair = (last, side(record))
    assert compare(("a", "b"), observed, pair, limits).agrees
    assert not compare(("a", "b"), record, pair, limits).agrees, "there they are sampled, and predict the next"
    prompt = side(record)
    prompt.hidden["embedding"][0] += 5.0
    first = compare(("a", "b"), record, (prompt, side(record)), limits).first_difference
    assert first is not None
    assert (first["sequence"], first["token"]) == (0, 0), "the response attends to the prompt"
    between = record.trajectories[1].spans[0].end
    turns = side(record)
    turns.hidden["embedding"][int(ends[0]) + between] += 5.0
    second = compare(("a", "b"), record, (turns, side(record)), limits).first_difference
    assert second is not None
    assert (second["sequence"], second["token"]) == (1, between), "so does a second turn to the words between"


def test_a_few_stray_tokens_are_rounding_in_bfloat16_but_not_in_float32(record: RecordedStep) -> None:
    tokens = torch.from_numpy(np.flatnonzero(record.predicts))
    half, single = TOLERANCES["bfloat16"], side(record)

    def with_errors(*errors: tuple[int, float]) -> Difference:
        hidden = side(record).hidden
        for count, error in errors:
            hidden["layers.1.mlp"][tokens[:count]] = 1.0 + error
        found = compare(("a", "b"), record, (side(record, hidden=hidden), single), half).differences
        return next(one for one in found if one.quantity == "hidden states")

    assert with_errors((1, 0.15)).agrees
    assert with_errors((len(tokens) // 3, 0.09), (2, 0.15)).agrees
    assert not with_errors((1, 0.25)).agrees, "no rounding is as large"
    many = with_errors((len(tokens) // 10, 0.15))
    assert (many.agrees, many.tensor, many.sequence, many.token) == (False, "layers.1.mlp", 0, 0)
    assert not with_errors((len(tokens), 0.07)).agrees, "rounding does not move every token as far"
    hidden = side(record).hidden
    hidden["layers.1.mlp"][tokens[0]] *= 1 + 2e-4
    assert not compare(("a", "b"), record, (side(record, hidden=hidden), single), LIMITS).agrees


def test_a_tie_of_experts_is_rounding_and_a_router_that_differs_is_not(record: RecordedStep) -> None:
    tokens = torch.from_numpy(np.flatnonzero(record.predicts))

    def routed(count: int) -> Replayed:
        """The first of these tokens go to the third expert in place of the second, and end in another state."""
        weights = torch.tensor([0.5, 0.5, 0.0, 0.0]).repeat(len(record.predicts), 1)
        weights[tokens[:count]] = torch.tensor([0.5, 0.0, 0.5, 0.0])
        states = torch.ones(len(record.predicts), 4)
        states[tokens[:count]] = -1.0
        return side(
            record, hidden={"layers.0": side(record).hidden["norm"], "layers.1.mlp.router": weights, "norm": states}
        )

    half = TOLERANCES["bfloat16"]
    assert compare(("a", "b"), record, (routed(3), routed(0)), half).agrees
    place = compare(("a", "b"), record, (routed(len(tokens) // 4), routed(0)), half).first_difference
    assert place is not None
    assert (place["layer"], place["point"]) == (1, "layers.1.mlp.router")
    assert not compare(("a", "b"), record, (routed(3), routed(0)), LIMITS).agrees, "float32 has no such ties"


def test_gradients_of_experts_are_compared_layer_by_layer_in_bfloat16(record: RecordedStep) -> None:
    names = [f"model.layers.{layer}.mlp.experts.{n}.up_proj.weight" for layer in (0, 1) for n in range(8)]
    names += ["model.layers.0.mlp.gate.weight", "model.norm.weight"]

    def with_gradients(**moved: float) -> Replayed:
        values = [1.0 + sum(by for part, by in moved.items() if part.replace("_", ".") in name) for name in names]
        gradients = [TensorFigure("gradient", 0, name, 1.0, [value]) for name, value in zip(names, values, strict=True)]
        return side(record, tensors=gradients)

    def found(limits: Any, **moved: float) -> Difference:
        compared = compare(("a", "b"), record, (with_gradients(**moved), with_gradients()), limits)
        return next(one for one in compared.differences if one.quantity == "gradients")

    half = TOLERANCES["bfloat16"]
    assert found(half, layers_1_mlp_experts_5=0.9).agrees, "an expert with few tokens, of which some went elsewhere"
    whole = found(half, layers_1_mlp_experts=0.5, experts_5=0.2)
    assert (whole.agrees, whole.tensor) == (False, names[13])
    assert not found(half, norm=0.5).agrees
    assert not found(LIMITS, layers_1_mlp_experts_5=0.01).agrees


def test_recorded_sketches_name_point_and_token(record: RecordedStep) -> None:
    draw = torch.Generator().manual_seed(0)
    tokens = int(record.lengths.sum())
    states = {point: torch.randn(tokens, 200, generator=draw) for point in ("embedding", "layers.0.mlp", "layers.0")}
    watched = [int(token) for token in np.flatnonzero(record.predicts)[5:40:7]]
    sketches = [
        StateFigure(point, token, sketch(rows[token], point))
        for point, rows in reversed(states.items())
        for token in watched
    ]
    figures = StepFigures(
        loss=0.5, grad_norm=2.0, learning_rate=0.1, tensors=[], states=sketches, config={}, device="cpu"
    )
    of_run = read_recorded(replace(record, figures=figures))
    assert list(of_run.hidden) == list(states), "in the order of computation"
    again = {point: rows.clone() for point, rows in states.items()}
    again["embedding"][watched[0] - 1] += 1.0  # not recorded
    assert compare(("a", "b"), record, (side(record, hidden=again), of_run), LIMITS).agrees
    again["layers.0.mlp"][watched[2]] *= 1.01
    again["layers.0"][watched[1]] *= 1.01
    compared = compare(("a", "b"), record, (side(record, hidden=again), of_run), LIMITS)
    found = next(one for one in compared.differences if one.quantity == "hidden states")
    sequence = int(np.searchsorted(np.cumsum(record.lengths), watched[2], side="right"))
    assert (found.tensor, found.layer, found.sequence) == ("layers.0.mlp", 0, sequence)
    assert found.token == watched[2] - int(record.lengths[:sequence].sum())
    assert found.difference == pytest.approx(0.01, rel=0.4), "an estimate"


def test_weights_are_named_forwards_and_gradients_backwards(record: RecordedStep) -> None:
    names = ("layers.1.", "layers.10.", "layers.0.")
    weights = apart(record, moved(record, "weight", *names, by=1e-3))["weights"]
    assert (weights.layer, weights.agrees) == (0, False)
    gradients = apart(record, moved(record, "gradient", *names, by=1e-2))["gradients"]
    assert (gradients.layer, gradients.difference) == (10, pytest.approx(1e-2))
    head = apart(record, moved(record, "gradient", "lm_head", "embed", by=1e-2))["gradients"]
    assert (head.tensor, head.layer) == ("lm_head.weight", None)


def test_a_tensor_that_is_rounding_alone_is_measured_against_all(record: RecordedStep) -> None:
    """The gradient of a bias of keys is zero but for rounding."""
    noise = [TensorFigure("gradient", 0, "model.layers.0.self_attn.k_proj.bias", 1e-7, [1e-7])]
    other = [TensorFigure("gradient", 0, "model.layers.0.self_attn.k_proj.bias", 1e-7, [-1e-7])]
    one = side(record, tensors=[*side(record).tensors, *noise])
    two = side(record, tensors=[*side(record).tensors, *other])
    assert compare(("a", "b"), record, (one, two), LIMITS).agrees


def test_a_tensor_that_one_side_lacks_differs(record: RecordedStep) -> None:
    lacking = side(record, tensors=[one for one in side(record).tensors if "layers.1." not in one.name])
    found = apart(record, lacking)
    assert (found["weights"].tensor, found["weights"].difference) == ("model.layers.1.mlp.up_proj.weight", math.inf)


def test_the_update_is_compared_as_a_whole(record: RecordedStep) -> None:
    found = apart(record, moved(record, "update", "layers.1.", by=0.04))["update"]
    assert found.difference == pytest.approx(0.04 / math.sqrt(5))
    assert (found.tensor, found.agrees) == ("model.layers.1.mlp.up_proj.weight", True)
    assert not apart(record, moved(record, "update", "layers.1.", by=0.06))["update"].agrees


def test_log_probabilities_and_numbers_of_the_step(record: RecordedStep) -> None:
    logprobs = side(record).logprobs
    assert logprobs is not None
    logprobs[int(record.lengths[0]) + 5] += 1e-3
    found = apart(record, side(record, logprobs=logprobs, result=TrainResult(0.5 + 1e-4, 2.0 + 1e-3, 0.1)))
    assert (found["log-probabilities"].sequence, found["log-probabilities"].token) == (1, 5)
    assert found["loss"].difference == pytest.approx(1e-4), "absolute below 1"
    assert found["gradient norm"].difference == pytest.approx(5e-4)
    place = compare(("a", "b"), record, (side(record, logprobs=logprobs), side(record)), LIMITS).first_difference
    assert place is not None
    assert (place["quantity"], place["sequence"], place["token"]) == ("log-probabilities", 1, 5)


def test_the_coarser_precision_decides() -> None:
    plain, half = PolicyConfig(precision="float32"), PolicyConfig(precision="bfloat16")
    eight = PolicyConfig(precision="bfloat16", fp8=Fp8Config(format="hybrid"))
    assert choose_tolerances(plain, plain) is TOLERANCES["float32"]
    assert choose_tolerances(plain, half) is TOLERANCES["bfloat16"]
    assert choose_tolerances(eight, plain) is TOLERANCES["fp8"]


def test_values_of_sampled_tokens_come_to_their_places(record: RecordedStep, tmp_path: Path) -> None:
    tokens = record.join_tokens()
    assert tokens.lengths == record.lengths.tolist()
    rows = zip(tokens.fields.sampled.split(tokens.lengths), record.trajectories, strict=True)  # type: ignore[union-attr]
    for sampled, one in rows:
        places = [place for span in one.spans for place in range(span.start, span.end)]
        assert torch.nonzero(sampled)[:, 0].tolist() == places
    generation = tokens.fields.generation_logprobs
    assert generation is not None
    first = record.trajectories[0]
    assert generation[first.spans[0].start : first.spans[0].end].tolist() == first.logprobs.tolist()
    with pytest.raises(ValueError, match="has no such values"):
        record.place_at_sampled(record.prev_logprobs)
