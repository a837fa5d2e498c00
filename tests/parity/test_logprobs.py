"""Logits of the Megatron model against transformers, in every layout."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.hf_weights import load_hf_weights
from megatron_grpo.trainer.model.build import build_model
from megatron_grpo.trainer.model.packed_sequences import build_packed_sequences, lay_out
from tests.parity.ranks import LAYOUTS, Layout, run_on_ranks
from tests.support.tiny_models import VOCAB, TinyModel, logprobs_of_logits

LENGTHS = (12, 20, 8)
"""Of the microbatches: different, so that pipeline stages have to tell each other."""


def microbatches() -> list[Tensor]:
    """[2, length] token ids each."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB, (2, length), generator=generator) for length in LENGTHS]


def megatron_logits(model: GPTModel, batches: list[Tensor], window: int | None) -> list[Tensor]:
    """Full logits of every microbatch, on the last pipeline stage; [] elsewhere."""

    def forward_step(data: Iterator[Tensor], module: GPTModel) -> tuple[Tensor, Callable[[Tensor], Any]]:
        token_ids = next(data)
        packed = build_packed_sequences(
            lay_out([token_ids.shape[1]] * len(token_ids)), transformer_engine=False, window=window
        )
        output = module(token_ids.view(1, -1), None, None, packed_seq_params=packed)

        def finish(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return logits.new_zeros(()), torch.zeros((), dtype=torch.int), by_sequence(logits, token_ids)

        return output, finish

    with torch.no_grad():
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=max(LENGTHS),
            micro_batch_size=1,
            forward_only=True,
        )


def by_sequence(logits: Tensor, token_ids: Tensor) -> Tensor:
    """[1, all tokens, columns of this rank] to [sequences, length, vocabulary], without padding."""
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)[..., :VOCAB].unflatten(1, token_ids.shape)[0]


def logprobs_on_rank(layout: Layout, folders: list[Path], precision: str, recompute: bool) -> list[list[Tensor]]:
    """Token log-probabilities by model and microbatch; empty lists before the last stage."""
    results = []
    for folder in folders:
        shape = read_model_shape(folder)
        (model,) = build_model(
            PolicyConfig(parallel=layout.parallel, precision=precision, activation_checkpointing=recompute), shape
        )
        load_hf_weights([model], shape, folder)
        logits = megatron_logits(model, microbatches(), shape.window)
        results.append([logprobs_of_logits(x.cpu(), ids) for x, ids in zip(logits, microbatches(), strict=False)])
    return results


def expect_parity(
    layout: Layout, models: dict[str, TinyModel], *, precision: str, recompute: bool, tolerance: float
) -> None:
    """Log-probabilities on every rank of the last stage agree with transformers'."""
    by_rank = run_on_ranks(layout, logprobs_on_rank, [m.path for m in models.values()], precision, recompute)
    last_stage = [rank_result for rank_result in by_rank if rank_result[0]]
    assert len(last_stage) == layout.tensor * layout.data
    for rank_result in last_stage:
        for model, actual in zip(models.values(), rank_result, strict=True):
            for ids, logprobs in zip(microbatches(), actual, strict=True):
                torch.testing.assert_close(
                    logprobs, model.logprobs(ids), atol=tolerance, rtol=0, msg=lambda m, name=model.name: f"{name}: {m}"
                )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logprobs_equal_transformers(layout: Layout, tiny_models: dict[str, TinyModel]) -> None:
    expect_parity(layout, tiny_models, precision="float32", recompute=False, tolerance=2e-5)


def test_activation_checkpointing_does_not_change_logprobs(tiny_models: dict[str, TinyModel]) -> None:
    expect_parity(Layout(tensor=2), tiny_models, precision="float32", recompute=True, tolerance=2e-5)


def test_bfloat16_is_close_to_float32(tiny_models: dict[str, TinyModel]) -> None:
    expect_parity(Layout(tensor=2, pipeline=2), tiny_models, precision="bfloat16", recompute=False, tolerance=0.5)


def test_llama3_rope_scaling_changes_the_logprobs(tiny_models: dict[str, TinyModel]) -> None:
    """Guards the tests above: without the scaling they would fail."""
    model = tiny_models["llama_untied"].load()
    ids = microbatches()[1]
    scaled = model(ids).logits
    rotary = model.model.rotary_emb
    half = rotary.inv_freq.shape[0]
    rotary.inv_freq = 1.0 / 10000.0 ** (torch.arange(half) / half)
    assert (model(ids).logits - scaled).abs().max() > 1e-2


@pytest.mark.parametrize("change", ["the window", "the local frequencies"])
def test_gemma3_layers_with_a_window_are_not_as_the_others(change: str, tiny_models: dict[str, TinyModel]) -> None:
    """Guards the tests above: with every layer alike they would fail."""
    model = tiny_models["gemma3"].load()
    ids = microbatches()[1]
    logits = model(ids).logits
    if change == "the window":
        model.config.sliding_window = 100
    else:
        rotary = model.model.rotary_emb
        rotary.sliding_attention_inv_freq = rotary.full_attention_inv_freq
    assert (model(ids).logits - logits).abs().max() > 1e-2
