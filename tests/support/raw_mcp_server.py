"""An MCP server for tests that writes JSON-RPC itself: `python raw_mcp_server.py MODE`, over standard input and output.

MODE says how it lists its tools, one for each result below: pages, stuck, endless, silent, failing, twice, malformed.
"""

import json
import os
import sys
import time
from typing import Any

MODE = sys.argv[1]
IMAGE = {"type": "image", "data": "AAAA", "mimeType": "image/png"}
RESULTS: dict[str, dict[str, Any]] = {
    "structured_only": {"content": [], "structuredContent": {"answer": 42}},
    "structured_beside": {
        "content": [{"type": "text", "text": "2 rows"}],
        "structuredContent": {"rows": [{"name": "Größe"}, {"name": "b"}]},
    },
    "structured_again": {
        "content": [{"type": "text", "text": '{"b": 2, "a": 1}'}],
        "structuredContent": {"a": 1, "b": 2},
    },
    "structured_wrapped": {"content": [{"type": "text", "text": "42"}], "structuredContent": {"result": 42}},
    "structured_list": {
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "structuredContent": {"result": ["a", "b"]},
    },
    "embedded": {
        "content": [
            {"type": "text", "text": "read 1 file"},
            {"type": "resource", "resource": {"uri": "file:///a.py", "mimeType": "text/plain", "text": "print(1)"}},
        ]
    },
    "embedded_bytes": {
        "content": [{"type": "resource", "resource": {"uri": "file:///a.png", "mimeType": "image/png", "blob": "AAAA"}}]
    },
    "link": {"content": [{"type": "resource_link", "uri": "file:///big.log", "name": "big.log", "description": "log"}]},
    "image": {"content": [IMAGE, {**IMAGE, "type": "audio", "mimeType": "audio/wav"}]},
    "empty_text": {"content": [{"type": "text", "text": ""}]},
    "empty": {"content": []},
    "error_empty": {"content": [], "isError": True},
    "error_structured": {"content": [], "structuredContent": {"code": 7}, "isError": True},
    "malformed": {"content": [{"type": "text"}]},
    "against_schema": {"content": [], "structuredContent": {"count": "many"}},
    "echo": {},
    "hang": {},
    "die": {},
    "line_without_end": {},
    "id_of_another": {"content": [{"type": "text", "text": "not yours"}]},
}


def describe_tool(name: str) -> dict[str, Any]:
    tool: dict[str, Any] = {"name": name, "description": name, "inputSchema": {"type": "object", "properties": {}}}
    if name == "against_schema":
        tool["outputSchema"] = {"type": "object", "properties": {"count": {"type": "integer"}}}
    return tool


def list_tools(cursor: str | None) -> dict[str, Any]:
    tools = [describe_tool(name) for name in RESULTS]
    if MODE == "silent":
        time.sleep(1000)
    if MODE == "failing":
        raise ValueError("no tools today")
    if MODE == "malformed":
        return {"tools": [{"description": "no name"}]}
    if MODE == "stuck":
        return {"tools": tools, "nextCursor": "0"}
    if MODE == "endless":
        page = int(cursor or 0)
        return {"tools": [describe_tool(f"tool{page}_{n}") for n in range(100)], "nextCursor": str(page + 1)}
    if MODE == "twice":
        return {"tools": [*tools, tools[0]]}
    return {"tools": tools[3:]} if cursor else {"tools": tools[:3], "nextCursor": "3"}


def answer(method: str, parameters: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        version = parameters.get("protocolVersion", "2025-06-18")
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "x", "version": "1"}}
    if method == "tools/list":
        return list_tools(parameters.get("cursor"))
    if method != "tools/call":
        raise ValueError("no such method")
    if parameters["name"] == "echo":
        text = json.dumps([parameters["arguments"], os.getpid()])
        return {"content": [{"type": "text", "text": text}]}
    if parameters["name"] == "hang":
        time.sleep(1000)
    while parameters["name"] == "line_without_end":
        sys.stdout.write("x" * 65536)
    if parameters["name"] == "die":
        os._exit(3)
    return RESULTS[parameters["name"]]


for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    number = message["id"]
    try:
        reply: dict[str, Any] = {"result": answer(message["method"], message.get("params") or {})}
    except ValueError as error:
        reply = {"error": {"code": -32601, "message": str(error)}}
    if message.get("params", {}).get("name") == "id_of_another":
        number = 12345
    print(json.dumps({"jsonrpc": "2.0", "id": number, **reply}), flush=True)
