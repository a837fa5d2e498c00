"""Layouts of Seed-OSS (a budget of thoughts, rebuilt) and of Ministral 3 (Mistral's own template, beside tekken)."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.support.released.layout import Layout
from tests.support.released.templates import mistral_v13
from tests.support.released.vocabulary import QWEN2_SPLIT, TEKKEN_SPLIT, added, byte_level

_SIZES: dict[str, Any] = {
    "attention_dropout": 0.0,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
}

_SEED_TEMPLATE = """\
{%- set budget = thinking_budget if thinking_budget is defined else -1 %}
{%- if messages[0].role == 'system' or tools %}
    {%- set default = 'You are Doubao, a helpful AI assistant.' %}
    {{- '<seed:bos>system\\n' + (messages[0].content if messages[0].role == 'system' else default) }}
    {%- for tool in tools or [] %}
        {{- '\\n\\nFunction:\\ndef ' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') }}
        {{- '):\\n    \\"\\"\\"\\n    ' + tool.function.description | trim + '\\n    \\"\\"\\"' }}
    {%- endfor %}
    {%- if tools %}{{- '\\n<seed:tool_call>\\n<function=name>\\n</function>\\n</seed:tool_call>\\n' }}{%- endif %}
    {{- '<seed:eos>' }}
{%- endif %}
{%- if budget == 0 %}
    {{- '<seed:bos>system\\nAnswer directly: your thinking budget is 0.<seed:eos>' }}
{%- elif budget > 0 %}
    {{- '<seed:bos>system\\nThink within ' ~ budget ~ ' tokens, and count every ' ~ budget // 4 ~ '.<seed:eos>' }}
{%- endif %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
    {%- if message.role == 'assistant' %}
        {{- '<seed:bos>assistant' }}
        {%- if message.reasoning_content %}
            {{- '\\n<seed:think>' + message.reasoning_content | trim + '</seed:think>' }}
        {%- endif %}
        {%- if message.content and message.content | trim %}
            {{- '\\n' + message.content | trim + ('\\n' if message.tool_calls else '<seed:eos>') }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for call in message.tool_calls %}
                {{- '\\n<seed:tool_call>\\n<function=' + call.function.name + '>\\n' }}
                {%- for key, value in call.function.arguments | items %}
                    {{- '<parameter=' + key + '>' + value | string + '</parameter>\\n' }}
                {%- endfor %}
                {{- '</function>\\n</seed:tool_call>' }}
            {%- endfor %}
            {{- '<seed:eos>' }}
        {%- endif %}
    {%- else %}
        {{- '<seed:bos>' + message.role + '\\n' + message.content + '<seed:eos>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<seed:bos>assistant\\n' + ('<seed:think><seed:cot_budget_reflect>' if budget == 0 else '') }}
{%- endif %}"""
_SEED = (
    *("<seed:bos>", "<seed:pad>", "<seed:eos>", "<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>"),
    *("</seed:cot_budget_reflect>", "<seed:tool_call>", "</seed:tool_call>"),
)
SEED_OSS = Layout(
    name="seed_oss",
    core=partial(byte_level, QWEN2_SPLIT, [*map(added, _SEED)], first=True),
    settings={
        "bos_token": "<seed:bos>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<seed:eos>",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "<seed:pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    },
    template=_SEED_TEMPLATE,
    template_file=True,
    config={
        **_SIZES,
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.1,
        "attention_out_bias": False,
        "bos_token_id": "<seed:bos>",
        "eos_token_id": "<seed:eos>",
        "max_position_embeddings": 524288,
        "mlp_bias": False,
        "model_type": "seed_oss",
        "pad_token_id": "<seed:pad>",
        "residual_dropout": 0.1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 10000000.0,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0",
    },
    generation={
        "bos_token_id": "<seed:bos>",
        "eos_token_id": "<seed:eos>",
        "pad_token_id": "<seed:pad>",
        "temperature": 1.1,
        "top_p": 0.95,
    },
    end="<seed:eos>",
    kwargs={"thinking_budget": 0},
    call_text="\n".join(
        f"<seed:tool_call>\n<function=add>\n<parameter=a>{a}</parameter>\n<parameter=b>{b}</parameter>\n</function>\n"
        "</seed:tool_call>"
        for a, b in ((1, 1), (2, 3))
    ),
    call_close="</seed:tool_call>",
)
"""Every turn begins with the token that begins texts; a turn without content has no end; marks of calls are special."""

_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
    *(f"<SPECIAL_{number}>" for number in range(20, 32)),
    *("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", *(f"<SPECIAL_{number}>" for number in range(36, 40))),
)


def _make_ministral(name: str, *, thinks: bool) -> Layout:
    return Layout(
        name=name,
        core=partial(byte_level, TEKKEN_SPLIT, [*map(added, _TEKKEN)], first=True, bos="<s>"),
        settings={
            "backend": "tokenizers",
            "bos_token": "<s>",
            "clean_up_tokenization_spaces": False,
            "eos_token": "</s>",
            "extra_special_tokens": list(_TEKKEN),
            "model_max_length": 1000000000000000019884624838656,
            "pad_token": "<pad>",
            "processor_class": "PixtralProcessor",
            "tokenizer_class": "TokenizersBackend",
            "unk_token": "<unk>",
        },
        has_decoder=False,
        template=mistral_v13(thinks=thinks),
        template_file=True,
        config={
            "architectures": ["Mistral3ForConditionalGeneration"],
            "dtype": "bfloat16",
            "image_token_index": 10,
            "model_type": "mistral3",
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": {
                **_SIZES,
                "max_position_embeddings": 262144,
                "model_type": "ministral3",
                "rms_norm_eps": 1e-5,
                "rope_parameters": {
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "factor": 16.0,
                    "llama_4_scaling_beta": 0.1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "original_max_position_embeddings": 16384,
                    "rope_theta": 1000000.0,
                    "rope_type": "yarn",
                    "type": "yarn",
                },
                "sliding_window": None,
            },
            "tie_word_embeddings": False,
            "transformers_version": "5.0.0.dev0",
            "vision_feature_layer": -1,
        },
        generation={
            "bos_token_id": "<s>",
            "eos_token_id": "</s>",
            "max_length": 262144,
            "pad_token_id": "<pad>",
        },
        end="</s>",
        call_text='[TOOL_CALLS]add[ARGS]{"a": 1, "b": 1}[TOOL_CALLS]add[ARGS]{"a": 2, "b": 3}',
        call_close="}",
    )


MINISTRAL3 = _make_ministral("ministral_3", thinks=False)
MINISTRAL3_REASONING = _make_ministral("ministral_3_reasoning", thinks=True)
"""The text part of a model that sees images; calls have no ids; thoughts are parts of a message."""
