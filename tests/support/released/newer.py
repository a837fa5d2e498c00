"""Layouts of GLM-4-0414 and GLM-5, Phi-4-mini, OLMo 3, Kimi-K2 (its tokenizer converted), MiniMax-M2, rebuilt."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.support.released.layout import Layout
from tests.support.released.vocabulary import LLAMA3_SPLIT, O200K_SPLIT, added, byte_level
from tests.support.released_configs import OLMO_3_7B

_SIZES: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT: dict[str, Any] = {
    **_SIZES,
    **_EXPERTS,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 8,
}
_SETTINGS: dict[str, Any] = {"clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}

_GLM4_TEMPLATE = """\
[gMASK]<sop>
{%- if tools %}
    {{- '<|system|>\\n# Tools\\n' }}
    {%- for tool in tools %}{{- '\\n## ' + tool.function.name + '\\n' + tool | tojson }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}{{- '<|observation|>\\n' + message.content }}
    {%- else %}{{- '<|' + message.role + '|>\\n' + message.content.split('</think>')[-1] | trim }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
_GLM4 = ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>")
_GLM4 = (*_GLM4, "<|assistant|>", "<|observation|>")
_GLM4_ENDS = ["<|endoftext|>", "<|user|>", "<|observation|>"]
GLM4 = Layout(
    name="glm_4",
    core=partial(byte_level, LLAMA3_SPLIT, [*map(added, _GLM4)]),
    settings={**_SETTINGS, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "model_max_length": 128000},
    template=_GLM4_TEMPLATE,
    config={
        **_SIZES,
        "architectures": ["Glm4ForCausalLM"],
        "attention_bias": True,
        "eos_token_id": _GLM4_ENDS,
        "head_dim": 8,
        "max_position_embeddings": 32768,
        "model_type": "glm4",
        "pad_token_id": "<|endoftext|>",
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "transformers_version": "4.52.0.dev0",
    },
    generation={"eos_token_id": _GLM4_ENDS, "pad_token_id": "<|endoftext|>", "do_sample": True, "top_p": 0.8},
    end="<|user|>",
    calls=0,
)
"""A turn of the model ends with the token that begins the next one; calls of tools are left out."""

_PHI4_MINI_TEMPLATE = """\
{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- else %}{{- eos_token }}{%- endif %}"""
_PHI4_MINI = ("<|endoftext|>", "<|endofprompt|>", "<|assistant|>", "<|end|>", "<|user|>", "<|system|>", "<|tool|>")
PHI4_MINI = Layout(
    name="phi_4_mini",
    core=partial(byte_level, O200K_SPLIT, [added(text, strips=text != "<|endoftext|>") for text in _PHI4_MINI]),
    settings={
        **_SETTINGS,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "model_max_length": 131072,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "<|endoftext|>",
    },
    template=_PHI4_MINI_TEMPLATE,
    config={
        **_SIZES,
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoTokenizer": "Xenova/gpt-4o"},
        "bos_token_id": "<|endoftext|>",
        "eos_token_id": "<|endoftext|>",
        "max_position_embeddings": 131072,
        "model_type": "phi3",
        "original_max_position_embeddings": 4096,
        "pad_token_id": "<|endoftext|>",
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"long_factor": [1.0, 2.0, 4.0], "short_factor": [1.0, 1.0, 1.0], "type": "longrope"},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "transformers_version": "4.45.0",
    },
    generation={
        "bos_token_id": "<|endoftext|>",
        "eos_token_id": ["<|end|>", "<|endoftext|>"],
        "pad_token_id": "<|endoftext|>",
    },
    special_map=True,
    end="<|end|>",
    shows_tools=False,
    calls=0,
)
"""Definitions of tools belong to the system message; a whole conversation ends with <|endoftext|>."""

