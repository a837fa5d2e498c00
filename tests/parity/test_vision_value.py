"""Values of a value model that sees images are its head on transformers' hidden states."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.models.families import exchange_head
from megatron_grpo.models.heads import VALUE
from megatron_grpo.trainer.model.build import ValueHead
from megatron_grpo.trainer.rank import ValueRank
from tests.parity.images import (
    MICROBATCHES,
    ImageModel,
    expect_outputs,
    list_inputs,
    make_image_batch,
    make_saved_model,
)
from tests.parity.ranks import Layout, run_on_ranks

BIAS = 0.3


def make_head(hidden: int) -> Tensor:
    return torch.randn(hidden, generator=torch.Generator().manual_seed(7))


def compute_on_rank(layout: Layout, model: ImageModel, batch: TokenBatch) -> Tensor | None:
    settings = model.make_settings(layout)
    rank = ValueRank(replace(settings, shape=exchange_head(settings.shape, VALUE)))
    for module in rank.chunks[-1].modules():
        if isinstance(module, ValueHead):
            module.weight.data.copy_(make_head(model.shape.hidden)[None])
            assert module.bias is not None
            module.bias.data.fill_(BIAS)
    tokens = TokenBatch(batch.lengths, TokenFields(token_ids=batch.fields.token_ids), batch.images)
    return rank.compute_values(tokens, MICROBATCHES)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3_vl", Layout()),
        pytest.param("qwen2_5_vl", Layout(tensor=2, sequence=True), marks=pytest.mark.slow),
        pytest.param("qwen3_vl", Layout(pipeline=2), marks=pytest.mark.slow),
        pytest.param("qwen3_vl", Layout(context=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_values_with_images_equal_transformers(name: str, layout: Layout, tmp_path: Path) -> None:
    model = make_saved_model(name, tmp_path)
    batch = make_image_batch(model)
    by_rank = run_on_ranks(layout, compute_on_rank, model, batch)
    oracle, head = model.load(), make_head(model.shape.hidden)
    with torch.no_grad():
        hidden = [oracle.model(**inputs).last_hidden_state[0] for inputs in list_inputs(model, batch)]
    expect_outputs(by_rank, [states[:-1] @ head + BIAS for states in hidden], 2e-5)
