"""Nemotron 3 Nano: marks of ChatML in tekken's vocabulary, thinking on and off, tools in XML, two end tokens."""

from __future__ import annotations

from functools import partial

from tests.support.nemotron_config import NANO
from tests.support.released.layout import Layout
from tests.support.released.vocabulary import TEKKEN_SPLIT, added, byte_level

_TOKENS = (
    *map(added, ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")),
    *map(added, ("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<|im_start|>", "<|im_end|>")),
    *(added(text, special=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")),
    *(added(text, special=False) for text in ("<tool_response>", "</tool_response>")),
    *(added(f"<SPECIAL_{number}>") for number in range(18, 40)),
)

TEMPLATE = """\
{%- set thinks = enable_thinking if enable_thinking is defined else true %}
{%- set keeps = not truncate_history_thinking if truncate_history_thinking is defined else false %}
{%- set start, end = '<|im_start|>', '<|im_end|>\\n' %}
{%- set has_system = messages[0].role == 'system' %}
{%- set rest = messages[1:] if has_system else messages %}
{%- set ns = namespace(last=-1) %}
{%- for message in rest %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{{- start + 'system\\n' + (messages[0].content if has_system else '') }}
{%- if tools %}
    {{- ('\\n\\n' if has_system else '') + '# Tools\\n\\nThese functions can be called:\\n\\n<tools>' }}
    {%- for tool in tools %}
        {%- set function = tool.function if tool.function is defined else tool %}
        {{- '\\n<function>\\n<name>' + function.name + '</name>' }}
        {%- if function.description %}{{- '\\n<description>' + function.description + '</description>' }}{%- endif %}
        {{- '\\n<parameters>' }}
        {%- for name, fields in function.parameters.properties | items %}
            {{- '\\n<parameter>\\n<name>' + name + '</name>\\n<type>' + fields.type | string + '</type>' }}
            {%- if fields.description %}{{- '\\n<description>' + fields.description + '</description>' }}{%- endif %}
            {{- '\\n</parameter>' }}
        {%- endfor %}
        {{- '\\n<required>' + (function.parameters.required | tojson) + '</required>\\n</parameters>\\n</function>' }}
    {%- endfor %}
    {{- '\\n</tools>\\n\\nA call is <tool_call>, <function=name>, and <parameter=name> for each argument.' }}
{%- endif %}
{{- end }}
{%- for message in rest %}
    {%- if message.role == 'assistant' %}
        {%- set text = message.content if message.content is string else '' %}
        {%- if message.reasoning_content is string %}
            {%- set text = '<think>\\n' + message.reasoning_content + '\\n</think>\\n' + text %}
        {%- endif %}
        {%- if '<think>' not in text and '</think>' not in text %}{%- set text = '<think></think>' + text %}{%- endif %}
        {%- if loop.index0 < ns.last and not keeps %}
            {%- set text = '<think></think>' + text.split('</think>')[-1].lstrip() %}
        {%- endif %}
        {{- start + 'assistant\\n' + text.strip() + ('\\n' if message.tool_calls else '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>\\n' }}
        {%- endfor %}
        {{- end }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or rest[loop.index0 - 1].role != 'tool' %}{{- start + 'user\\n' }}{%- endif %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response>\\n' }}
        {%- if loop.last or rest[loop.index0 + 1].role != 'tool' %}{{- end }}{%- endif %}
    {%- else %}
        {{- start + message.role + '\\n' + message.content + end }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- start + 'assistant\\n' + ('<think>\\n' if thinks else '<think></think>') }}
{%- endif %}"""
"""Behaves as the released one: a system message always, each answer begins with its reasoning or an empty one."""

NEMOTRON3_NANO = Layout(
    name="nemotron_3_nano",
    core=partial(byte_level, TEKKEN_SPLIT, _TOKENS, first=True),
    settings={
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "extra_special_tokens": {},
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 262144,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
    },
    template=TEMPLATE,
    template_file=True,
    config={
        **{key: value for key, value in NANO.items() if key != "vocab_size"},
        "bos_token_id": "<s>",
        "eos_token_id": "</s>",
        "head_dim": 8,
        "hidden_size": 32,
        "hybrid_override_pattern": "ME*E",
        "intermediate_size": 48,
        "mamba_head_dim": 8,
        "mamba_num_heads": 4,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 32,
        "n_groups": 2,
        "n_routed_experts": 4,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 4,
        "pad_token_id": "<unk>",
        "ssm_state_size": 16,
    },
    generation={
        "_from_model_config": True,
        "bos_token_id": "<s>",
        "do_sample": True,
        "eos_token_id": ["</s>", "<|im_end|>"],
        "pad_token_id": "<unk>",
    },
    special_map=True,
    end="<|im_end|>",
    kwargs={"enable_thinking": False},
    call_text="".join(
        f"<tool_call>\n<function=add>\n<parameter=a>\n{a}\n</parameter>\n<parameter=b>\n{b}\n</parameter>\n</function>\n"
        "</tool_call>\n"
        for a, b in ((1, 1), (2, 3))
    ).strip(),
    call_close="</tool_call>\n",
)
"""config.json names another end token than the template's; generation_config.json names both."""
