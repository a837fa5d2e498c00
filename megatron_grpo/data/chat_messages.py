"""Reads messages of conversations in every form of data: contents, thoughts, tools, marks for the loss, prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_grpo.data.image_rows import has_images

ChatMessage = Mapping[str, Any]
"""A message for a chat template: role, content, and whatever else the template reads."""

ASSISTANT = "assistant"
# Names of a message's thoughts: `reasoning_content` in most templates, `reasoning` in newer clients, `thinking` in the
# template of gpt-oss.
REASONING = ("reasoning_content", "reasoning", "thinking")
# Names of a turn's mark for the loss: `weight` in OpenAI's format, `loss_mask` in verl's, `loss` in ms-swift's, the
# others in axolotl's and LlamaFactory's. 0 or false leaves the turn out.
LOSS_MARKS = ("weight", "loss_mask", "loss", "train", "trainable", "training")
# Names that roles had before or have since, for templates that know one name alone.
OTHER_NAMES = {"developer": "system", "function": "tool"}
TOOLS = "tools"  # column of a row with definitions of tools, which replace the task's


def normalize_message(message: ChatMessage, number: int = 1, *, keeps_parts: bool = False) -> dict[str, Any]:
    """Bring a message into the form that chat templates read.

    Null keys and marks for the loss are left out, arguments of calls are objects, thoughts stand under all their names,
    and text parts are joined unless `keeps_parts`. ValueError: the content, thoughts or calls cannot be read.
    """
    # Clients of APIs send null for a key that a message lacks, and a template may write it as "None".
    plain = {name: value for name, value in message.items() if value is not None and name not in LOSS_MARKS}
    if "function_call" in plain:  # the older name of a single call
        plain["tool_calls"] = [{"type": "function", "function": plain.pop("function_call")}]
    calls = plain.pop("tool_calls", None)
    if calls:
        if not isinstance(calls, list):
            raise ValueError(f"message {number} has {type(calls).__name__} as its tool_calls; give a list")
        plain["tool_calls"] = [parse_arguments(call) for call in calls]
    content = plain.get("content")
    if content is None and calls:
        plain["content"] = None
    elif "content" not in message:
        plain["content"] = ""
    elif isinstance(content, list) and not (keeps_parts and (are_text_parts(content) or has_images(content))):
        plain["content"] = join_content(content, number)
    elif not isinstance(content, str | list):
        kind = "null" if content is None else type(content).__name__
        raise ValueError(f"message {number} has {kind} as its content; give text")
    if thoughts := _read_thoughts(plain, number):
        plain |= dict.fromkeys(REASONING, thoughts)
        if plain["content"] and calls:  # gpt-oss' template refuses thinking beside a text with calls
            del plain["thinking"]
    return plain


def _read_thoughts(message: ChatMessage, number: int) -> str:
    texts = {name: message[name] for name in REASONING if message.get(name)}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ValueError(f"message {number} has {type(text).__name__} as its {name}; give text")
    if len(set(texts.values())) > 1:
        raise ValueError(f"message {number} has different thoughts in {' and '.join(texts)}; give them once")
    return next(iter(texts.values()), "")


def join_content(content: Any, number: int = 1) -> str:
    """Join a message's content, which may be text parts or null.

    Parts are joined with line breaks, as vLLM's server does. `number` is that of the message, for the error.

    ValueError: a part is not text.
    """
    if not isinstance(content, list):
        return "" if content is None else str(content)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else part
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise ValueError(f"message {number} has a content part of type {kind!r}; only text parts can be read")
        texts.append(text)
    return "\n".join(texts)


def are_text_parts(content: Any) -> bool:
    """True for a non-empty list of {"type": "text", "text": ...}."""
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    return bool(parts) and len(texts) == len(parts) and all(isinstance(text, str) for text in texts)


def is_conversation(value: Any) -> bool:
    """True for {role, content} messages; tool calls may replace a content."""
    return are_turns(value) and all(isinstance(turn["role"], str) and has_text(turn) for turn in value)


def are_turns(value: Any) -> bool:
    """True for a list of messages whose contents may be of any type."""
    turns = value if isinstance(value, list) else []
    return bool(turns) and all(
        isinstance(turn, dict) and "role" in turn and ("content" in turn or _has_calls(turn)) for turn in turns
    )


def has_text(turn: ChatMessage) -> bool:
    """True if a message's content is text, text parts, or null beside calls."""
    content = turn.get("content")
    return isinstance(content, str) or are_text_parts(content) or (content is None and _has_calls(turn))


def _has_calls(turn: ChatMessage) -> bool:
    return bool(turn.get("tool_calls") or turn.get("function_call"))


def parse_arguments(call: Any) -> Any:
    """Parse a tool call's arguments, which agents send as JSON text."""
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    parsed = {**function, "arguments": arguments}
    return {**call, "function": parsed} if "function" in call else parsed


def parse_tools(value: Any) -> list[dict[str, Any]]:
    """Read definitions of tools: a list or its JSON text.

    Members may be JSON texts too, as tables of one type have them. ValueError: the value is something else.
    """
    tools = _parse_json(value)
    tools = [_parse_json(tool) for tool in tools] if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("is not a list of tool definitions: [{...}, ...]")
    return tools


