"""Adapters on the language part of models that see images: gradients and log-probabilities are peft's."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import ReferenceConfig
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.verification.problem import count_tokens, make_loss, write_out_loss
from tests.parity.adapters import LORA
from tests.parity.images import (
    MICROBATCHES,
    ImageModel,
    compute_logprobs,
    expect_outputs,
    make_image_batch,
    make_saved_model,
)
from tests.parity.lora import expect_gradients_of_adapters, fill_b, join, own_parts, peft_oracle
from tests.parity.ranks import Layout, run_on_ranks

LAYERS = "model.language_model.layers"
LAYOUTS = [Layout(), Layout(tensor=2, sequence=True), Layout(pipeline=2), Layout(context=2)]
Results = tuple[Tensor | None, Tensor | None, dict[str, Tensor], dict[str, Tensor]]


def compute_on_rank(layout: Layout, model: ImageModel, batch: TokenBatch) -> Results:
    """Log-probabilities of policy and reference; A and B, and their gradients."""
    settings = model.make_settings(layout, distributed=False, lora=LORA)
    rank = PolicyRank(replace(settings, reference=ReferenceConfig()))
    fill_b(rank)
    tokens = TokenBatch(batch.lengths, TokenFields(token_ids=batch.fields.token_ids), batch.images)
    logprobs = [compute(tokens, MICROBATCHES) for compute in (rank.compute_logprobs, rank.compute_reference_logprobs)]
    rank.compute_gradients(batch, MICROBATCHES, make_loss(), count_tokens(batch))
    return *logprobs, own_parts(rank, gradients=False), own_parts(rank, gradients=True)


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], *(pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS[1:])], ids=str
)
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_adapters_of_the_language_part_equal_peft(name: str, layout: Layout, tmp_path: Path) -> None:
    model = make_saved_model(name, tmp_path)
    batch = make_image_batch(model)
    by_rank: list[Results] = run_on_ranks(layout, compute_on_rank, model, batch)
    values, gradients = (join([results[part] for results in by_rank], layout) for part in (2, 3))
    oracle = peft_oracle(model, values, LAYERS)
    logprobs = compute_logprobs(oracle.base_model.model, model, batch)
    write_out_loss(batch)(logprobs).backward()
    expect_outputs([results[0] for results in by_rank], logprobs)
    expect_gradients_of_adapters(model, oracle, values, gradients, LAYERS)
    with torch.no_grad():
        expect_outputs([results[1] for results in by_rank], compute_logprobs(model.load(), model, batch))
