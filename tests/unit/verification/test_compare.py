"""Comparisons of two sides of a step: what counts as rounding, and where the sides first differ."""

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
    fields = {
        "logprobs": -torch.ones(tokens),
        "result": TrainResult(0.5, 2.0, 0.1),
        "tensors": tensors,
        "hidden": hidden,
        "captured": np.arange(tokens),
    }
    return Replayed(**{**fields, **changes})


def apart(record: RecordedStep, replayed: Replayed) -> dict[str, Difference]:
    comparison = compare(("other", "one"), record, (replayed, side(record)), LIMITS)
    return {difference.quantity: difference for difference in comparison.differences}


def move_tensors(record: RecordedStep, kind: str, *names: str, by: float) -> Replayed:
    """Tensors of a kind whose names contain one of these, moved by a share of their norm."""

    def change(figure: TensorFigure) -> TensorFigure:
        hit = figure.kind == kind and any(name in figure.name for name in names)
        return TensorFigure(figure.kind, 0, figure.name, 1.0, [1.0 + by]) if hit else figure

    return side(record, tensors=[change(figure) for figure in side(record).tensors])


def test_equal_sides_agree_in_everything(record: RecordedStep) -> None:
    comparison = compare(("a", "b"), record, (side(record), side(record)), LIMITS)
    assert comparison.agrees
    assert comparison.first_difference is None
    assert [difference.quantity for difference in comparison.differences] == list(LIMITS), "in the order of computation"
    assert {difference.difference for difference in comparison.differences} == {0.0}


def test_a_token_that_a_filter_removes_on_one_side_is_no_difference(record: RecordedStep) -> None:
    logprobs = side(record).logprobs
    logprobs[4] = -math.inf
    assert apart(record, side(record, logprobs=logprobs))["log-probabilities"].difference == 0.0
    both = compare(("a", "b"), record, (side(record, logprobs=logprobs), side(record, logprobs=logprobs)), LIMITS)
    assert both.agrees
    logprobs[5] = math.nan
    assert not apart(record, side(record, logprobs=logprobs))["log-probabilities"].agrees


def test_what_only_one_side_knows_is_not_compared(record: RecordedStep) -> None:
    differences = apart(record, side(record, logprobs=None, tensors=[], hidden={}))
    assert list(differences) == ["loss", "gradient norm"]
    assert not apart(record, side(record, logprobs=None, tensors=[], hidden={}, result=None))


def test_the_first_point_in_the_order_of_computation_is_named_with_its_first_token(record: RecordedStep) -> None:
    hidden = side(record).hidden
    first = int(record.lengths[0])
    hidden["layers.1.mlp"][first + 2, 1] += 1e-2  # the third token of the second sequence
    hidden["layers.1.mlp"][first + 3, 1] += 5.0
    hidden["layers.1"][0] += 9.0
    difference = apart(record, side(record, hidden=hidden))["hidden states"]
    assert (difference.tensor, difference.layer, difference.sequence, difference.token) == ("layers.1.mlp", 1, 1, 2)
    assert difference.token_id == record.trajectories[1].token_ids[2]
    assert difference.difference == pytest.approx(2.5, rel=1e-3), (
        "the largest of the point, relative to the token's norm of 2"
    )


def test_only_tokens_that_both_sides_captured_are_compared_and_nan_is_a_difference(record: RecordedStep) -> None:
    hidden = {"norm": torch.ones(5, 4)}
    part = side(record, hidden=hidden, captured=np.arange(5))
    full_side = side(record)
    full_side.hidden["norm"][5:] = 9.0
    assert compare(("a", "b"), record, (part, full_side), LIMITS).agrees
    hidden["norm"][2, 3] = math.nan
    (broken,) = [
        difference
        for difference in compare(("a", "b"), record, (part, full_side), LIMITS).differences
        if not difference.agrees
    ]
    assert (broken.quantity, broken.token) == ("hidden states", 2)


