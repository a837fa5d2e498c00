"""Regular expressions of the package take linear time on hostile texts, or stand behind a bound on their length."""

import ast
import importlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_grpo"
FOLDERS = ("data", "environments", "rollouts", "evaluation", "batch", "observability")
"""Folders with text of models and agents."""
LONGEST, SECONDS = 20_000, 1.0
BOUNDED = {
    "data.math_text": 2_000,  # MAX_CHARACTERS and TAIL_CHARACTERS
    "environments.math_answers": 2_000,
    "environments.reasoning_gym": 1_000,
    "evaluation.results": 2_000,
    "data.rows": 2_000,  # rows of a user's file
    "data.code_tests": 2_000,
}
"""Most characters of a text that an expression of the module sees, where that is bounded."""
WHOLE = {"_MARKED", "_STATEMENT", "_BOX_START", "_BARE_BOX", "_BOXED_LETTER", "_CHOICE", "_SAYS"}
"""Expressions of these modules that see whole responses all the same."""
PIECES = [
    "a",
    " ",
    "1",
    "\n",
    ">",
    "`",
    "{",
    "(",
    "\\",
    "answer ",
    "1,",
    "a ",
    "1 ",
    "\\text{",
    "<answer>",
    ">1.",
    "*a",
]


def read_use(module: str, name: str) -> str:
    """How the module uses an expression: search wherever it does not only match at a beginning."""
    source = (PACKAGE / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    uses = set(re.findall(rf"(?<!\w){name}\.(\w+)\(", source))
    return "match" if uses == {"match"} else "fullmatch" if uses and uses <= {"match", "fullmatch"} else "search"


def list_expressions() -> Iterator[tuple[str, str]]:
    """List expressions of module constants, with their modules."""
    for folder in FOLDERS:
        for file in sorted((PACKAGE / folder).rglob("*.py")):
            tree = ast.parse(file.read_text(encoding="utf-8"))
            module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
            for node in tree.body:
                if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("re.compile("):
                    yield module, ast.unparse(node.targets[0])


def list_inline_calls() -> Iterator[tuple[str, str, str, str]]:
    """List calls of `re` in functions: module, function, name in `re`, literal and its flags."""
    for folder in FOLDERS:
        for file in sorted((PACKAGE / folder).rglob("*.py")):
            module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
            for scope in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
                    for node in ast.walk(scope):
                        match node:
                            case ast.Call(func=ast.Attribute(value=ast.Name("re"), attr=name), args=[first, *others]):
                                flags = [text for text in map(ast.unparse, others) if text.startswith("re.")]
                                is_literal = isinstance(first, ast.Constant)
                                yield module, scope.name, name, ", ".join([ast.unparse(first), *flags] * is_literal)


MADE = {
    ("environments.retriever", "_compile_word"),  # one class of characters
    ("environments.code_blocks", "_remove_quotation"),  # a number of quotation marks
    ("environments.judge", "__post_init__"),
    ("environments.judge", "_write_question"),  # names in braces, in the run's own question
    ("environments.tasks", "_require_pattern"),  # a user's, which is matched in a process with a deadline
    ("environments.tasks", "_make_matcher"),
}
"""Functions that make an expression of other parts than literals."""
CALLS = [call for call in sorted({*list_inline_calls()}) if call[2] != "escape"]
LITERALS = [call for call in CALLS if call[3]]


def test_expressions_that_are_made_are_few() -> None:
    assert {(module, name) for module, name, *_ in {*CALLS} - {*LITERALS}} == MADE


@pytest.mark.parametrize(("module", "user", "function", "arguments"), LITERALS, ids=str)
def test_an_inline_expression_is_done_with_hostile_texts(module: str, user: str, function: str, arguments: str) -> None:
    expression = eval(f"re.compile({arguments})", {"re": re})
    use = function if function in ("match", "fullmatch") else "search"
    require_done(expression, use, BOUNDED.get(module, LONGEST))


@pytest.mark.parametrize(("module", "name"), list_expressions(), ids=str)
def test_an_expression_is_done_with_hostile_texts(module: str, name: str) -> None:
    expression: re.Pattern[str] = getattr(importlib.import_module(f"megatron_grpo.{module}"), name)
    if isinstance(expression.pattern, bytes):
        pytest.skip("it reads our own files")
    require_done(expression, read_use(module, name), LONGEST if name in WHOLE else BOUNDED.get(module, LONGEST))


def require_done(expression: re.Pattern[str], use: str, longest: int) -> None:
    """Require that hostile texts of up to so many characters take little time."""
    for piece in PIECES:
        for begin in ("", "**", "#### 1"):
            length = longest // 16
            while length <= longest:
                text = begin + piece * (length // len(piece)) + "\x00"
                began = time.process_time()
                _ = [*expression.finditer(text)] if use == "search" else getattr(expression, use)(text)
                seconds = time.process_time() - began
                assert seconds < SECONDS, f"{len(text)} characters of {piece!r} behind {begin!r}: {seconds:.1f} s"
                length *= 4
