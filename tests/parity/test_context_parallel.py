"""Sequences split over context-parallel ranks: log-probabilities, gradients, every loss, checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.on_rank import expect_continuation, expect_gradients
from tests.parity.policy_training import expect_gradients_of_transformers, gradients_on_rank
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_invariance import AS_IT_COMES, whole_steps
from tests.parity.test_rank_logprobs import expect_logprobs, logprobs_on_rank
from tests.support.loss_oracle import CONFIGS
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel

LAYOUTS = [
    Layout(context=2),
    Layout(tensor=2, context=2),
    Layout(tensor=2, context=2, sequence=True),
    Layout(pipeline=2, context=2),
    Layout(context=2, data=2),
]


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(context=4)], ids=str)
def test_ranks_report_the_logprobs_of_transformers(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    model = tiny_models["llama_untied"]
    by_rank = run_on_ranks(layout, logprobs_on_rank, model)
    reported = [found for found, _ in by_rank if found]
    assert len(reported) == layout.data, "the ranks that share a sequence report it once"
    expect_logprobs([found[0] for found in reported], model.load())


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_equal_transformers(layout: Layout, packing: bool, tiny_models: dict[str, TinyModel]) -> None:
    models = [tiny_models["qwen3_tied"], tiny_models["llama_untied"]]
    expect_gradients_of_transformers(run_on_ranks(layout, gradients_on_rank, models, packing), models, tolerance=1e-4)


@pytest.mark.parametrize("layout", [Layout(context=2), *rare([Layout(pipeline=2, context=2)])], ids=str)
def test_every_loss_is_that_of_whole_sequences(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    """Also those that speak of a response, whose tokens lie on several ranks."""
    cuts = dict.fromkeys(CONFIGS, (AS_IT_COMES[0], 40))
    model = tiny_models["qwen3_tied"]
    expected = whole_steps(Layout(), model, dict.fromkeys(CONFIGS, AS_IT_COMES))
    for name, (loss, gradients) in whole_steps(layout, model, cuts).items():
        assert loss == pytest.approx(expected[name][0], rel=1e-5, abs=1e-6), name
        expect_gradients(gradients, expected[name][1])


@pytest.mark.slow  # test_training.py loads checkpoints in other layouts
def test_a_checkpoint_goes_into_and_out_of_context_parallelism(
    tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    read_by = (Layout(), Layout(pipeline=2, context=2), Layout(context=2, data=2))
    folder = tmp_path / "checkpoint"
    expect_continuation(tiny_models["qwen3_tied"], folder, Layout(tensor=2, context=2), read_by)