@pytest.mark.parametrize("precision", TOLERANCES)
def test_hidden_states_of_tokens_that_predict_nothing_are_left_out(record: RecordedStep, precision: str) -> None:
    """The last sampled token of a sequence, and an environment's words behind it."""
    limits = TOLERANCES[precision]
    long = [
        number
        for number, trajectory in enumerate(record.trajectories)
        if trajectory.spans[-1].end - trajectory.spans[-1].start > 2
    ]
    trajectories = list(record.trajectories)
    for number in long:
        trajectory, last_span = trajectories[number], trajectories[number].spans[-1]
        spans = [*trajectory.spans[:-1], last_span._replace(end=last_span.end - 2)]
        trajectories[number] = replace(trajectory, spans=spans, logprobs=trajectory.logprobs[:-2])
    ends = np.cumsum(record.lengths)
    last = side(record)
    for states in last.hidden.values():
        states[ends - 1] += 5.0
    assert compare(("a", "b"), record, (last, side(record)), limits).agrees
    observed = replace(record, trajectories=trajectories)
    for states in last.hidden.values():
        states[ends[long] - 2] += 5.0
        states[ends[long] - 3] += 5.0
    pair = (last, side(record))
    assert compare(("a", "b"), observed, pair, limits).agrees
    assert not compare(("a", "b"), record, pair, limits).agrees, "there they are sampled, and predict the next"
    prompt = side(record)
    prompt.hidden["embedding"][0] += 5.0
    first = compare(("a", "b"), record, (prompt, side(record)), limits).first_difference
    assert (first["sequence"], first["token"]) == (0, 0), "the response attends to the prompt"
    between = record.trajectories[1].spans[0].end
    turns = side(record)
    turns.hidden["embedding"][int(ends[0]) + between] += 5.0
    second = compare(("a", "b"), record, (turns, side(record)), limits).first_difference
    assert (second["sequence"], second["token"]) == (1, between), "so does a second turn to the words between"


