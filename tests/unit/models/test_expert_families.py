"""Families with experts and latent attention: config.json as it is spelled, what is refused, what a token costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatron_grpo.models.families import build_weight_map, count_forward_flops, parse_model_shape
from megatron_grpo.models.weight_map import iter_entries, list_experts
from tests.support.tiny_models import SPECIAL

MOE_FAMILIES = ["qwen3_moe", "mixtral", "deepseek_v3"]
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 4096,
    },
}


def parameters(raw: dict[str, Any]) -> int:
    shape = parse_model_shape(raw)
    return sum(
        torch.Size(tensor.measure(shape.sizes)).numel() * len(list_experts(entry, shape))
        for entry, _, _ in iter_entries(build_weight_map(shape), shape, list(range(shape.layers)))
        if not entry.copy
        for tensor in entry.hf
    )


@pytest.mark.parametrize(
    ("raw", "billions"), [(QWEN3_30B, 30.53), (DEEPSEEK_V3, 671.03)], ids=["Qwen3-30B-A3B", "DeepSeek-V3"]
)
def test_the_table_covers_the_parameters_of_the_released_models(raw: dict[str, Any], billions: float) -> None:
    assert parameters(raw) / 1e9 == pytest.approx(billions, abs=0.01)


def test_which_layers_have_experts() -> None:
    assert sum(parse_model_shape(DEEPSEEK_V3).experts.layers) == 58
    sparse = parse_model_shape(QWEN3_30B | {"decoder_sparse_step": 2, "mlp_only_layers": [1]}).experts
    assert [layer for layer, has in enumerate(sparse.layers) if has][:3] == [3, 5, 7]


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (QWEN3_30B, {"num_experts_per_tok": 200}, "num_experts_per_tok=200 is more than the 128 experts"),
        (QWEN3_30B, {"mlp_only_layers": "all"}, "mlp_only_layers=all must be a list"),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "awq"}}, "convert the model to bfloat16 first"),
        (DEEPSEEK_V3, {"scoring_func": "softmax"}, "scoring_func=softmax is not supported"),
        (DEEPSEEK_V3, {"topk_group": 3}, "n_group=8 with topk_group=3"),
        (DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank is missing"),
        (DEEPSEEK_V3, {"first_k_dense_replace": -1}, "first_k_dense_replace=-1 must be"),
        (DEEPSEEK_V3, {"rope_scaling": {"type": "llama3"}}, "rope_type=llama3 is not supported"),
    ],
)
def test_what_is_refused(raw: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_model_shape(raw | change)


@pytest.mark.parametrize("key", ["scoring_func", "topk_method"])
def test_a_router_is_described_in_the_file(key: str) -> None:
    with pytest.raises(ValueError, match=f"has no {key}, without which vLLM would choose other experts"):
        parse_model_shape({name: value for name, value in DEEPSEEK_V3.items() if name != key})


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_operations_are_those_that_torch_counts(family: str) -> None:
    """All but attention's, which torch counts for a whole square, and the look-up of a token's experts."""
    model = SPECIAL[family]().eval()
    model.set_experts_implementation("eager")  # torch does not count products of groups of matrices
    shape = parse_model_shape(model.config.to_dict() | {"architectures": [type(model).__name__]})
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64), use_cache=False)
    latent = shape.latent
    per_pair = 4 * shape.head_dim if latent is None else 2 * (latent.plain_dim + latent.rope_dim + latent.value_dim)
    attention = shape.layers * shape.attention_heads * per_pair
    assert count_forward_flops(shape, [1]) - attention == pytest.approx(counter.get_total_flops() - attention, rel=0.02)
