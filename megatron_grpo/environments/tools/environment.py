"""The model calls tools, turn by turn, until it answers without a call."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_grpo.config.section import Positive
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, Turn
from megatron_grpo.environments.interface import Environment, EnvironmentSettings
from megatron_grpo.environments.math_answers import Verifier
from megatron_grpo.environments.sandbox.sandbox import Sandbox
from megatron_grpo.environments.tools.builtin import Retriever, calculate


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: dict[str, Any] | None
    """None: the arguments are no JSON object."""


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

        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it logs a traceback for every malformed call of a model
        try:
            kind = ToolParserManager.get_tool_parser(name)
        except KeyError as error:
            known = ", ".join(sorted(ToolParserManager.list_registered()))
            raise ValueError(f"options.parser={name} is no tool parser of vLLM; there is {known}") from error
        self._parser = kind(tokenizer)
        self._request = ChatCompletionRequest(messages=[], model="")

    def calls(self, response: str) -> list[ToolCall]:
        """The readable calls of a response, in order."""
        found = self._parser.extract_tool_calls(response, self._request)
        return [ToolCall(one.function.name, _object(one.function.arguments)) for one in found.tool_calls]


def parser_names() -> frozenset[str]:
    """Names of vLLM's tool parsers, from its source since importing it takes seconds; none where it is not found."""
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


_LONGEST_RESULT = 4000
"""Characters of a tool's result that the model reads."""

Tool = Callable[[str], str]
"""From the argument of a call to its result; raises ValueError with a message for the model."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """State of a rollout."""

    last: str = ""
    """The model's last turn."""
    calls: int = 0


class ToolEnvironment(Environment):
    """Reward 1 when the last turn, the one without a call, is the reference answer, else 0.

    The tools and their argument: calculator (expression), python (code, run in the sandbox), retriever (query, over
    local documents). A call that cannot be executed is answered with the reason.

    Args:
        settings: the tokenizer, which parsers look at, and the sandbox.
        tools: which of them the model may call.
        parser: vLLM's parser of the calls, as `vllm serve --tool-call-parser` names it.
        documents: file that the retriever searches: JSONL of texts, or a text whose paragraphs are documents.
        found: documents that one search returns.
        compare: how the last turn is compared with the answer: math, by value, or exact, as text without blanks around.
        max_calls: calls of one rollout that are executed.
    """

    multi_turn = True

    def __init__(
        self,
        settings: EnvironmentSettings,
        tools: list[Literal["calculator", "python", "retriever"]] | None = None,
        parser: str = "hermes",
        documents: str | None = None,
        found: Positive = 3,
        compare: Literal["math", "exact"] = "math",
        max_calls: Positive = 16,
    ) -> None:
        """
        Raises:
            SandboxUnavailableError: with the tool python, this machine allows less isolation than is required.
        """
        self._tools: dict[str, Tool] = {
            name: _tool(name, settings, documents, found) for name in tools or ["calculator"]
        }
        self._parser = CallParser(parser, settings.load_tokenizer())
        self._verifier = Verifier() if compare == "math" else None
        self._max_calls = max_calls

    @classmethod
    def option_problems(cls, options: dict[str, Any]) -> list[tuple[str, str]]:
        """A parser that vLLM lacks, and a retriever without documents."""
        problems = []
        parser, documents = options.get("parser"), options.get("documents")
        known = parser_names()
        if parser is not None and known and parser not in known:
            problems.append((f"parser={parser}", f"is no tool parser of vLLM; there is {', '.join(sorted(known))}"))
        if "retriever" in (options.get("tools") or ()):
            if documents is None:
                problems.append(("documents", "is missing: the retriever searches a file; give one"))
            elif not Path(documents).is_file():
                problems.append((f"documents={documents}", "no such file"))
        return problems

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> Conversation:
        """The state before the first turn."""
        return Conversation()

    def step(self, state: Conversation, response: str) -> Turn:
        """The results of the calls of a turn; a turn without one is the last."""
        calls = self._parser.calls(response)
        state = replace(state, last=response, calls=state.calls + len(calls))
        if not calls or state.calls > self._max_calls:
            return Turn(state=state)
        return Turn(done=False, state=state, text="\n".join(map(self._result, calls)), role="tool")

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        """Reward 1 for the right answer in the last turn, else 0."""
        pairs = [(request.state.last, str(request.extra_env_info[REFERENCE])) for request in requests]
        if self._verifier is None:
            right = [last.strip() == answer.strip() for last, answer in pairs]
        else:
            right = self._verifier.verify(pairs)
        return [EnvironmentReturn(reward=float(one), correct=one) for one in right]

    def _result(self, call: ToolCall) -> str:
        """Text for the model after a call."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name}; there is {', '.join(self._tools)}"
        if call.arguments is None or len(call.arguments) != 1:
            return f"error: {call.name} takes one argument"
        (argument,) = call.arguments.values()
        try:
            return tool(str(argument))[:_LONGEST_RESULT]
        except ValueError as error:
            return f"error: {error}"


def _tool(name: str, settings: EnvironmentSettings, documents: str | None, found: int) -> Tool:
    if name == "calculator":
        return calculate
    if name == "python":
        sandbox = settings.open_sandbox()
        return lambda code: _ran(sandbox, code)
    assert documents is not None, "the options were checked"
    retriever = Retriever.from_file(documents)
    return lambda query: "\n\n".join(retriever.search(query, found)) or "nothing found"


def _ran(sandbox: Sandbox, code: str) -> str:
    """Output of a program, and the reason why it failed if it did."""
    finished = sandbox.run_python(code)
    if finished.succeeded:
        return finished.stdout
    if finished.ending != "exited":
        return f"{finished.stdout}\nerror: the program was ended: {finished.ending}"
    return f"{finished.stdout}\nerror: {finished.stderr.strip()[-1000:]}"