def test_a_few_stray_tokens_are_rounding_in_bfloat16_but_not_in_float32(record: RecordedStep) -> None:
    tokens = torch.from_numpy(np.flatnonzero(record.predicts))
    half, single = TOLERANCES["bfloat16"], side(record)

    def with_errors(*errors: tuple[int, float]) -> Difference:
        hidden = side(record).hidden
        for count, error in errors:
            hidden["layers.1.mlp"][tokens[:count]] = 1.0 + error
        differences = compare(("a", "b"), record, (side(record, hidden=hidden), single), half).differences
        return next(difference for difference in differences if difference.quantity == "hidden states")

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
    first_difference = compare(("a", "b"), record, (routed(len(tokens) // 4), routed(0)), half).first_difference
    assert (first_difference["layer"], first_difference["point"]) == (1, "layers.1.mlp.router")
    assert not compare(("a", "b"), record, (routed(3), routed(0)), LIMITS).agrees, "float32 has no such ties"


def test_gradients_of_experts_are_compared_layer_by_layer_in_bfloat16(record: RecordedStep) -> None:
    names = [f"model.layers.{layer}.mlp.experts.{n}.up_proj.weight" for layer in (0, 1) for n in range(8)]
    names += ["model.layers.0.mlp.gate.weight", "model.norm.weight"]

    def with_gradients(**moved: float) -> Replayed:
        values = [1.0 + sum(by for part, by in moved.items() if part.replace("_", ".") in name) for name in names]
        gradients = [TensorFigure("gradient", 0, name, 1.0, [value]) for name, value in zip(names, values, strict=True)]
        return side(record, tensors=gradients)

    def find_difference(limits: Any, **moved: float) -> Difference:
        compared = compare(("a", "b"), record, (with_gradients(**moved), with_gradients()), limits)
        return next(difference for difference in compared.differences if difference.quantity == "gradients")

    half = TOLERANCES["bfloat16"]
    assert find_difference(half, layers_1_mlp_experts_5=0.9).agrees, (
        "an expert with few tokens, of which some went elsewhere"
    )
    layer_difference = find_difference(half, layers_1_mlp_experts=0.5, experts_5=0.2)
    assert (layer_difference.agrees, layer_difference.tensor) == (False, names[13])
    assert not find_difference(half, norm=0.5).agrees
    assert not find_difference(LIMITS, layers_1_mlp_experts_5=0.01).agrees


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
    hidden_difference = next(
        difference for difference in compared.differences if difference.quantity == "hidden states"
    )
    sequence = int(np.searchsorted(np.cumsum(record.lengths), watched[2], side="right"))
    assert (hidden_difference.tensor, hidden_difference.layer, hidden_difference.sequence) == (
        "layers.0.mlp",
        0,
        sequence,
    )
    assert hidden_difference.token == watched[2] - int(record.lengths[:sequence].sum())
    assert hidden_difference.difference == pytest.approx(0.01, rel=0.4), "an estimate"


def test_weights_are_named_forwards_and_gradients_backwards(record: RecordedStep) -> None:
    names = ("layers.1.", "layers.10.", "layers.0.")
    weights = apart(record, move_tensors(record, "weight", *names, by=1e-3))["weights"]
    assert (weights.layer, weights.agrees) == (0, False)
    gradients = apart(record, move_tensors(record, "gradient", *names, by=1e-2))["gradients"]
    assert (gradients.layer, gradients.difference) == (10, pytest.approx(1e-2))
    head = apart(record, move_tensors(record, "gradient", "lm_head", "embed", by=1e-2))["gradients"]
    assert (head.tensor, head.layer) == ("lm_head.weight", None)


def test_a_tensor_that_is_rounding_alone_is_measured_against_all(record: RecordedStep) -> None:
    """The gradient of a bias of keys is zero but for rounding."""
    noise = [TensorFigure("gradient", 0, "model.layers.0.self_attn.k_proj.bias", 1e-7, [1e-7])]
    opposite_noise = [TensorFigure("gradient", 0, "model.layers.0.self_attn.k_proj.bias", 1e-7, [-1e-7])]
    first = side(record, tensors=[*side(record).tensors, *noise])
    second = side(record, tensors=[*side(record).tensors, *opposite_noise])
    assert compare(("a", "b"), record, (first, second), LIMITS).agrees


def test_a_tensor_that_one_side_lacks_differs(record: RecordedStep) -> None:
    lacking = side(record, tensors=[tensor for tensor in side(record).tensors if "layers.1." not in tensor.name])
    differences = apart(record, lacking)
    assert (differences["weights"].tensor, differences["weights"].difference) == (
        "model.layers.1.mlp.up_proj.weight",
        math.inf,
    )


def test_the_update_is_compared_as_a_whole(record: RecordedStep) -> None:
    difference = apart(record, move_tensors(record, "update", "layers.1.", by=0.04))["update"]
    assert difference.difference == pytest.approx(0.04 / math.sqrt(5))
    assert (difference.tensor, difference.agrees) == ("model.layers.1.mlp.up_proj.weight", True)
    assert not apart(record, move_tensors(record, "update", "layers.1.", by=0.06))["update"].agrees


def test_log_probabilities_and_numbers_of_the_step(record: RecordedStep) -> None:
    logprobs = side(record).logprobs
    logprobs[int(record.lengths[0]) + 5] += 1e-3
    differences = apart(record, side(record, logprobs=logprobs, result=TrainResult(0.5 + 1e-4, 2.0 + 1e-3, 0.1)))
    assert (differences["log-probabilities"].sequence, differences["log-probabilities"].token) == (1, 5)
    assert differences["loss"].difference == pytest.approx(1e-4), "absolute below 1"
    assert differences["gradient norm"].difference == pytest.approx(5e-4)
    first_difference = compare(
        ("a", "b"), record, (side(record, logprobs=logprobs), side(record)), LIMITS
    ).first_difference
    assert (first_difference["quantity"], first_difference["sequence"], first_difference["token"]) == (
        "log-probabilities",
        1,
        5,
    )


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
    for sampled, trajectory in rows:
        positions = [position for span in trajectory.spans for position in range(span.start, span.end)]
        assert torch.nonzero(sampled)[:, 0].tolist() == positions
    generation = tokens.fields.generation_logprobs
    first = record.trajectories[0]
    assert generation[first.spans[0].start : first.spans[0].end].tolist() == first.logprobs.tolist()
    with pytest.raises(ValueError, match="has no such values"):
        record.place_at_sampled(record.prev_logprobs)


@pytest.mark.parametrize("state", [StateFigure("norm", 10**9, [0.0] * 64), StateFigure("norm", -1, [0.0] * 64)])
def test_a_state_of_a_token_that_the_step_lacks_is_refused(record: RecordedStep, state: StateFigure) -> None:
    figures = StepFigures(loss=1.0, grad_norm=1.0, learning_rate=1.0, tensors=[], config={}, device="", states=[state])
    with pytest.raises(ValueError, match=r"the record of step 1 has a hidden state at token .* which no run writes"):
        read_recorded(replace(record, figures=figures))
    short = replace(figures, states=[StateFigure("norm", 0, [1.0])])
    with pytest.raises(ValueError, match="in 1 numbers, which no run writes"):
        read_recorded(replace(record, figures=short))
