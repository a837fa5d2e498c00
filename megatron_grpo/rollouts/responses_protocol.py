"""OpenAI's protocol of responses: input items become messages of a chat, and messages become output items."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.data.chat_messages import ChatMessage, join_content
from megatron_grpo.data.image_rows import has_images
from megatron_grpo.rollouts.call_prompts import BadCallError
from megatron_grpo.rollouts.chat_protocol import MODEL, count_usage
from megatron_grpo.rollouts.conversation import Response


def read_messages(call: dict[str, Any], earlier: Mapping[str, Sequence[ChatMessage]]) -> list[dict[str, Any]]:
    """Read a call's conversation, without its instructions.

    `earlier`: conversations by the id of the response that ended them. BadCallError if an item cannot be read.
    """
    messages: list[dict[str, Any]] = []
    previous = call.get("previous_response_id")
    if previous is not None:
        if previous not in earlier:
            raise BadCallError(f"previous_response_id={previous}: no response of this rollout has this id")
        messages += [dict(message) for message in earlier[previous]]
    items = call["input"]
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    is_turn_open = False  # items of one turn of the model make one message
    for number, item in enumerate(items, start=1):
        message = _read_item(item, number, messages)
        is_model = message["role"] == "assistant"
        if is_model and is_turn_open and not (messages[-1].get("content") and message.get("content")):
            calls = [*messages[-1].get("tool_calls", []), *message.get("tool_calls", [])]
            filled = {name: value for name, value in message.items() if value}
            messages[-1] = {**messages[-1], **filled, **({"tool_calls": calls} if calls else {})}
        else:
            messages.append(message)
        is_turn_open = is_model
    return messages


def _read_item(item: dict[str, Any], number: int, earlier: Sequence[ChatMessage]) -> dict[str, Any]:
    kind = item.get("type", "message")
    try:
        if kind == "message" and isinstance(item.get("role"), str):
            return {"role": item["role"], "content": _join_parts(item.get("content"), number)}
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            text = "\n".join(part["text"] for part in parts)
            return {"role": "assistant", "content": None, "reasoning_content": text, "reasoning": text}
        if kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            calls = [{"id": item["call_id"], "type": "function", "function": function}]
            return {"role": "assistant", "content": None, "tool_calls": calls}
        if kind == "function_call_output":
            calls = [call for message in earlier for call in message.get("tool_calls") or ()]
            names = [call["function"]["name"] for call in calls if call["id"] == item["call_id"]]
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": _join_parts(item["output"], number)}
            return {**result, **({"name": names[-1]} if names else {})}
    except (KeyError, TypeError, ValueError) as error:
        raise BadCallError(f"input: item {number} of type {kind} cannot be read: {error}") from None
    raise BadCallError(
        f"input: item {number} has type {kind!r}; give message, reasoning, function_call or function_call_output"
    )


def _join_parts(content: Any, number: int) -> str | list[Any]:
    if not isinstance(content, str | list | None):
        raise TypeError(f"its content is {type(content).__name__}, not a text or a list of parts")
    return content if isinstance(content, list) and has_images(content) else join_content(content, number)


def read_tools(call: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Read definitions of functions in the form of chats; BadCallError about others."""
    tools = call.get("tools")
    if not tools:
        return None
    if any(tool.get("type") != "function" for tool in tools):
        raise BadCallError("tools: give functions; there are no built-in tools here")
    names = ("name", "description", "parameters", "strict")
    return [
        {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}
        for tool in tools
    ]


def make_response(response: Response, call: dict[str, Any], number: int) -> dict[str, Any]:
    """Make the answer to a call; `number`: the response's in its rollout."""
    assert isinstance(response.history, list)
    is_cut = response.output.stop_reason == "length"
    usage = count_usage([response])
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": call.get("instructions"),
        "max_output_tokens": call.get("max_output_tokens"),
        "metadata": call.get("metadata") or {},
        "model": MODEL,
        "output": list(_iterate_items(response.history[-1], number)),
        "parallel_tool_calls": True,
        "previous_response_id": call.get("previous_response_id"),
        "temperature": call.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": call.get("tool_choice") or "auto",
        "tools": call.get("tools") or [],
        "top_p": call.get("top_p"),
        "truncation": "disabled",
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        "token_ids": response.output.token_ids.tolist(),
    }


def _iterate_items(message: ChatMessage, number: int) -> Iterator[dict[str, Any]]:
    if message.get("reasoning_content"):
        parts = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        yield {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": parts, "status": "completed"}
    if message.get("content") or not message.get("tool_calls"):
        parts = [{"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": []}]
        item = {"type": "message", "id": f"msg_{number}", "role": "assistant"}
        yield {**item, "content": parts, "status": "completed"}
    for index, call in enumerate(message.get("tool_calls") or ()):
        item = {"type": "function_call", "id": f"fc_{number}_{index}", "call_id": call["id"], "status": "completed"}
        yield {**item, **call["function"]}


def iterate_events(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Divide an answer into the events of a stream, numbered."""
    for number, event in enumerate(_iterate_events(answer)):
        yield {**event, "sequence_number": number}


def _iterate_events(answer: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    for kind in ("response.created", "response.in_progress"):
        yield {"type": kind, "response": begun}
    for index, item in enumerate(answer["output"]):
        location = {"output_index": index}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        opened = {**item, **empty, "status": "in_progress"}
        yield {"type": "response.output_item.added", **location, "item": opened}
        location["item_id"] = item["id"]
        if item["type"] == "function_call":
            arguments = item["arguments"]
            yield {"type": "response.function_call_arguments.delta", **location, "delta": arguments}
            yield {
                "type": "response.function_call_arguments.done",
                **location,
                "arguments": arguments,
                "name": item["name"],
            }
        else:
            yield from _iterate_part_events(item, {**location, "content_index": 0})
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{answer['status']}", "response": answer}


def _iterate_part_events(item: dict[str, Any], location: dict[str, Any]) -> Iterator[dict[str, Any]]:
    (part,) = item["content"]
    kind = part["type"]
    logprobs: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
    yield {"type": "response.content_part.added", **location, "part": {**part, "text": ""}}
    yield {"type": f"response.{kind}.delta", **location, "delta": part["text"], **logprobs}
    yield {"type": f"response.{kind}.done", **location, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **location, "part": part}
