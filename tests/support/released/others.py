"""Layouts with marks of their own: Gemma 3, Mistral Nemo and Small, GLM-4.5, gpt-oss."""

from __future__ import annotations

from functools import partial

from tests.support.released.layout import Layout
from tests.support.released.templates import MISTRAL_NEMO, MISTRAL_SMALL, stored
from tests.support.released.vocabulary import (
    LLAMA3_SPLIT,
    O200K_SPLIT,
    TEKKEN_SPLIT,
    added,
    byte_fallback,
    byte_level,
)

_SIZES = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "use_cache": True,
}

_GEMMA3 = (
    *map(added, ("<pad>", "<eos>", "<bos>", "<unk>")),
    *(added(text, special=False) for text in ("<mask>", "[multimodal]", "<unused0>", "<unused1>")),
    *map(added, ("<start_of_turn>", "<end_of_turn>")),
    *(added("\n" * count, special=False) for count in range(1, 5)),
    *(added("▁" * count, special=False) for count in range(2, 5)),
    *(added(text, special=False) for text in ("<table>", "</table>", "<code>", "</code>")),
    *map(added, ("<start_of_image>", "<end_of_image>")),
)
GEMMA3 = Layout(
    name="gemma_3",
    core=partial(byte_fallback, _GEMMA3, bos="<bos>", prepends=False),
    settings={
        "add_bos_token": True,
        "add_eos_token": False,
        "boi_token": "<start_of_image>",
        "bos_token": "<bos>",
        "clean_up_tokenization_spaces": False,
        "eoi_token": "<end_of_image>",
        "eos_token": "<eos>",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<pad>",
        "sp_model_kwargs": None,
        "spaces_between_special_tokens": False,
        "tokenizer_class": "GemmaTokenizer",
        "unk_token": "<unk>",
        "use_default_system_prompt": False,
    },
    template=stored("gemma3"),
    config={
        **_SIZES,
        "architectures": ["Gemma3ForCausalLM"],
        "attn_logit_softcapping": None,
        "bos_token_id": "<bos>",
        "eos_token_id": ["<eos>", "<end_of_turn>"],
        "final_logit_softcapping": None,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "pad_token_id": "<pad>",
        "query_pre_attn_scalar": 16,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0",
    },
    generation={
        "bos_token_id": "<bos>",
        "cache_implementation": "hybrid",
        "do_sample": True,
        "eos_token_id": ["<eos>", "<end_of_turn>"],
        "pad_token_id": "<pad>",
        "top_k": 64,
        "top_p": 0.95,
    },
    special_map=True,
    end="<end_of_turn>",
    shows_tools=False,
    calls=0,
    tool_role="refused",
)
"""The system message goes into the first message of the user; the assistant's role is `model`."""