_OLMO3_TEMPLATE = """\
{%- set functions = '<functions>' + (tools | tojson if tools else '') + '</functions>' %}
{%- if messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are Olmo, a helpful AI assistant. ' + functions + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '<|im_start|>system\\n' + message.content + (' ' + functions if tools else '') + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>environment\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- if message.tool_calls %}
            {{- '<function_calls>' }}
            {%- for call in message.tool_calls %}
                {{- '\\n' if not loop.first else '' }}{{- call.function.name + '(' }}
                {%- for key, value in call.function.arguments.items() %}
                    {{- key + '=' + value | tojson + (', ' if not loop.last else '') }}
                {%- endfor %}
                {{- ')' }}
            {%- endfor %}
            {{- '</function_calls>' }}
        {%- endif %}
        {{- '<|im_end|>\\n' if not loop.last else eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_OLMO3 = (
    *map(added, ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")),
    *(added(text, special=False) for text in ("<functions>", "</functions>", "<function_calls>", "</function_calls>")),
    added("<|pad|>"),
)
OLMO3 = Layout(
    name="olmo_3",
    core=partial(byte_level, LLAMA3_SPLIT, _OLMO3),
    settings={
        **_SETTINGS,
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "model_max_length": 65536,
        "pad_token": "<|pad|>",
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "<|endoftext|>",
    },
    template=_OLMO3_TEMPLATE,
    template_file=True,
    config={
        **_SIZES,
        "architectures": ["Olmo3ForCausalLM"],
        "eos_token_id": "<|endoftext|>",
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "pad_token_id": "<|pad|>",
        "rope_scaling": OLMO_3_7B["rope_scaling"],
        "rope_theta": 500000,
        "sliding_window": 4096,
        "transformers_version": "4.57.1",
    },
    generation={
        "bos_token_id": "<|endoftext|>",
        "do_sample": True,
        "eos_token_id": ["<|im_end|>", "<|endoftext|>"],
        "pad_token_id": "<|pad|>",
        "temperature": 0.6,
    },
    end="<|im_end|>",
    call_text="<function_calls>add(a=1, b=1)\nadd(a=2, b=3)</function_calls>",
    call_close="</function_calls>",
)
"""A default system message; the last turn of a whole conversation ends with <|endoftext|>."""

_KIMI_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}
{%- endif %}
{%- if messages[0].role != 'system' %}
    {{- '<|im_system|>system<|im_middle|>You are Kimi, an AI assistant.<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- set mark = message.role if message.role in ('user', 'assistant') else 'system' %}
    {{- '<|im_' + mark + '|>' + message.role + '<|im_middle|>' }}
    {%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\\n' }}{%- endif %}
    {{- message.content or '' }}
    {%- if message.tool_calls %}
        {{- '<|tool_calls_section_begin|>' }}
        {%- for call in message.tool_calls %}
            {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
            {{- call.function.arguments | tojson + '<|tool_call_end|>' }}
        {%- endfor %}
        {{- '<|tool_calls_section_end|>' }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""
_KIMI = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[PAD]"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
)
KIMI_K2 = Layout(
    name="kimi_k2",
    core=partial(byte_level, O200K_SPLIT, [*map(added, _KIMI)], ignore_merges=True),
    settings={**_SETTINGS, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]"},
    template=_KIMI_TEMPLATE,
    config={
        **_LATENT,
        "architectures": ["DeepseekV3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "bos_token_id": "[BOS]",
        "eos_token_id": "[EOS]",
        "max_position_embeddings": 131072,
        "model_type": "kimi_k2",
        "routed_scaling_factor": 2.827,
    },
    generation={"eos_token_id": "<|im_end|>", "max_length": 131072},
    end="<|im_end|>",
    call_text="<|tool_calls_section_begin|>"
    + "".join(
        f'<|tool_call_begin|>call0000{number}<|tool_call_argument_begin|>{{"a": {a}, "b": {b}}}<|tool_call_end|>'
        for number, a, b in ((1, 1, 1), (2, 2, 3))
    )
    + "<|tool_calls_section_end|>",
    call_close="<|tool_calls_section_end|>",
)
"""Marks of calls are special tokens; transformers knows its model_type only by code."""

_MINIMAX_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else 'You are a helpful assistant.' %}
{{- ']~!b[]~b]system\\n' + system }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n<tool>' + tool.function | tojson + '</tool>' }}{%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '[e~[\\n' }}
{%- for message in messages if message.role != 'system' %}
    {%- if message.role == 'user' %}
        {{- ']~b]user\\n' + message.content + '[e~[\\n' }}
    {%- elif message.role == 'tool' %}
        {{- ']~b]tool' if loop.previtem.role != 'tool' else '' }}
        {{- '\\n<response>' + message.content + '</response>' }}
        {{- '[e~[\\n' if loop.last or loop.nextitem.role != 'tool' else '' }}
    {%- else %}
        {{- ']~b]ai\\n' + (message.content or '').split('</think>')[-1].lstrip('\\n') }}
        {%- if message.tool_calls %}
            {{- '\\n<minimax:tool_call>\\n' }}
            {%- for call in message.tool_calls %}
                {{- '<invoke name="' + call.function.name + '">\\n' }}
                {%- for key, value in call.function.arguments.items() %}
                    {{- '<parameter name="' + key + '">' + value | tojson + '</parameter>\\n' }}
                {%- endfor %}
                {{- '</invoke>\\n' }}
            {%- endfor %}
            {{- '</minimax:tool_call>' }}
        {%- endif %}
        {{- '[e~[\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\\n<think>\\n' }}{%- endif %}"""
