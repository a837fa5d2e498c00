"""Layouts of Llama models and of models distilled into them: Llama 3.1, 3.2, DeepSeek-R1's distillations, Llama 2."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.support.released.layout import Layout, token_entry
from tests.support.released.templates import LLAMA2, stored
from tests.support.released.vocabulary import LLAMA3_SPLIT, QWEN2_SPLIT, added, byte_fallback, byte_level

# Heads have 32 elements, the least of vLLM's attention on CPUs.
_SIZES = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_LLAMA3_ROPE = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _reserved(*numbers: int) -> list[str]:
    return [f"<|reserved_special_token_{number}|>" for number in numbers]


_LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>", *_reserved(0, 1), "<|finetune_right_pad_id|>", *_reserved(2)),
    *(
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
        *_reserved(*range(3, 12)),
    ),
)
_LLAMA3_CALL = '{"name": "add", "parameters": {"a": 1, "b": 1}}'


def _llama3(name: str, template: str, factor: float, **config: Any) -> Layout:
    return Layout(
        name=name,
        core=partial(byte_level, LLAMA3_SPLIT, [*map(added, _LLAMA3)], bos="<|begin_of_text|>", ignore_merges=True),
        settings={
            "bos_token": "<|begin_of_text|>",
            "clean_up_tokenization_spaces": True,
            "eos_token": "<|eot_id|>",
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": 131072,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        template=stored(template),
        config={
            **_SIZES,
            "architectures": ["LlamaForCausalLM"],
            "bos_token_id": "<|begin_of_text|>",
            "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
            "max_position_embeddings": 131072,
            "mlp_bias": False,
            "model_type": "llama",
            "rope_scaling": {**_LLAMA3_ROPE, "factor": factor},
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            **config,
        },
        generation={
            "bos_token_id": "<|begin_of_text|>",
            "do_sample": True,
            "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
            "temperature": 0.6,
            "top_p": 0.9,
        },
        special_map=True,
        end="<|eot_id|>",
        kwargs={"date_string": "01 Jan 2026"},
        calls=1,
        call_text=_LLAMA3_CALL,
        call_close='"b": 1}}',
    )


LLAMA3_1 = _llama3("llama_3_1", "llama3_1", 8.0, transformers_version="4.42.3")
LLAMA3_2 = _llama3(
    "llama_3_2", "llama3_2", 32.0, head_dim=32, tie_word_embeddings=True, transformers_version="4.45.0.dev0"
)
"""Its system message has today's date."""

_BEGIN, _END, _USER, _ASSISTANT = (
    f"<｜{name}｜>" for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")
)


def _distill_settings() -> dict[str, Any]:
    return {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": token_entry(_BEGIN, normalized=True),
        "clean_up_tokenization_spaces": False,
        "eos_token": token_entry(_END, normalized=True),
        "legacy": True,
        "model_max_length": 16384,
        "pad_token": token_entry(_END, normalized=True),
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizerFast",
        "unk_token": None,
    }


_DISTILL_SAMPLING = {
    "_from_model_config": True,
    "bos_token_id": _BEGIN,
    "do_sample": True,
    "eos_token_id": _END,
    "temperature": 0.6,
    "top_p": 0.95,
}
_DISTILL_LLAMA = (
    *map(added, (_BEGIN, _END, *_reserved(0, 1), "<|finetune_right_pad_id|>", *_reserved(2), "<|start_header_id|>")),
    *map(added, ("<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>")),
    *(added(text, special=False) for text in (_USER, _ASSISTANT, "<think>", "</think>")),
    added("<｜▁pad▁｜>"),
    *map(added, _reserved(*range(8, 14))),
)
R1_LLAMA = Layout(
    name="r1_distill_llama",
    core=partial(byte_level, LLAMA3_SPLIT, _DISTILL_LLAMA, bos=_BEGIN, ignore_merges=True),
    settings=_distill_settings(),
    has_decoder=False,
    template=stored("deepseek_r1_distill"),
    config={
        **_SIZES,
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": _BEGIN,
        "eos_token_id": _END,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "rope_scaling": _LLAMA3_ROPE,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.43.0.dev0",
    },
    generation=_DISTILL_SAMPLING,
    end=_END,
    shows_tools=False,
    calls=0,
)
"""A class for sentencepiece beside a byte-level tokenizer.json; each prompt opens <think>."""

_DISTILL_QWEN = (
    added(_END),
    *(added(text, special=False) for text in (_USER, _ASSISTANT)),
    added(_BEGIN),
    added("<|EOT|>", special=False),
    *(added(text, special=False) for text in ("<think>", "</think>")),
    *map(added, ("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")),
    *map(added, ("<|image_pad|>", "<|video_pad|>")),
    *(added(text, special=False) for text in ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>")),
    *(added(text, special=False) for text in ("<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")),
)
R1_QWEN = Layout(
    name="r1_distill_qwen",
    core=partial(byte_level, QWEN2_SPLIT, _DISTILL_QWEN, nfc=True, bos=_BEGIN),
    settings=_distill_settings(),
    has_decoder=False,
    template=stored("deepseek_r1_distill"),
    config={
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": _END,
        "eos_token_id": _END,
        "hidden_act": "silu",
        "hidden_size": 32,
        "initializer_range": 0.02,
        "intermediate_size": 48,
        "max_position_embeddings": 131072,
        "max_window_layers": 2,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.44.0",
        "use_cache": True,
        "use_mrope": False,
        "use_sliding_window": False,
    },
    generation=_DISTILL_SAMPLING,
    end=_END,
    shows_tools=False,
    calls=0,
)

LLAMA2_CHAT = Layout(
    name="llama_2",
    core=partial(byte_fallback, [*map(added, ("<unk>", "<s>", "</s>"))], bos="<s>", prepends=True),
    settings={
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": token_entry("<s>"),
        "clean_up_tokenization_spaces": False,
        "eos_token": token_entry("</s>"),
        "legacy": False,
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": None,
        "padding_side": "right",
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
        "unk_token": token_entry("<unk>"),
    },
    has_decoder=False,
    template=LLAMA2,
    config={
        **_SIZES,
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": "<s>",
        "eos_token_id": "</s>",
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.32.0.dev0",
    },
    generation={
        "bos_token_id": "<s>",
        "do_sample": True,
        "eos_token_id": "</s>",
        "max_length": 4096,
        "pad_token_id": "<unk>",
        "temperature": 0.6,
        "top_p": 0.9,
    },
    special_map=True,
    end="</s>",
    shows_tools=False,
    calls=0,
    tool_role="refused",
)
