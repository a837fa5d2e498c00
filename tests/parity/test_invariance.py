"""Losses do not depend on how a step is cut up; a rollout of segments is its calls, each alone."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_grpo.batch.packing import SequencePadder
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import TokenBatch
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.loss_schema import LossConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.losses.loss import GlobalCounts, Segments
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.rollouts.conversation import Conversation
from megatron_grpo.rollouts.partitions import concatenate_trajectories
from megatron_grpo.rollouts.rollout import GroupRollout
from tests.parity.on_rank import expect_gradients
from tests.parity.policy_training import make_batch, make_engine, whole_gradients
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import LENGTHS, fetch, merge, step_counts
from tests.support.loss_oracle import CONFIGS
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel, logprobs_of_logits
from tests.unit.rollouts.test_agent_rollout import BATCH_SETTINGS, Branching, Environment, Host
from tests.unit.rollouts.test_rollout import DATUM

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
    tokens.selected = (torch.rand(total, generator=generator) < 0.3).float()
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
        metrics = engine.compute_gradients(fetch(engine, batch, loss_fn), share, loss_fn, counts)
        results[name] = sum(float(metric["loss"]) for metric in metrics), whole_gradients(engine)
    return results


def whole_steps(layout: Layout, model: TinyModel, cuts: dict[str, Cut]) -> dict[str, tuple[float, Gradients]]:
    by_rank = run_on_ranks(layout, gradients_on_rank, model, cuts)
    return {name: (sum(r[name][0] for r in by_rank), merge([r[name][1] for r in by_rank])) for name in cuts}


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
            expect_gradients(gradients, expected[name][1])

    check()


ADVANTAGES = np.array([0.75, -1.25], dtype=np.float32)
MODES = {
    "tokens": LossConfig(reference_policy_kl_penalty=0.0),
    "sequences": LossConfig(reference_policy_kl_penalty=0.0, token_level_loss=False),
    "constant": LossConfig(reference_policy_kl_penalty=0.0, constant_normalizer_tokens=7),
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=200, num_hidden_layers=2, **sizes)).float()


def run_agent() -> tuple[list[Trajectory], list[list[Any]]]:
    """Two rollouts: one goes on, edits, shortens and branches, in calls at the same time too; one asks once."""
    by_rollout: list[list[Any]] = []

    async def agent(talk: Conversation) -> float:
        is_first = not by_rollout
        by_rollout.append(talk.responses)
        first = await talk.complete([5, 6])
        if is_first:
            begin = first.tokens.tolist()
            await asyncio.gather(*(talk.complete([*begin, word]) for word in (7, 8, 9)))
            await talk.complete([4, *begin[1:]])
            await talk.complete(talk.last.tokens.tolist()[:2])
            await talk.complete([*talk.responses[1].tokens.tolist(), 3])
        return 1.0

    both = replace(BATCH_SETTINGS, samples_per_prompt=2, max_total_sequence_length=500)
    group: Any = GroupRollout(0, DATUM, both, Branching(), Environment(agent), Host(2000))  # type: ignore[arg-type]
    asyncio.run(group.sample(group.engines))
    return asyncio.run(group.score()), by_rollout


def logprobs(model: LlamaForCausalLM, ids: np.ndarray[Any, Any]) -> Tensor:
    tokens = torch.from_numpy(ids).long()[None]
    return logprobs_of_logits(model(tokens).logits, tokens).flatten()


@pytest.mark.parametrize("mode", MODES)
def test_the_loss_is_that_of_the_calls_by_hand(model: LlamaForCausalLM, mode: str) -> None:
    trajectories, by_rollout = run_agent()
    assert [len(trajectory.sequences) for trajectory in trajectories] == [5, 1]
    config = MODES[mode]
    batch = StepBatch.from_outcomes(Config(), [trajectory.outcome for trajectory in trajectories])
    batch.advantages = batch.repeat_by_sequence(ADVANTAGES)
    parts = [part for trajectory in trajectories for part in trajectory.split_segments()]
    arrays = {name: [array] for name, array in concatenate_trajectories(parts).items()}
    tokens = TokenBatch.from_replica(batch, arrays)
    sequence = np.repeat(np.arange(len(batch)), batch.lengths)
    segments = Segments(torch.from_numpy(sequence), torch.from_numpy(batch.response_tokens).float())
    curr = torch.cat([logprobs(model, part.token_ids) for part in parts])
    counts = GlobalCounts.count(batch, np.arange(len(batch)))
    loss, _ = ClippedPGLossFn(config)(curr, tokens.fields, counts, segments)

    by_hand = torch.zeros(())
    sampled = [sum(len(response.output.token_ids) for response in responses) for responses in by_rollout]
    for responses, advantage, count in zip(by_rollout, ADVANTAGES.tolist(), sampled, strict=True):
        for response in responses:
            values = logprobs(model, response.tokens)[-len(response.output.token_ids) :]
            # At the policy that is trained, the gradient is that of -A log p, and the loss of a token is -A.
            of_tokens = -advantage * (1 + values - values.detach()).sum()
            divisor = {"tokens": sum(sampled), "sequences": 2 * count, "constant": 2 * 7}[mode]
            by_hand = by_hand + of_tokens / divisor
    torch.testing.assert_close(loss, by_hand)
    gradients = [torch.autograd.grad(value, list(model.parameters())) for value in (loss, by_hand)]
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-4)
    assert counts.tokens == sum(sampled)
    assert counts.sequences == pytest.approx(1), "two rollouts of weight 1/2"
