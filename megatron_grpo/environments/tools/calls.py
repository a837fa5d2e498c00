"""Tool calls in what the model wrote, as vLLM's own parsers find them."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call."""

    name: str
    arguments: dict[str, Any] | None
    """None: they are no JSON object."""


class CallParser:
    """One of vLLM's tool parsers: `vllm serve --tool-call-parser` takes the same names.

    Args:
        name: what vLLM calls the parser of tool calls, for instance "hermes" (Qwen), "llama3_json", "pythonic".
        tokenizer: the policy's.

    Raises:
        ValueError: vLLM has no parser of this name.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        # Here: they take seconds to import, and only environments with tools need them.
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # a traceback for every call that a model gets wrong
        try:
            kind = ToolParserManager.get_tool_parser(name)
        except KeyError as error:
            known = ", ".join(sorted(ToolParserManager.list_registered()))
            raise ValueError(f"options.parser={name} is no tool parser of vLLM; there is {known}") from error
        self._parser = kind(tokenizer)
        self._request = ChatCompletionRequest(messages=[], model="")

    def calls(self, response: str) -> list[ToolCall]:
        """The calls of a response, in order; none when it has none, or none that can be read."""
        found = self._parser.extract_tool_calls(response, self._request)
        return [ToolCall(one.function.name, _object(one.function.arguments)) for one in found.tool_calls]


def parser_names() -> frozenset[str]:
    """Names of vLLM's tool parsers, read from its source, which takes seconds to import; none where it is not found."""
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return frozenset()
    file = Path(package.origin).parent / "tool_parsers" / "__init__.py"
    if not file.is_file():
        return frozenset()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_TOOL_PARSERS_TO_REGISTER":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
