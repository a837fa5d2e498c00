"""Gemma 3 and 4, Llama 4 and gpt-oss: config.json as released and as written, sizes, costs, sinks."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_grpo.models.families import build_weight_map, measure_tensors
from megatron_grpo.models.families.reading import parse_model_shape, read_model_shape
from megatron_grpo.models.flops import count_forward_flops
from megatron_grpo.models.heads import VALUE
from megatron_grpo.models.shape import HeadShape
from megatron_grpo.models.weight_map import iter_entries
from megatron_grpo.planning.generation_cost import count_kv_bytes_per_token, count_mixer_parameters
from megatron_grpo.preflight.layout_checks import _find_undivided
from megatron_grpo.trainer.microbatch_schedule import derive_cost
from megatron_grpo.trainer.model.attention import _attend_with_sinks
from tests.support.hf_configs import config_folder
from tests.support.released_configs import (
    GEMMA3_1B,
    GEMMA4_26B,
    GEMMA4_31B,
    LINEAR,
    LLAMA4_MAVERICK,
    LLAMA4_SCOUT,
    in_the_new_spelling,
)
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
    assert parse_model_shape(GEMMA3_1B | {"architectures": [text], "num_labels": 1}, reward_models=True).head == VALUE
    with pytest.raises(ValueError, match=f"architecture {images} is not supported"):
        parse_model_shape(GEMMA3_1B | {"architectures": [images], "num_labels": 1}, reward_models=True)


def test_the_table_has_every_tensor_once_in_its_shape() -> None:
    model = BUILDERS["gemma3"]()
    shape = parse_model_shape(model.config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]})
    names_and_shapes = [
        (part.name, part.shape)
        for entry, layer, _ in iter_entries(build_weight_map(shape), shape, list(range(shape.layers)))
        if not entry.copy
        for part in entry.list_slices(shape, layer, 0, 1)
    ]
    assert sorted(names_and_shapes) == sorted((name, tuple(weight.shape)) for name, weight in model.named_parameters())


def test_forward_flops_are_those_that_torch_counts_but_for_the_pairs_that_nobody_sees() -> None:
    model, lengths = BUILDERS["gemma3"]().eval(), [3, 17, 9]
    model.set_attn_implementation("eager")
    shape = parse_model_shape(model.config.to_dict() | {"architectures": ["Gemma3ForCausalLM"]})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for length in lengths:
            model(torch.zeros(1, length, dtype=torch.int64))
    squares = 2 * sum(length**2 for length in lengths)
    visible_pairs = sum(query + 1 + min(query + 1, 5) for length in lengths for query in range(length))
    assert count_forward_flops(shape, lengths) == counter.get_total_flops() - 4 * 4 * 16 * (squares - visible_pairs)


GEMMA4_LAYERS = 60


def test_released_models_are_read() -> None:
    dense, mixture = parse_model_shape(GEMMA4_31B), parse_model_shape(GEMMA4_26B)
    assert dense.global_heads == HeadShape(key_value_heads=4, head_dim=512, key_is_value=True)
    assert (dense.head_dim, dense.key_value_heads, dense.window, dense.logit_cap) == (256, 16, 1024, 30.0)
    assert [layer for layer, windowed in enumerate(dense.windowed) if not windowed] == list(range(5, GEMMA4_LAYERS, 6))
    assert (dense.softmax_scale, dense.embedding_scale, dense.zero_centered_norms) == (1.0, 5376**0.5, False)
    assert (dense.rope_theta, dense.local_rope_theta) == (1e6, 1e4)
    assert dense.rope_scaling == {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    assert dense.list_kinds(0) == {"mixer", "attention", "qk_norm", "mlp", "dense"}
    assert dense.list_kinds(5) == {"mixer", "global", "key_as_value", "mlp", "dense"}
    assert (mixture.experts.count, mixture.experts.top_k, mixture.experts.shared_ffn_hidden) == (128, 8, 2112)
    assert not dense.fits_transformer_engine


@pytest.mark.parametrize("raw", [GEMMA4_31B, GEMMA4_26B], ids=["dense", "mixture"])
def test_the_file_that_transformers_writes_means_the_same(raw: dict[str, Any]) -> None:
    from transformers import Gemma4TextConfig

    written = Gemma4TextConfig(**raw).to_dict()
    assert "global_head_dim" not in written
    assert parse_model_shape(written) == parse_model_shape(raw)


@pytest.mark.parametrize("raw", [GEMMA4_31B, GEMMA4_26B], ids=["dense", "mixture"])
def test_the_table_has_every_tensor_once_in_its_shape_of_gemma4(raw: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM, Gemma4TextConfig

    small = {"num_hidden_layers": 6, "layer_types": raw["layer_types"][:6], "hidden_size": 24, "intermediate_size": 8}
    small |= {"num_attention_heads": 6, "num_key_value_heads": 3, "num_global_key_value_heads": 2, "vocab_size": 37}
    small |= {"head_dim": 4, "global_head_dim": 10, "vocab_size_per_layer_input": 37}
    config = Gemma4TextConfig(**(raw | small))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = parse_model_shape(config.to_dict() | {"architectures": ["Gemma4ForCausalLM"]})
    stored = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert measure_tensors(shape) == stored


def test_tensor_parallelism_has_to_divide_both_kinds_of_heads() -> None:
    shape = parse_model_shape(GEMMA4_31B)
    assert [size for size in (1, 2, 4, 8, 16, 32) if _find_undivided(size, shape, is_engine=False) is None] == [
        1,
        2,
        4,
        8,
        16,
        32,
    ]
    three = replace(shape, global_heads=HeadShape(key_value_heads=1, head_dim=6, key_is_value=True))
    assert _find_undivided(4, three, is_engine=False) == "198 rows of a key/value head, which 4 ranks would share"
    assert _find_undivided(4, three, is_engine=True) is None, "an engine's ranks have the whole key"


def test_keys_values_and_matrices_are_counted_by_layer() -> None:
    shape = parse_model_shape(GEMMA4_31B)
    assert count_kv_bytes_per_token(shape, GEMMA4_LAYERS, 1, 2) == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
    assert count_kv_bytes_per_token(shape, GEMMA4_LAYERS, 8, 2) == 2 * 2 * (50 * 2 * 256 + 10 * 512)
    assert count_mixer_parameters(shape, 0, 1) == 5376 * 256 * (2 * 32 + 2 * 16)
    assert count_mixer_parameters(shape, 5, 1) == 5376 * 512 * (2 * 32 + 4)


def test_products_of_queries_and_keys_are_those_of_each_kind_of_layer() -> None:
    shape = parse_model_shape(GEMMA4_31B)
    pairs = count_forward_flops(shape, [2]) - 2 * count_forward_flops(shape, [1])
    assert pairs == 2 * 32 * 2 * (50 * 256 + 10 * 512)


def test_released_models_of_llama4_are_read() -> None:
    scout, maverick = parse_model_shape(LLAMA4_SCOUT), parse_model_shape(LLAMA4_MAVERICK)
    assert (scout.window, scout.chunked, scout.unweighted_qk_norm) == (8192, True, True)
    assert scout.unrotated == maverick.unrotated == (False, False, False, True) * 12
    assert (sum(scout.experts.layers), sum(maverick.experts.layers)) == (48, 24)
    assert maverick.list_kinds(0) == {"mixer", "attention", "mlp", "dense"}
    assert maverick.list_kinds(3) == {"mixer", "attention", "unrotated", "mlp", "experts", "packed_experts"}
    assert (maverick.ffn_hidden, maverick.experts.ffn_hidden, maverick.experts.shared_ffn_hidden) == (16384, 8192, 8192)
    assert not scout.fits_transformer_engine


def test_the_table_has_every_tensor_once_in_its_shape_of_llama4() -> None:
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


@pytest.mark.parametrize(
    ("raw", "window"),
    [
        *((GEMMA3_1B, window) for window in (1, 2, 512)),
        *((GEMMA4_31B, window) for window in (1, 512)),
        *((LLAMA4_MAVERICK, window) for window in (1, 2, 512)),
    ],
)
def test_a_sequence_costs_what_it_computes(raw: dict[str, Any], window: int) -> None:
    shape = replace(parse_model_shape(raw), window=window)
    lengths = [1, 2, 3, 511, 512, 513, 514, 1025, 5000]
    costs = derive_cost(shape).compute(np.array(lengths))
    np.testing.assert_allclose(costs, [count_forward_flops(shape, [length]) for length in lengths], rtol=1e-12)


def test_chunks_make_their_own_pairs_of_tokens() -> None:
    shape = replace(parse_model_shape(LLAMA4_MAVERICK), window=4)
    all_visible = replace(shape, window=10**6)
    visible = sum(position % 4 + 1 for position in range(11))
    pairs = (count_forward_flops(all_visible, [11]) - count_forward_flops(shape, [11])) / (2 * 40 * 2 * 128 * 36)
    assert pairs == 66 - visible


GPT_OSS: dict[str, Any] = json.loads((config_folder("openai/gpt-oss-20b") / "config.json").read_text())


@pytest.mark.parametrize(("name", "layers", "experts"), [("20b", 24, 32), ("120b", 36, 128)])
def test_released_models(name: str, layers: int, experts: int) -> None:
    shape = read_model_shape(config_folder(f"openai/gpt-oss-{name}"))
    assert (shape.layers, shape.experts.count, shape.experts.top_k, shape.head_dim) == (layers, experts, 4, 64)
    assert (shape.window, shape.windowed) == (128, (True, False) * (layers // 2))
    assert shape.softmax_scale == pytest.approx(64**-0.5 * 1.3465735902799727**2)
    assert shape.fits_transformer_engine
    tensors = measure_tensors(shape)
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"] == (experts, 2880, 5760)
    assert tensors["model.layers.0.self_attn.sinks"] == (64,)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 2, 16), (3, 1, 5), (5, 5, 4)])
def test_a_sink_takes_a_share_of_attention(heads: int, groups: int, width: int, *, is_masked: bool) -> None:
    """softmax over [scores, sink], the sink's column dropped; gradients of all four too."""
    torch.manual_seed(0)
    tokens, scale = 7, 0.37
    queries = torch.randn(2, heads, tokens, width, dtype=torch.float64, requires_grad=True)
    keys, values = (torch.randn(2, groups, tokens, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sinks = torch.randn(heads, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if is_masked:
        mask = mask & torch.ones(tokens, tokens, dtype=torch.bool).triu(-2)
    actual = _attend_with_sinks(sinks, queries, keys, values, mask[None, None] if is_masked else None, scale)
    every_key, every_value = (tensor.repeat_interleave(heads // groups, dim=1) for tensor in (keys, values))
    scores = (queries @ every_key.transpose(2, 3) * scale).masked_fill(~mask, -torch.inf)
    column = sinks.view(1, heads, 1, 1).expand(2, heads, tokens, 1)
    expected = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1] @ every_value
    torch.testing.assert_close(actual, expected)
    weights, inputs = torch.randn_like(expected), (sinks, queries, keys, values)
    gradients = (torch.autograd.grad((output * weights).sum(), inputs) for output in (actual, expected))
    torch.testing.assert_close(*gradients)
