"""Gemma-3: its config.json as transformers 4 and 5 spell it, its table of weights, what a sequence costs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_grpo.models.families import build_weight_map, count_forward_flops, parse_model_shape
from megatron_grpo.models.weight_map import iter_entries
from megatron_grpo.trainer.microbatch_schedule import derive_cost
from tests.support.released_configs import GEMMA3_1B, LINEAR, in_the_new_spelling
from tests.support.tiny_models import BUILDERS


@pytest.mark.parametrize("scaling", [None, LINEAR], ids=["plain", "linear"])
def test_both_spellings_mean_the_same(scaling: dict[str, Any] | None) -> None:
    raw = GEMMA3_1B | {"rope_scaling": scaling}
    old, new = parse_model_shape(raw), parse_model_shape(in_the_new_spelling(raw))
    assert (old.rope_theta, old.local_rope_theta, old.window) == (1e6, 1e4, 512)
    assert [layer for layer, windowed in enumerate(old.windowed) if not windowed] == [5, 11, 17, 23]
    assert (old.tied_embeddings, old.embedding_scale, old.softmax_scale) == (True, 1152**0.5, 1 / 16)
    assert (old.rope_scaling is None) == (scaling is None)
    assert (old.rope_scaling or {}).get("factor") == (new.rope_scaling or {}).get("factor")
    assert replace(old, rope_scaling=None) == replace(new, rope_scaling=None)


def test_without_windows_there_are_none() -> None:
    shape = parse_model_shape(GEMMA3_1B | {"sliding_window_pattern": 1})
    assert (shape.window, any(shape.windowed)) == (None, False)


def test_reward_models_are_those_of_the_text_model() -> None:
    """The other class is that of the model that sees images, whose weights have other names."""
    text, images = "Gemma3TextForSequenceClassification", "Gemma3ForSequenceClassification"
    assert (
        parse_model_shape(GEMMA3_1B | {"architectures": [text], "num_labels": 1}, reward_models=True).value_head
        == "stored"
    )
    with pytest.raises(ValueError, match=f"architecture {images} is not supported"):
        parse_model_shape(GEMMA3_1B | {"architectures": [images], "num_labels": 1}, reward_models=True)


def test_the_table_has_every_tensor_once_in_its_shape() -> None:
    model = BUILDERS["gemma3"]()
    shape = parse_model_shape(model.config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]})
    found = [
        (part.name, part.shape)
        for entry, layer, _ in iter_entries(build_weight_map(shape), shape, list(range(shape.layers)))
        if not entry.copy
        for part in entry.list_slices(shape, layer, 0, 1)
    ]
    assert sorted(found) == sorted((name, tuple(weight.shape)) for name, weight in model.named_parameters())


def test_forward_flops_are_those_that_torch_counts_but_for_the_pairs_that_nobody_sees() -> None:
    model, lengths = BUILDERS["gemma3"]().eval(), [3, 17, 9]
    model.set_attn_implementation("eager")
    shape = parse_model_shape(model.config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for length in lengths:
            model(torch.zeros(1, length, dtype=torch.int64))
    squares = 2 * sum(length**2 for length in lengths)
    seen = sum(query + 1 + min(query + 1, 5) for length in lengths for query in range(length))
    assert count_forward_flops(shape, lengths) == counter.get_total_flops() - 4 * 4 * 16 * (squares - seen)


@pytest.mark.parametrize("window", [1, 2, 512])
def test_a_sequence_costs_what_it_computes(window: int) -> None:
    shape = replace(parse_model_shape(GEMMA3_1B), window=window)
    lengths = [1, 2, 3, 511, 512, 513, 514, 5000]
    assert derive_cost(shape).compute(np.array(lengths)).tolist() == [
        count_forward_flops(shape, [length]) for length in lengths
    ]
