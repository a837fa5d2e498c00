"""Layouts of the text models of Llama 4 and Gemma 4."""

from __future__ import annotations

from functools import partial

from tests.support.released.layout import Layout
from tests.support.released.templates import LLAMA4 as LLAMA4_TEMPLATE
from tests.support.released.templates import stored
from tests.support.released.vocabulary import O200K_SPLIT, added, byte_fallback, byte_level

_SIZES = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}

_LLAMA4 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>", "<|step|>"),
    *(f"<|text_post_train_reserved_special_token_{number}|>" for number in range(6)),
    *("<|python_start|>", "<|python_end|>", "<|finetune_right_pad|>"),
)
_LLAMA4_ENDS = ["<|end_of_text|>", "<|eom|>", "<|eot|>"]
LLAMA4 = Layout(
    name="llama_4",
    core=partial(byte_level, O200K_SPLIT, [*map(added, _LLAMA4)], bos="<|begin_of_text|>"),
    settings={
        "bos_token": "<|begin_of_text|>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|eot|>",
        "extra_special_tokens": {},
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 10485760,
        "pad_token": "<|finetune_right_pad|>",
        "tokenizer_class": "PreTrainedTokenizer",
    },
    template=LLAMA4_TEMPLATE,
    template_file=True,
    config={
        **_SIZES,
        "architectures": ["Llama4ForCausalLM"],
        "attention_chunk_size": 128,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "bos_token_id": "<|begin_of_text|>",
        "eos_token_id": _LLAMA4_ENDS,
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 32,
        "hidden_act": "silu",
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 64,
        "max_position_embeddings": 1048576,
        "model_type": "llama4_text",
        "moe_layers": [1],
        "no_rope_layers": [1, 0],
        "num_experts_per_tok": 1,
        "num_local_experts": 4,
        "output_router_logits": False,
        "pad_token_id": "<|finetune_right_pad|>",
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.51.0.dev0",
        "use_qk_norm": False,
    },
    generation={
        "bos_token_id": "<|begin_of_text|>",
        "do_sample": True,
        "eos_token_id": _LLAMA4_ENDS,
        "pad_token_id": "<|finetune_right_pad|>",
        "temperature": 0.6,
        "top_p": 0.9,
    },
    special_map=True,
    end="<|eot|>",
    call_text='<|python_start|><|python_end|>{"name": "add", "parameters": {"a": 1, "b": 1}}'
    '{"name": "add", "parameters": {"a": 2, "b": 3}}',
    call_close="}}",
)

_GEMMA4 = (
    *map(added, ("<pad>", "<eos>", "<bos>", "<unk>")),
    *(added(text, special=False) for text in ("<mask>", "[multimodal]", "<unused0>", "<unused1>")),
    *map(added, ("<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>")),
    *map(added, ('<|"|>', "<|think|>", "<|channel>", "<channel|>", "<|turn>", "<turn|>")),
    *(added("\n" * count, special=False) for count in range(1, 5)),
    *(added("▁" * count, special=False) for count in range(2, 5)),
    *map(added, ("<|image|>", "<|audio|>", "<|video|>")),
)
_GEMMA4_ENDS = ["<eos>", "<turn|>", "<|tool_response>"]
GEMMA4 = Layout(
    name="gemma_4",
    core=partial(byte_fallback, _GEMMA4, bos="<bos>", prepends=False),
    settings={
        "bos_token": "<bos>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<eos>",
        "mask_token": "<mask>",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<pad>",
        "padding_side": "left",
        "tokenizer_class": "GemmaTokenizer",
        "unk_token": "<unk>",
    },
    template=stored("gemma4_v5"),
    template_file=True,
    has_decoder=False,
    config={
        **_SIZES,
        "architectures": ["Gemma4ForCausalLM"],
        "attention_k_eq_v": True,
        "bos_token_id": "<bos>",
        "enable_moe_block": False,
        "eos_token_id": _GEMMA4_ENDS,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 64,
        "head_dim": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_experts": None,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "pad_token_id": "<pad>",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "transformers_version": "5.5.0.dev0",
        "use_bidirectional_attention": "vision",
        "use_double_wide_mlp": False,
        "vocab_size_per_layer_input": 262144,
    },
    generation={
        "bos_token_id": "<bos>",
        "do_sample": True,
        "eos_token_id": _GEMMA4_ENDS,
        "pad_token_id": "<pad>",
        "temperature": 1.0,
        "top_k": 64,
        "top_p": 0.95,
    },
    end="<turn|>",
    tool_end="<|tool_response>",
    kwargs={"enable_thinking": True},
    call_text="<|tool_call>call:add{a:1,b:1}<tool_call|><|tool_call>call:add{a:2,b:3}<tool_call|>",
    call_close="<tool_call|>",
)
"""After calls the model samples the token that begins the result, and goes on in the same turn behind it."""
