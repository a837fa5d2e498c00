"""Layouts with <|im_start|> and <|im_end|>: Qwen2.5, its base model, Qwen3, Qwen3.5, Phi-4."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tests.support.released.layout import Layout
from tests.support.released.templates import PHI4 as PHI4_TEMPLATE
from tests.support.released.templates import qwen3_thinking, stored
from tests.support.released.vocabulary import LLAMA3_SPLIT, QWEN2_SPLIT, QWEN3_5_SPLIT, added, byte_level

_CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MEDIA = (
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_ORDINARY = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
)
_THINKING = ("<tool_response>", "</tool_response>", "<think>", "</think>")
_AUDIO = ("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>")

_QWEN2_5 = [*map(added, (*_CHAT, *_MEDIA)), *(added(text, special=False) for text in _ORDINARY)]
_QWEN3 = [*_QWEN2_5, *(added(text, special=False) for text in _THINKING)]
_QWEN3_5 = [*_QWEN3, *map(added, _AUDIO), added("<|audio_pad|>")]

_SIZES = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_cache": True,
}
_QWEN2_CONFIG = {
    **_SIZES,
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": "<|endoftext|>",
    "max_position_embeddings": 32768,
    "max_window_layers": 2,
    "model_type": "qwen2",
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_sliding_window": False,
}


def _qwen_settings(eos: str, **changes: Any) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>", *_MEDIA],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "errors": "replace",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        **changes,
    }


def _sampling(**figures: float) -> dict[str, Any]:
    eos = ["<|im_end|>", "<|endoftext|>"]
    ids: dict[str, Any] = {"bos_token_id": "<|endoftext|>", "eos_token_id": eos, "pad_token_id": "<|endoftext|>"}
    return {**ids, "do_sample": True, **figures}


_JSON_CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
)
_XML_CALLS = "\n".join(
    f"<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n{b}\n</parameter>\n</function>\n"
    "</tool_call>"
    for a, b in ((1, 1), (2, 3))
)

QWEN2_5 = Layout(
    name="qwen2_5",
    core=partial(byte_level, QWEN2_SPLIT, _QWEN2_5, nfc=True),
    settings=_qwen_settings("<|im_end|>"),
    template=stored("qwen2_5"),
    config={**_QWEN2_CONFIG, "eos_token_id": "<|im_end|>"},
    generation=_sampling(repetition_penalty=1.05, temperature=0.7, top_p=0.8, top_k=20),
    end="<|im_end|>",
    call_text=_JSON_CALLS,
    call_close="</tool_call>",
)
QWEN2_5_BASE = Layout(
    name="qwen2_5_base",
    core=QWEN2_5.core,
    settings=_qwen_settings("<|endoftext|>"),
    template=stored("qwen2_5"),
    config={**_QWEN2_CONFIG, "eos_token_id": "<|endoftext|>"},
    generation={
        "bos_token_id": "<|endoftext|>",
        "do_sample": False,
        "eos_token_id": "<|endoftext|>",
        "max_new_tokens": 2048,
    },
    end="<|im_end|>",
    call_text=_JSON_CALLS,
    call_close="</tool_call>",
)
"""Its template ends turns with <|im_end|>, and its end token is <|endoftext|>."""

_QWEN3_CONFIG: Mapping[str, Any] = {
    **_SIZES,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": "<|endoftext|>",
    "eos_token_id": "<|im_end|>",
    "head_dim": 16,
    "max_position_embeddings": 40960,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_sliding_window": False,
}
QWEN3 = Layout(
    name="qwen3",
    core=partial(byte_level, QWEN2_SPLIT, _QWEN3, nfc=True),
    settings=_qwen_settings("<|im_end|>"),
    template=stored("qwen3"),
    config=_QWEN3_CONFIG,
    generation=_sampling(temperature=0.6, top_k=20, top_p=0.95),
    end="<|im_end|>",
    kwargs={"enable_thinking": False},
    call_text=_JSON_CALLS,
    call_close="</tool_call>",
)
QWEN3_5 = Layout(
    name="qwen3_5",
    core=partial(byte_level, QWEN3_5_SPLIT, _QWEN3_5, nfc=True),
    settings=_qwen_settings("<|im_end|>", audio_bos_token="<|audio_start|>", audio_eos_token="<|audio_end|>"),
    template=stored("qwen3_5_think"),
    template_file=True,
    config={
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": "<|image_pad|>",
        "model_type": "qwen3_5",
        "text_config": {
            **_SIZES,
            "attention_bias": False,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": "<|endoftext|>",
            "full_attention_interval": 2,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 8,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_5_text",
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [1, 1, 0],
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
            },
        },
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
    },
    generation=_sampling(temperature=0.6, top_k=20, top_p=0.95),
    end="<|im_end|>",
    kwargs={"enable_thinking": False},
    call_text=_XML_CALLS,
    call_close="</tool_call>",
)

_QWEN3_NEXT_CONFIG: Mapping[str, Any] = {
    **_SIZES,
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": "<|endoftext|>",
    "decoder_sparse_step": 1,
    "eos_token_id": "<|im_end|>",
    "full_attention_interval": 2,
    "head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 16,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_sliding_window": False,
}
QWEN3_NEXT = Layout(
    name="qwen3_next",
    core=QWEN3.core,
    settings=_qwen_settings("<|im_end|>"),
    template=stored("qwen3_instruct_2507"),
    config=_QWEN3_NEXT_CONFIG,
    generation=_sampling(temperature=0.7, top_k=20, top_p=0.8),
    end="<|im_end|>",
    call_text=_JSON_CALLS,
    call_close="</tool_call>",
)
QWEN3_NEXT_THINKING = Layout(
    name="qwen3_next_thinking",
    core=QWEN3.core,
    settings=_qwen_settings("<|im_end|>"),
    template=qwen3_thinking(),
    template_file=True,
    config=_QWEN3_NEXT_CONFIG,
    generation=_sampling(temperature=0.6, top_k=20, top_p=0.95),
    end="<|im_end|>",
    call_text=_JSON_CALLS,
    call_close="</tool_call>",
)
"""Two models of one form: the second always thinks, and its prompts open the thought."""

_FIM = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
_PHI4_ORDER = (
    *("<|dummy_0|>", "<|endoftext|>", *_FIM, "<|dummy_1|>", "<|dummy_2|>", "<|dummy_3|>"),
    *("<|im_start|>", "<|im_end|>", "<|im_sep|>", *(f"<|dummy_{number}|>" for number in range(4, 13))),
    *("<|endofprompt|>", *(f"<|dummy_{number}|>" for number in range(13, 88))),
)
PHI4 = Layout(
    name="phi_4",
    core=partial(byte_level, LLAMA3_SPLIT, [added(text, strips=True) for text in _PHI4_ORDER]),
    settings={
        "add_prefix_space": False,
        "bos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 16384,
        "pad_token": "<|dummy_85|>",
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "<|endoftext|>",
    },
    template=PHI4_TEMPLATE,
    config={
        **_SIZES,
        "architectures": ["Phi3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": "<|endoftext|>",
        "embd_pdrop": 0.0,
        "eos_token_id": "<|im_end|>",
        "max_position_embeddings": 16384,
        "model_type": "phi3",
        "original_max_position_embeddings": 16384,
        "pad_token_id": "<|dummy_85|>",
        "resid_pdrop": 0.0,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.47.0",
    },
    generation={
        "bos_token_id": "<|endoftext|>",
        "eos_token_id": ["<|im_end|>"],
        "pad_token_id": "<|dummy_85|>",
    },
    special_map=True,
    end="<|im_end|>",
    shows_tools=False,
    calls=0,
    tool_role="left out",
)
"""Its added tokens swallow the blanks beside them; its class rebuilds another pre-tokenizer."""
