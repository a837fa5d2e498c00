"""Names of vLLM's parsers of tool calls and of reasoning, without importing vLLM."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

_TABLES = {"tool_parsers": "_TOOL_PARSERS_TO_REGISTER", "reasoning": "_REASONING_PARSERS_TO_REGISTER"}


def read_parser_names(folder: str) -> frozenset[str]:
    """Read the names of vLLM's parsers from its source.

    `folder`: tool_parsers or reasoning. Empty if vLLM has other files.
    """
    # Importing vLLM would take seconds.
    package = importlib.util.find_spec("vllm")
    if package is None or package.origin is None:
        return frozenset()
    file = Path(package.origin).parent / folder / "__init__.py"
    if not file.is_file():
        return frozenset()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == _TABLES[folder]:
            return frozenset(ast.literal_eval(node.value))
    return frozenset()
