"""The program of a response, between fences as models write them."""

import ast
from typing import Any

import pytest

from megatron_grpo.environments import code_blocks
from megatron_grpo.environments.code_blocks import extract_program

PROGRAM = "def f(x):\n    if x:\n        return 1\n\n    return 2\n"
OUTPUTS = (
    "",
    "\nIt prints:\n```\n1\n```\n",
    "\nOutput: ```1```",
    "\n```text\nf(1) is 1\n```",
    "\n```bash\npython a.py(1)\n```",
    '\n~~~json\n{"a": 1}\n~~~',
    "\n```output\n[1, 2]\n``` and so on",
    "\n```\n>>> f(1)\n1\n```",
    "\n```python\n```",
)
TAGS = (
    *(
        "python",
        "py",
        "python3",
        "Python",
        "PYTHON3",
        "Py",
        "py3",
        "ipython",
        "IPython3",
        "python 3",
        "python3.11",
        "pypy3",
    ),
    *(
        "python {.line}",
        "{.python .numberLines}",
        "{python}",
        'python title="a.py"',
        "python:main.py",
        "python, linenos",
    ),
    *("main.py", "src/main.py", " python ", "python\t"),
)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("fence", ["```", "````", "~~~", "~~~~~"])
def test_the_program_is_the_last_python_block(fence: str, output: str) -> None:
    for tag in TAGS:
        response = f"Sure!\n```python\nwrong()\n```\nBetter:\n{fence}{tag}\n{PROGRAM}{fence}{output}"
        assert extract_program(response) == PROGRAM, tag
        assert extract_program(response.replace("\n", "\r\n")) == PROGRAM, tag


@pytest.mark.parametrize(
    "before", ["Here it is: ```python\n", "<think>```py\nwrong()\n```</think>```python\n", "</think>```python\n"]
)
@pytest.mark.parametrize("after", ["```", "```.", "```</answer>", "``` That is all", "```<|im_end|>", ""])
def test_text_beside_a_fence(before: str, after: str) -> None:
    assert extract_program(before + PROGRAM + after) == PROGRAM


def test_indented_blocks_lose_the_indent() -> None:
    for indent, mark in (("   ", "   "), ("\t", "\t"), ("   ", "1. "), ("  ", "- "), ("", "    ")):
        lines = "".join(indent + line if line.strip() else line for line in PROGRAM.splitlines(keepends=True))
        response = f"Steps:\n{mark}```python\n{lines}{indent}```\n"
        assert extract_program(response) == PROGRAM
    assert extract_program("```python\n    print(1)\n    print(2)\n```") == "print(1)\nprint(2)\n"


@pytest.mark.parametrize(
    "program",
    [
        "s = '''```\nx\n```'''\nprint(s)\n",
        'def f():\n    """Call:\n    ```\n    f()\n    ```\n    """\n',
        "print('```')\n",
        "x = 1  # between ``` and ```\nprint(x)\n",
        "readme = '''\n```python\nprint(1)\n```\n'''\n",
    ],
)
def test_fences_in_a_program(program: str) -> None:
    ast.parse(program)
    for response in (f"```python\n{program}```\nDone:\n```\n1\n```", f"````python\n{program}````", program):
        assert extract_program(response) == program


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```\nprint(1)\n```\nprints\n```\n1\n```", "print(1)\n"),
        ("```\nx = 1\n```\n```\nnot a program\n```", "x = 1\n"),
        ("```\n1\n```", "1\n"),
        ("```\ndef f(:\n```", "def f(:\n"),
        ("```solution\nprint(1)\n```", "print(1)\n"),
        ("```java\nint a = 1;\n```", "```java\nint a = 1;\n```"),
        ("a = 1", "a = 1"),
        ("```python\nprint(1)```\nand\n```python\nprint(2)```", "print(2)"),
        ("```python\ndef f(:\n```\nno:\n```python\nprint(1)\n```", "print(1)\n"),
        ("````markdown\n```python\nprint(1)\n```\n````", "print(1)\n"),
        ("```\n1\n```python\nprint(1)\n```", "print(1)\n"),
        ("It prints ```1```\n\n```\nprint(2)\n```", "print(2)\n"),
        ("Not ```1``` but: ```python\nprint(2)\n```", "print(2)\n"),
        ("```python\nprint(1)\n```\nNow faster:\n```python\nprint(", "print("),
        ("```python\nprint(1)\n```\n```pycon\n>>> print(1)\n1\n```", "print(1)\n"),
    ],
)
def test_which_block_it_is(response: str, program: str) -> None:
    assert extract_program(response) == program


UNITS = (
    *("`", "```a\n~~~b\n", "```python\n(", "```\n1\n```\n", '```py\nx="""\n```\n', "> ", "~~~\n", "```x `", "(", "."),
    *("```py ```py\n", "1```", "~~~py\n```py\n", "````\n```\n"),
)


@pytest.mark.parametrize("unit", UNITS)
def test_the_work_is_bounded(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are looked at a few times each, and little more than the response is parsed."""
    looked: list[str] = []
    parsed: list[str] = []
    opening, parse = code_blocks._parse_opening, ast.parse

    def count_opening(line: str) -> Any:
        looked.append(line)
        return opening(line)

    def count_parse(text: str, name: str) -> ast.Module:
        parsed.append(text)
        return parse(text, name)

    monkeypatch.setattr(code_blocks, "_parse_opening", count_opening)
    monkeypatch.setattr(code_blocks.ast, "parse", count_parse)
    response = "```python\n" + unit * (100_000 // len(unit))
    extract_program(response)
    assert sum(map(len, looked)) <= 20 * len(response)
    assert sum(map(len, parsed)) <= 4 * len(response)
    assert len(parsed) < 1000


@pytest.mark.parametrize(
    "response",
    [
        "> ```python\n> print(1)\n> ```",
        "> > ```python\n> > print(1)\n> > ```\nThat is all.",
        "As said:\n> ~~~python\n> print(1)\n> ~~~",
        "~~~python\nprint(1)",
        "~~~ py\nprint(1)\n",
    ],
)
def test_quoted_and_unclosed_blocks(response: str) -> None:
    assert extract_program(response).strip() == "print(1)"
