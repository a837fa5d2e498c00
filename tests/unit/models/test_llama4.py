"""Llama 4: its config.json as released and as transformers writes it, costs."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_grpo.models.families import build_weight_map, count_forward_flops, measure_tensors, parse_model_shape
from megatron_grpo.models.weight_map import iter_entries
from megatron_grpo.trainer.microbatch_schedule import derive_cost
from tests.support.released_configs import LLAMA4_MAVERICK, LLAMA4_SCOUT


def test_released_models_are_read() -> None:
    scout, maverick = parse_model_shape(LLAMA4_SCOUT), parse_model_shape(LLAMA4_MAVERICK)
    assert scout.experts is not None
    assert maverick.experts is not None
    assert (scout.window, scout.chunked, scout.unweighted_qk_norm) == (8192, True, True)
    assert scout.unrotated == maverick.unrotated == (False, False, False, True) * 12
    assert (sum(scout.experts.layers), sum(maverick.experts.layers)) == (48, 24)
    assert maverick.list_kinds(0) == {"mixer", "attention", "mlp", "dense"}
    assert maverick.list_kinds(3) == {"mixer", "attention", "unrotated", "mlp", "experts", "packed_experts"}
    assert (maverick.ffn_hidden, maverick.experts.ffn_hidden, maverick.experts.shared_ffn_hidden) == (16384, 8192, 8192)
    assert not scout.fits_transformer_engine


def test_the_table_has_every_tensor_once_in_its_shape() -> None:
    import torch
    from transformers import AutoModelForCausalLM, Llama4TextConfig

    small = {"num_hidden_layers": 4, "hidden_size": 24, "intermediate_size": 8, "intermediate_size_mlp": 12}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 37, "moe_layers": [1, 3]}
    config = Llama4TextConfig(**(LLAMA4_MAVERICK | small | heads | {"no_rope_layers": None, "pad_token_id": 0}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = parse_model_shape(config.to_dict() | {"architectures": ["Llama4ForCausalLM"]})
    assert measure_tensors(shape) == {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    assert len(list(iter_entries(build_weight_map(shape), shape, range(4)))) > 0


@pytest.mark.parametrize("window", [1, 2, 512])
def test_a_sequence_costs_what_it_computes(window: int) -> None:
    shape = replace(parse_model_shape(LLAMA4_MAVERICK), window=window)
    lengths = [1, 2, 3, 511, 512, 513, 514, 1025, 5000]
    costs = derive_cost(shape).compute(np.array(lengths))
    np.testing.assert_allclose(costs, [count_forward_flops(shape, [length]) for length in lengths], rtol=1e-12)


def test_chunks_make_their_own_pairs_of_tokens() -> None:
    shape = replace(parse_model_shape(LLAMA4_MAVERICK), window=4)
    all_visible = replace(shape, window=10**6)
    visible = sum(position % 4 + 1 for position in range(11))
    pairs = (count_forward_flops(all_visible, [11]) - count_forward_flops(shape, [11])) / (2 * 40 * 2 * 128 * 36)
    assert pairs == 66 - visible
