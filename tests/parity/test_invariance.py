"""Loss and gradients of the real model do not depend on how a step is cut up: order, microbatches, padding, ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from torch import Tensor

from megatron_grpo.batch.packing import SequencePadder
from megatron_grpo.batch.token_batch import TokenBatch
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from tests.parity.policy_training import make_batch, make_engine, whole_gradients
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import LENGTHS, fetched, merged, step_counts
from tests.support.loss_oracle import CONFIGS
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel

LAYOUTS = [*rare([Layout(), Layout(pipeline=2)]), Layout(data=2)]
Gradients = dict[str, Tensor]
"""By the names of transformers."""


def learning_batch() -> TokenBatch:
    """`make_batch` with all that any loss asks for, and ratios well away from 1."""
    batch, generator = make_batch(), torch.Generator().manual_seed(5)
    tokens, total = batch.fields, sum(batch.lengths)
    tokens.prev_logprobs = -3 - torch.randn(total, generator=generator)
    tokens.reference_logprobs = -3 - torch.randn(total, generator=generator)
    tokens.generation_logprobs = tokens.prev_logprobs + 0.2 * tokens.generation_logprobs
    tokens.positive = torch.cat([torch.full((n,), float(i % 2)) for i, n in enumerate(batch.lengths)])
    tokens.weight = torch.cat([torch.full((n,), (1.0, 0.25, 0.5)[i % 3]) for i, n in enumerate(batch.lengths)])
    return batch


Cut = tuple[list[int], int]
"""The order of the sequences, and the tokens of a microbatch."""
AS_IT_COMES: Cut = (list(range(len(LENGTHS))), sum(LENGTHS))
CUTS = st.tuples(st.permutations(AS_IT_COMES[0]), st.integers(1, 12 * len(LENGTHS)))


def gradients_on_rank(layout: Layout, model: TinyModel, cuts: dict[str, Cut]) -> dict[str, tuple[float, Gradients]]:
    """For each loss this rank's share of it, and its part of the whole step's gradient."""
    engine, results = make_engine(layout, model, distributed=False), {}
    for name, (order, microbatch_tokens) in cuts.items():
        batch = learning_batch().select(order)
        plan = SequencePadder(microbatch_tokens, 1).assign_microbatches(batch.lengths, layout.data)
        share = plan[parallel_state.get_data_parallel_rank()]
        loss_fn, counts = ClippedPGLossFn(CONFIGS[name]), step_counts(batch)
        metrics = engine.compute_gradients(fetched(engine, batch, loss_fn), share, loss_fn, counts)
        results[name] = sum(float(metric["loss"]) for metric in metrics), whole_gradients(engine)
    return results


def whole_steps(layout: Layout, model: TinyModel, cuts: dict[str, Cut]) -> dict[str, tuple[float, Gradients]]:
    by_rank = run_on_ranks(layout, gradients_on_rank, model, cuts)
    return {name: (sum(r[name][0] for r in by_rank), merged([r[name][1] for r in by_rank])) for name in cuts}


@pytest.fixture(scope="module")
def expected(tiny_models: dict[str, TinyModel]) -> dict[str, tuple[float, Gradients]]:
    """On one rank, in one microbatch."""
    return whole_steps(Layout(), tiny_models["qwen3_tied"], dict.fromkeys(CONFIGS, AS_IT_COMES))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_and_gradients_are_those_of_the_step(
    layout: Layout, tiny_models: dict[str, TinyModel], expected: dict[str, tuple[float, Gradients]]
) -> None:
    """Of every loss in every layout."""

    @settings(max_examples=3, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
    @given(cuts=st.fixed_dictionaries(dict.fromkeys(CONFIGS, CUTS)))
    def check(cuts: dict[str, Cut]) -> None:
        for name, (loss, gradients) in whole_steps(layout, tiny_models["qwen3_tied"], cuts).items():
            assert loss == pytest.approx(expected[name][0], rel=1e-5, abs=1e-6), name
            for parameter, gradient in expected[name][1].items():
                error = (gradients[parameter] - gradient).norm() / gradient.norm()
                assert error < 1e-4, f"{name} {parameter}: relative error {error:.1e}"

    check()
