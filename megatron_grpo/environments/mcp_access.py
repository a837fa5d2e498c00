"""What MCP servers get from the environment, how much their answers may have, and how results become text."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TextIO

from megatron_grpo.config.outside_text import make_line
from megatron_grpo.config.secret_values import make_authorization, read_secret

MESSAGE_BYTES = 2**24  # of a server; of a line, the SDK takes the square of its length
_NOT_PACKED = {"Accept-Encoding": "identity"}  # a small packed body may unfold to any size


def read_variables(names: Sequence[str] | None) -> dict[str, str]:
    """Read the environment variables that a server's program gets beside PATH and the like."""
    return {name: read_secret(name, "variables") for name in names or ()}


@asynccontextmanager
async def open_url(url: str, variable: str | None) -> AsyncIterator[Any]:
    """Connect to a server; `variable`: environment variable with its API key."""
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    key = {} if variable is None else make_authorization(variable, "api_key_variable")
    http_client = create_mcp_http_client(_NOT_PACKED | key)
    http_client.event_hooks["response"].append(_limit_body)
    async with http_client, streamable_http_client(url, http_client=http_client) as streams:
        yield streams


async def _limit_body(response: Any) -> None:
    """End a body after MESSAGE_BYTES; the SDK limits events of a stream."""
    import httpx2

    if response.headers.get("content-encoding", "identity") != "identity":
        await response.aclose()
        raise httpx2.DecodingError("the server packs its answers, though it was asked not to", request=response.request)
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return
    body = response.stream

    class LimitedBody(httpx2.AsyncByteStream):
        aclose = body.aclose

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in body:
                size += len(chunk)
                if size > MESSAGE_BYTES:
                    raise httpx2.StreamError(f"the server's answer has more than {MESSAGE_BYTES} bytes")
                yield chunk

    response.stream = LimitedBody()


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


MAX_LINES = 1000  # of a program until it ends; a longer line counts as several
_LINE_BYTES = 4096

logger = logging.getLogger(__name__)


@contextmanager
def log_output(title: str) -> Iterator[TextIO]:
    """Open a file for a program's output, whose lines become records of the log.

    Lines beyond MAX_LINES are read and left out, so that the program never waits.
    """
    reading, writing = os.pipe()
    threading.Thread(target=_log_lines, args=(reading, title), name=f"output of {title}", daemon=True).start()
    with os.fdopen(writing, "w") as file:
        yield file


def _log_lines(descriptor: int, title: str) -> None:
    lines = 0
    with os.fdopen(descriptor, "rb") as output:
        while line := output.readline(_LINE_BYTES):
            lines += 1
            if lines <= MAX_LINES:
                logger.info("%s: %s", title, make_line(line.decode(errors="replace").rstrip("\r\n")))
            elif lines == MAX_LINES + 1:
                logger.warning("%s has written %d lines; the others are left out", title, MAX_LINES)
