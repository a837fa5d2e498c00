"""Tools that the model calls turn by turn: calculator, search, Python."""

from __future__ import annotations

import ast
import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from megatron_grpo.cluster.limited_calls import LimitedCalls, LimitError
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.outside_text import NAME_CHARACTERS, make_line, parse_json
from megatron_grpo.config.section import Positive
from megatron_grpo.data.processors import REFERENCE
from megatron_grpo.data.prompt_renderer import PromptRenderer
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn, Turn
from megatron_grpo.environments.interface import Environment, EnvironmentSettings, score_zero_or_one
from megatron_grpo.environments.math_answers import Verifier
from megatron_grpo.environments.mcp_tools import McpServer, McpTools, ServerEndedError
from megatron_grpo.environments.retriever import Retriever, read_documents
from megatron_grpo.environments.sandbox.sandbox import Sandbox
from megatron_grpo.environments.tasks import OPERATORS
from megatron_grpo.environments.turn_reader import PARSER_ADVICE, ToolCall, TurnReader
from megatron_grpo.environments.vllm_parsers import read_parser_names

_MAX_CHARACTERS = 400  # of an expression
_MAX_BITS = 4096  # of the numerator or denominator of an intermediate result
_DIGITS = 12  # significant digits of a result that is not a whole number

_BINARY = {**OPERATORS, ast.FloorDiv: lambda dividend, divisor: Fraction(dividend // divisor), ast.Mod: operator.mod}


def calculate(expression: str) -> str:
    """Evaluate an expression to a text such as "7" or "0.333333333333".

    It may have numbers, + - * / // % ** and brackets. ValueError if it has others, no value, or too large a value.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"an expression may have {_MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("not an expression") from None
    try:
        value = _evaluate(tree.body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.{_DIGITS}g}"
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("too large") from None


def _evaluate(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _require_small(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _evaluate(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        first, second = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow):
            if second.denominator != 1:
                raise ValueError("only whole exponents")
            # The size is checked before the power is computed, which could take minutes and all memory.
            _require_small(first, times=abs(second.numerator))
            return first**second.numerator
        if type(node.op) in _BINARY:
            return _require_small(_BINARY[type(node.op)](first, second))
    raise ValueError("only numbers, + - * / // % ** and brackets")


def _require_small(value: Fraction, times: int = 1) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) * times > _MAX_BITS:
        raise ValueError("too large")
    return value


MAX_ENDED = 2  # calls of a rollout that end their MCP server; with so many it is over, and the response's fault
PARSE_CPU_S = 2.0  # processor time in which the calls of a response are read
_MAX_RESULT_CHARACTERS = 4000  # of a tool's result that the model reads

Tool = Callable[[str], str]  # argument of a call to its result; raises ValueError with a message for the model


@dataclass(frozen=True, slots=True)
class ToolState:
    """State of a rollout with tools."""

    answer: str = ""  # text of the last turn, if it calls no tool
    calls: int = 0  # number of tool calls so far
    ended: int = 0  # number of these that ended their server


@dataclass(eq=False)
class ToolEnvironment(Environment):
    """Reward 1 when the last turn is the reference answer, else 0.

    The last turn is the first one that calls no tool. Tools and their argument: calculator (expression), python (code,
    which runs in the sandbox), retriever (query, over local documents); and the tools of MCP servers. A call that
    cannot be executed is answered with the reason.
    """

    multi_turn = True
    answer_role = "tool"
    settings: EnvironmentSettings
    tools: list[Literal["calculator", "python", "retriever"]] | None = None
    """Tools that the model may call; None: the calculator, or with `servers` only their tools."""
    servers: dict[str, McpServer] | None = None
    """MCP servers whose tools the model may call too, by a name for messages."""
    parser: str = "hermes"
    """vLLM's parser of tool calls, by its name in `vllm serve --tool-call-parser`."""
    documents: str | None = None
    """File that the retriever searches: JSONL of texts, or a text file whose paragraphs are the documents."""
    found: Positive = 3
    """Documents that one search returns."""
    compare: Literal["math", "exact"] = "math"
    """How the last turn is compared with the answer: math, by value; exact, as text without surrounding blanks."""
    max_calls: Positive = 16
    """Most tool calls of one rollout that are executed."""

    def __post_init__(self) -> None:
        if self.tools is None:
            self.tools = [] if self.servers else ["calculator"]
        self._tools: dict[str, Tool] = {name: self._make_tool(name) for name in self.tools}
        self._server_tools = McpTools(self.servers or {})
        if shared := self._tools.keys() & set(self._server_tools.names):
            raise RunError(f"options.servers have a tool {min(shared)}, as options.tools has; use allow")
        tokenizer = self.settings.load_tokenizer()
        # In a process of its own: parsers are cubic on some loops of marks.
        self._parser = LimitedCalls(partial(TurnReader, self.parser, tokenizer), cpu_s=PARSE_CPU_S)
        self._verifier = Verifier() if self.compare == "math" else None
        if self.settings.prompts.apply_chat_template:
            self._require_readable_calls(PromptRenderer(tokenizer, self.settings.prompts))

    @classmethod
    def option_problems(cls, options: dict[str, Any]) -> list[tuple[str, str]]:
        """Find a parser that vLLM lacks, and a retriever without documents."""
        problems = []
        parser, documents = options.get("parser"), options.get("documents")
        for name, server in (options.get("servers") or {}).items():
            if (server.command is None) == (server.url is None) or server.command == []:
                problems.append((f"servers.{name}", "needs either a command, as a list, or a url"))
            elif find_spec("mcp") is None:
                problems.append((f"servers.{name}", "needs the library: pip install 'megatron_grpo[mcp]'"))
            elif (server.variables if server.command is None else server.api_key_variable) is not None:
                text = "a url takes api_key_variable, a command variables"
                problems.append((f"servers.{name}", f"{text}: the key of an address, the environment of a program"))
        names = read_parser_names("tool_parsers")
        if parser is not None and names and parser not in names:
            text = f"is not a tool parser of vLLM; choose one of {', '.join(sorted(names))}"
            problems.append((f"parser={parser}", text))
        if "retriever" in (options.get("tools") or ()):
            if documents is None:
                problems.append(("documents", "is missing: the retriever searches a file; give one"))
            elif not Path(documents).is_file():
                problems.append((f"documents={documents}", "no such file"))
            else:
                try:
                    read_documents(documents)
                except (OSError, ValueError) as error:
                    problems.append((f"documents={documents}", str(error)))
        return problems

    def _require_readable_calls(self, renderer: PromptRenderer) -> None:
        tool = next(iter([*self._tools, *self._server_tools.names]))
        text, names, reason = write_call(renderer, tool), [tool], ""
        if text is not None:
            try:
                names = [call.name for call in self._read_turn(text)[1]]
            except Exception as error:  # noqa: BLE001 - parsers raise anything about calls of other models
                names, reason = [], f": {type(error).__name__}: {error}"
        if tool not in names:
            raise RunError(
                f"options.parser={self.parser} finds no tool call in what the model's chat template writes for one, "
                f"{text!r}{reason}; {PARSER_ADVICE}"
            )

    def reset(self, prompt: str | list[dict[str, str]], extra_env_info: dict[str, Any]) -> ToolState:
        return ToolState()

    def step(self, state: ToolState, response: str) -> Turn:
        """Execute a turn's tool calls; without any, end the rollout."""
        last, calls = self._read_turn(response)
        # A turn that calls tools is no answer, whatever its arguments are, also where the rollout ends with it.
        answer = "" if calls else last
        first, state = state.calls, replace(state, answer=answer, calls=state.calls + len(calls))
        if not calls or state.calls > self.max_calls:
            return Turn(state=state)
        results: list[dict[str, Any]] = []
        for number, call in enumerate(calls, start=first):
            # The call keeps an id that the model wrote. Ids that the parser draws at random are replaced by the call's
            # number in the rollout, so that a seed gives the same tokens again. Mistral's templates need nine letters
            # and digits.
            call_id = call.id if call.id and call.id in response else f"call{number:05d}"
            name = call.name
            try:
                content = self._execute(call)
            except ServerEndedError as error:
                content, state = f"error: {error}", replace(state, ended=state.ended + 1)
                if state.ended == MAX_ENDED:
                    return Turn(state=replace(state, answer=""))
            results.append({"role": "tool", "name": name, "tool_call_id": call_id, "content": content})
        text = "\n".join(result["content"] for result in results)
        return Turn(done=False, state=state, text=text, role="tool", messages=results)

    def score(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]:
        pairs = [(request.state.answer, str(request.extra_env_info[REFERENCE])) for request in requests]
        if self._verifier is None:
            scores = score_zero_or_one(last.strip() == answer.strip() for last, answer in pairs)
        else:
            scores = score_zero_or_one(self._verifier.verify(pairs))
        fault = f"its calls ended an MCP server {MAX_ENDED} times"
        return [
            replace(score, fault=fault) if request.state.ended >= MAX_ENDED else score
            for request, score in zip(requests, scores, strict=True)
        ]

    def _read_turn(self, response: str) -> tuple[str, list[ToolCall]]:
        """Read the text that may be the answer, and the tool calls.

        A response that is not read within the limits has no calls.
        """
        try:
            return self._parser.call(TurnReader.read, response)
        except LimitError as error:
            logging.getLogger(__name__).warning("reading the calls of %d characters %s", len(response), error)
            return response, []

    def _make_tool(self, name: str) -> Tool:
        if name == "calculator":
            return calculate
        if name == "python":
            return partial(_run_program, self.settings.open_sandbox())
        assert self.documents is not None, "the options were checked"
        retriever = Retriever(read_documents(self.documents))
        return lambda query: "\n\n".join(retriever.search(query, self.found)) or "nothing found"

    def _execute(self, call: ToolCall) -> str:
        tool = self._tools.get(call.name)
        names = self._server_tools.names
        if tool is None and call.name not in names:
            name = make_line(call.name, NAME_CHARACTERS)
            return f"error: there is no tool {name}; there is {', '.join([*self._tools, *names])}"
        try:
            arguments = parse_json(call.arguments)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict) or (tool is not None and len(arguments) != 1):
            return f"error: {call.name} takes {'named arguments' if tool is None else 'one argument'}"
        try:
            if tool is None:
                return self._server_tools.call(call.name, arguments)
            (argument,) = arguments.values()
            return tool(str(argument))[:_MAX_RESULT_CHARACTERS]
        except ValueError as error:
            return f"error: {error}"


def _run_program(sandbox: Sandbox, code: str) -> str:
    result = sandbox.run_python(code)
    if result.succeeded:
        return result.stdout
    if result.ending != "exited":
        return f"{result.stdout}\nerror: the program was ended: {result.ending}"
    return f"{result.stdout}\nerror: {result.stderr.strip()[-1000:]}"


def write_call(renderer: PromptRenderer, tool: str) -> str | None:
    """Write a turn that calls a tool, without its end.

    None: the chat template writes no calls, or renders the prompt before them otherwise.
    """
    question = {"role": "user", "content": "sample question"}
    call = {"id": "call00000", "type": "function", "function": {"name": tool, "arguments": {"input": "1 + 2"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt = renderer.render([question])
        conversation = renderer.render([question, turn], add_generation_prompt=False)
    except Exception:  # noqa: BLE001 - a template may raise anything, also about calls, which it need not know
        return None
    text = conversation.removeprefix(prompt)
    if text == conversation or tool not in text:
        return None
    call_end = text.rindex("1 + 2") if "1 + 2" in text else text.rindex(tool)
    added_tokens = getattr(renderer.tokenizer, "added_tokens_decoder", {}).values()
    ends = [text.find(str(token), call_end) for token in added_tokens if token.special]
    return text[: min((end for end in ends if end >= 0), default=len(text))].rstrip()