_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
    *(f"<SPECIAL_{number}>" for number in range(20, 40)),
)
_MISTRAL_SIZES = {
    **_SIZES,
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": "<s>",
    "eos_token_id": "</s>",
    "head_dim": 8,
    "hidden_act": "silu",
    "model_type": "mistral",
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_MISTRAL_SETTINGS = {
    "add_prefix_space": False,
    "bos_token": "<s>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
MISTRAL_NEMO_12B = Layout(
    name="mistral_nemo",
    core=partial(byte_level, TEKKEN_SPLIT, [*map(added, _TEKKEN)], first=True, bos="<s>"),
    settings={
        **_MISTRAL_SETTINGS,
        "model_max_length": 1000000000000000019884624838656,
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
    template=MISTRAL_NEMO,
    config={
        **_MISTRAL_SIZES,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "transformers_version": "4.43.0.dev0",
    },
    generation={"bos_token_id": "<s>", "eos_token_id": "</s>"},
    special_map=True,
    end="</s>",
    call_text=(
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 1}, "id": "call00001"}, '
        '{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "call00002"}]'
    ),
    call_close='"}]',
)
MISTRAL_SMALL_24B = Layout(
    name="mistral_small",
    core=MISTRAL_NEMO_12B.core,
    settings={
        **_MISTRAL_SETTINGS,
        "add_bos_token": True,
        "add_eos_token": False,
        "legacy": True,
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<pad>",
        "sp_model_kwargs": {},
        "tokenizer_class": "LlamaTokenizer",
        "use_default_system_prompt": False,
    },
    template=MISTRAL_SMALL,
    config={
        **_MISTRAL_SIZES,
        "max_position_embeddings": 32768,
        "rope_theta": 100000000.0,
        "transformers_version": "4.49.0.dev0",
    },
    generation={"bos_token_id": "<s>", "eos_token_id": "</s>"},
    special_map=True,
    end="</s>",
    shows_tools=False,
    calls=0,
    tool_role="refused",
)
"""A class for sentencepiece beside a byte-level tokenizer.json whose special tokens come first."""

_GLM = (
    *map(added, ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>")),
    *map(added, ("<|assistant|>", "<|observation|>", "<|begin_of_image|>", "<|end_of_image|>")),
    *map(added, ("<|begin_of_video|>", "<|end_of_video|>", "<|begin_of_audio|>", "<|end_of_audio|>")),
    *map(added, ("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>")),
    *(added(text, special=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")),
    *(added(text, special=False) for text in ("<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>")),
    *(added(text, special=False) for text in ("<arg_value>", "</arg_value>")),
    *map(added, ("/nothink", "<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>")),
)
GLM4_5 = Layout(
    name="glm_4_5",
    core=partial(byte_level, LLAMA3_SPLIT, _GLM),
    settings={
        "additional_special_tokens": [token.content for token in _GLM[:19]],
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "model_max_length": 128000,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "remove_space": False,
        "tokenizer_class": "PreTrainedTokenizer",
    },
    template=stored("glm4moe"),
    template_file=True,
    config={
        **_SIZES,
        "architectures": ["Glm4MoeForCausalLM"],
        "eos_token_id": ["<|endoftext|>", "<|user|>", "<|observation|>"],
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "model_type": "glm4_moe",
        "moe_intermediate_size": 16,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_nextn_predict_layers": 1,
        "pad_token_id": "<|endoftext|>",
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.54.0",
        "use_qk_norm": False,
    },
    generation={
        "_from_model_config": True,
        "eos_token_id": ["<|endoftext|>", "<|user|>", "<|observation|>"],
        "pad_token_id": "<|endoftext|>",
    },
    end="<|user|>",
    tool_end="<|observation|>",
    kwargs={"enable_thinking": False},
    call_text="\n".join(
        f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{a}</arg_value>\n<arg_key>b</arg_key>\n"
        f"<arg_value>{b}</arg_value>\n</tool_call>"
        for a, b in ((1, 1), (2, 3))
    ),
    call_close="</tool_call>",
)
"""A turn of the model ends with the token that begins the next one: <|user|>, or <|observation|> after calls."""

_HARMONY = (
    *("<|startoftext|>", "<|endoftext|>", "<|reserved_200000|>", "<|reserved_200001|>", "<|return|>", "<|constrain|>"),
    *("<|reserved_200004|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|reserved_200009|>"),
    *("<|reserved_200010|>", "<|reserved_200011|>", "<|call|>", "<|reserved_200013|>", "<|reserved_200014|>"),
    *("<|reserved_200015|>", "<|reserved_200016|>", "<|reserved_200017|>", "<|endofprompt|>"),
)
GPT_OSS = Layout(
    name="gpt_oss",
    core=partial(byte_level, O200K_SPLIT, [*map(added, _HARMONY)], ignore_merges=True),
    settings={
        "bos_token": "<|startoftext|>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|return|>",
        "extra_special_tokens": {},
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
    template=stored("gptoss"),
    template_file=True,
    config={
        **_SIZES,
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "eos_token_id": "<|return|>",
        "experts_per_token": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "output_router_logits": False,
        "pad_token_id": "<|endoftext|>",
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.55.0.dev0",
    },
    generation={
        "bos_token_id": "<|startoftext|>",
        "do_sample": True,
        "eos_token_id": ["<|return|>", "<|endoftext|>", "<|call|>"],
        "pad_token_id": "<|endoftext|>",
    },
    special_map=True,
    end="<|return|>",
    tool_end="<|call|>",
    kwargs={"reasoning_effort": "low"},
    calls=1,
    call_text='<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 1}',
    call_close='"b": 1}',
)
"""Turns have channels; the end that the model samples, <|return|>, is <|end|> in later prompts."""