_MINIMAX = (
    *map(added, ("]!p~[", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "]~!b[", "]~b]", "[e~[", "]!d~[")),
    *(added(text, special=False) for text in ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>")),
)
MINIMAX_M2 = Layout(
    name="minimax_m2",
    core=partial(byte_level, O200K_SPLIT, _MINIMAX),
    settings={
        **_SETTINGS,
        "bos_token": "]~!b[",
        "eos_token": "[e~[",
        "model_max_length": 40960000,
        "tokenizer_class": "GPT2Tokenizer",
        "unk_token": "]!d~[",
    },
    template=_MINIMAX_TEMPLATE,
    template_file=True,
    config={
        **{key: value for key, value in _SIZES.items() if key != "attention_bias"},
        "architectures": ["MiniMaxM2ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config"},
        "bos_token_id": "]~!b[",
        "eos_token_id": "[e~[",
        "head_dim": 8,
        "max_position_embeddings": 196608,
        "model_type": "minimax_m2",
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "num_mtp_modules": 3,
        "rope_theta": 5000000,
        "rotary_dim": 4,
        "scoring_func": "sigmoid",
        "use_mtp": True,
        "use_routing_bias": True,
    },
    generation={"bos_token_id": "]~!b[", "eos_token_id": "[e~[", "do_sample": True, "temperature": 1.0, "top_k": 40},
    end="[e~[",
    call_text="<minimax:tool_call>\n"
    + "".join(
        f'<invoke name="add">\n<parameter name="a">{a}</parameter>\n<parameter name="b">{b}</parameter>\n</invoke>\n'
        for a, b in ((1, 1), (2, 3))
    )
    + "</minimax:tool_call>",
    call_close="</minimax:tool_call>",
)
"""The prompt opens a thought; results of tools share a turn; an end of turn is followed by a newline."""

_GLM5_TEMPLATE = """\
[gMASK]<sop>
{%- if tools %}
    {{- '<|system|>\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|></think>' + (message.content or '').split('</think>')[-1] | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>' + call.function.name }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<arg_key>' + key + '</arg_key><arg_value>' + value | tojson + '</arg_value>' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>' if loop.previtem.role != 'tool' else '' }}
        {{- '<tool_response>' + message.content + '</tool_response>' }}
    {%- else %}{{- '<|' + message.role + '|>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' + ('</think>' if enable_thinking is defined and not enable_thinking else '<think>') }}
{%- endif %}"""
_GLM5 = (
    *map(added, _GLM4),
    *(added(text, special=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")),
    *(added(text, special=False) for text in ("<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>")),
    *(added(text, special=False) for text in ("<arg_value>", "</arg_value>")),
)
GLM5 = Layout(
    name="glm_5",
    core=partial(byte_level, LLAMA3_SPLIT, _GLM5),
    settings={**_SETTINGS, "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "model_max_length": 202752},
    template=_GLM5_TEMPLATE,
    template_file=True,
    config={
        **_LATENT,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "eos_token_id": _GLM4_ENDS,
        "index_head_dim": 8,
        "index_n_heads": 16,
        "index_topk": 4,
        "indexer_rope_interleave": True,
        "max_position_embeddings": 202752,
        "model_type": "glm_moe_dsa",
        "num_nextn_predict_layers": 1,
        "pad_token_id": "<|endoftext|>",
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5,
    },
    generation={"_from_model_config": True, "eos_token_id": _GLM4_ENDS, "pad_token_id": "<|endoftext|>"},
    end="<|user|>",
    tool_end="<|observation|>",
    kwargs={"enable_thinking": False},
    call_text="".join(
        f"<tool_call>add<arg_key>a</arg_key><arg_value>{a}</arg_value>"
        f"<arg_key>b</arg_key><arg_value>{b}</arg_value></tool_call>"
        for a, b in ((1, 1), (2, 3))
    ),
    call_close="</tool_call>",
)
"""As GLM-4.7's: no newlines around marks, and the prompt opens a thought."""

NEWER = (GLM4, PHI4_MINI, OLMO3, KIMI_K2, MINIMAX_M2, GLM5)
