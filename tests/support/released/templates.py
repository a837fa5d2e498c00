"""Chat templates of released models: those that TRL and Mistral store, and rebuilt ones of others."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path


@cache
def stored(name: str) -> str:
    """A released template, byte for byte, from the files that TRL compares tokenizers with."""
    package = find_spec("trl")
    assert package is not None, "TRL belongs to the requirements of tests"
    assert package.origin is not None
    return (Path(package.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def mistral_v13(*, thinks: bool) -> str:
    """The template of Mistral's tokenizers of version 13 as its own package makes it, with or without thoughts."""
    from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    return build_chat_template(
        TemplateConfig(
            version=TokenizerVersion.v13,
            spm=False,
            image_support=True,
            audio_support=False,
            thinking_support=thinks,
            plain_thinking_support=False,
            use_special_token_variables=True,
            model_settings_fields=None,
            reasoning_effort_values=None,
            reasoning_effort_default=None,
        )
    )


def qwen3_thinking() -> str:
    """Qwen's template of models that always think (Qwen3-Next, Qwen3-2507): every prompt opens a thought."""
    template, generation = stored("qwen3"), "{%- if add_generation_prompt %}"
    kept, _, _ = template.rpartition(generation)
    return f"{kept}{generation}{{{{- '<|im_start|>assistant\\n<think>\\n' }}}}{{%- endif %}}"


PHI4 = """\
{%- for message in messages %}
    {%- if message.role in ('system', 'user', 'assistant') %}
        {{- '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}"""
"""Leaves out messages of other roles."""

LLAMA2 = """\
{%- set prefix = namespace(text='') %}
{%- if messages[0].role == 'system' %}
    {%- set prefix.text = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- bos_token + '[INST] ' + ((prefix.text if loop.first else '') + message.content).strip() + ' [/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""
"""Each turn of the user begins a sequence; no generation prompt; a blank before the end of the model's turn."""

MISTRAL_SMALL = """\
{%- set loop_messages = messages %}
{%- set system = 'You are Mistral Small 3. The current date is ' + strftime_now('%Y-%m-%d') + '.' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- endif %}
{{- bos_token + '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.role == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- else %}
        {{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""
"""A default system message with today's date, and no role tool."""

MISTRAL_NEMO = """\
{%- set loop_messages = messages %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content %}
    {%- set loop_messages = messages[1:] %}
{%- endif %}
{%- set users = loop_messages | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if message.role not in ('tool', 'tool_results') and not message.tool_calls %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, conversation roles must alternate!') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + (system + '\\n\\n' if loop.last and system is defined else '') + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == 'assistant' %}
        {{- message.content + eos_token }}
    {%- elif message.role in ('tool', 'tool_results') %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]{"content": ' + message.content | string }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported, with an initial optional system message!') }}
    {%- endif %}
{%- endfor %}"""
"""Definitions of tools and the system message stand before the last message of the user; ids of calls are required."""

LLAMA4 = """\
{%- macro turn(role, text) %}
    {{- '<|header_start|>' + role + '<|header_end|>\\n\\n' + text + '<|eot|>' }}
{%- endmacro %}
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {{- turn('system', ('Environment: ipython\\n' if tools else '') + messages[0].content | trim) }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if tools %}
    {%- set question = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|header_start|>user<|header_end|>\\n\\nAnswer with a JSON for a call of one of these functions.\\n\\n' }}
    {%- for tool in tools %}{{- (tool | tojson(indent=4)) + '\\n\\n' }}{%- endfor %}
    {{- question + '<|eot|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('tool', 'ipython') %}
        {{- turn('ipython', message.content | tojson) }}
    {%- elif message.tool_calls %}
        {{- '<|header_start|>assistant<|header_end|>\\n\\n<|python_start|>' + message.content + '<|python_end|>' }}
        {%- for call in message.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "parameters": ' + (call.function.arguments | tojson) + '}' }}
        {%- endfor %}
        {{- '<|eot|>' }}
    {%- else %}
        {{- turn(message.role, message.content | trim) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header_start|>assistant<|header_end|>\\n\\n' }}{%- endif %}"""
"""Definitions of tools stand in the first message of the user; calls follow each other without a separator."""