def read_row_tools(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Read a row's own tools; None: it has none.

    ValueError: the column is no list of tools.
    """
    value = row.get(TOOLS)
    try:
        return None if value is None or value == "" else parse_tools(value)
    except ValueError as error:
        raise ValueError(f"column {TOOLS!r} {error}; give it another name if it is not for the chat template") from None


def _parse_json(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {error}") from None


def is_learnt(message: ChatMessage, number: int) -> bool:
    """True for a turn of the assistant that no mark leaves out.

    ValueError: a mark is neither 0 nor 1, two contradict each other, or another role's message is to be learnt.
    """
    marks = {name: message[name] for name in LOSS_MARKS if message.get(name) is not None}
    role = message.get("role")
    for name, value in marks.items():
        if isinstance(value, str | list | dict) or value not in (0, 1):
            raise ValueError(f"message {number} has {name}={value!r}; give 0 or 1, since a turn is learnt or not")
        if value and role != ASSISTANT:
            text = f"message {number}, of the role {role}, has {name}={value!r}"
            raise ValueError(f"{text}, and only the assistant's turns can be learnt; leave that out")
    if len(set(map(bool, marks.values()))) > 1:
        raise ValueError(f"message {number} is learnt by one of {' and '.join(marks)} and left out by another")
    if message.get("train_detail"):
        raise ValueError(f"message {number} has train_detail; a turn can only be learnt as a whole")
    return role == ASSISTANT and all(marks.values())


def is_open(messages: Sequence[ChatMessage]) -> bool:
    """True if a conversation ends in the assistant's turn."""
    return bool(messages) and messages[-1].get("role") == ASSISTANT


def join_turns(earlier: Sequence[ChatMessage], later: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Join a prompt and what follows it; an open turn goes on.

    ValueError: the open turn has calls of tools, whose results would have to follow.
    """
    if not (later and is_open(earlier) and later[0].get("role") == ASSISTANT):
        return [*earlier, *later]
    begin, end = earlier[-1], later[0]
    require_continuable(earlier)
    content = join_content(begin.get("content")) + join_content(end.get("content"))
    parts = {name: value for name, value in begin.items() if name not in LOSS_MARKS}
    joined = {**parts, **{name: value for name, value in end.items() if value is not None}, "content": content}
    return [*earlier[:-1], joined, *later[1:]]


def require_continuable(messages: Sequence[ChatMessage]) -> None:
    """Require that the assistant's last turn can go on; ValueError about calls."""
    if _has_calls(messages[-1]):
        text = f"message {len(messages)}, the assistant's and the last, has calls of tools, so no text can follow it"
        raise ValueError(f"{text}; add their results")


def separate_prompt(
    prompt: str | Sequence[ChatMessage] | None, responses: Sequence[str | Sequence[ChatMessage]]
) -> tuple[str | Sequence[ChatMessage], list[str | Sequence[ChatMessage]]]:
    """Separate a row's prompt from responses that may be whole conversations.

    As in TRL, the prompt of whole conversations is their common beginning, whatever column of text is beside them. Of a
    single conversation it is what precedes the first turn of the assistant.

    ValueError: the conversations do not belong to the prompt.
    """
    conversations = [response for response in responses if not isinstance(response, str)]
    are_replies = all(_is_reply(prompt, conversation) for conversation in conversations)
    is_whole = len(conversations) == len(responses) and not are_replies
    if not is_whole:
        assert prompt is not None, "responses without a prompt are conversations"
        return prompt, list(responses)
    count = _count_common(conversations)
    beginning = conversations[0][:count]
    if not isinstance(prompt, str) and prompt is not None:
        if any(list(conversation[: len(prompt)]) != list(prompt) for conversation in conversations):
            raise ValueError("the responses are whole conversations, and do not begin with the messages of the prompt")
        beginning, count = prompt, len(prompt)
    text = "".join(prompt.split()) if isinstance(prompt, str) else ""
    if text and text not in "".join("".join(join_content(message.get("content")).split()) for message in beginning):
        raise ValueError("the responses are whole conversations, whose common beginning lacks the text of the prompt")
    return beginning, [conversation[count:] for conversation in conversations]


def _count_common(conversations: Sequence[Sequence[ChatMessage]]) -> int:
    """Count the first messages that conversations share; of one, those before its first answer."""
    if len(conversations) == 1:
        is_same = [message.get("role") != ASSISTANT for message in conversations[0]]
    else:
        is_same = [messages[0] == messages[1] for messages in zip(*conversations, strict=False)]
    return [*is_same, False].index(False)


def _is_reply(prompt: str | Sequence[ChatMessage] | None, messages: Sequence[ChatMessage]) -> bool:
    """True if messages follow a prompt; False: they begin with one."""
    if prompt is None:
        return False
    if isinstance(prompt, str):
        return messages[0].get("role") in (ASSISTANT, "tool")
    if list(messages[: len(prompt)]) == list(prompt):
        return False
    role = messages[0].get("role")
    return role not in ("system", "developer") and not (role == "user" and prompt[-1].get("role") == "user")
