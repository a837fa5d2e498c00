"""What the model reads of a result from an MCP server: every kind of content as text."""

from __future__ import annotations

import json
from typing import Any


def format_result(result: Any) -> str:
    """Join the texts of a result (`CallToolResult` of the SDK).

    Structured content follows as JSON, unless the texts already say it.
    """
    texts = [_format_part(part) for part in result.content]
    if "structured_content" in result.model_fields_set and not _is_said(result.structured_content, result.content):
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    return "\n".join(texts)


def _format_part(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":  # embedded
        resource = part.resource
        text = getattr(resource, "text", None)
        return f"[{_describe(resource)}, {len(resource.blob)} base64 characters]" if text is None else str(text)
    if part.type == "resource_link":
        lines = (part.name, part.title, part.description)
        return ": ".join([*dict.fromkeys(line for line in lines if line), f"[{_describe(part)}]"])
    return f"[{part.type} {part.mime_type}, {len(part.data)} base64 characters]"  # an image, or audio


def _describe(resource: Any) -> str:
    return " ".join(filter(None, (resource.uri, resource.mime_type)))


def _is_said(structured: Any, content: list[Any]) -> bool:
    """Whether texts have the structured content too, as the protocol advises."""
    # SDKs wrap a value that is no JSON object, as in {"result": 42}; each element of a list may be a text part.
    values = [structured]
    if isinstance(structured, dict) and structured.keys() == {"result"}:
        values.append(structured["result"])
    texts = [part.text for part in content if part.type == "text"]
    readings = [reading for text in texts for reading in (text, _parse(text))]
    parsed = [_parse(text) for text in texts]
    return any(value in (*readings, texts, parsed) for value in values) and bool(texts)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
