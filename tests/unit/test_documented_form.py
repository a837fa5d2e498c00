"""The form of the documents: short lines, paragraphs and cells, commands for any shell, and one page on GPUs."""

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import DOCUMENTS, blocks

COLUMNS, PARAGRAPH_LINES, CELL_COLUMNS = 100, 6, 200
LIST_ITEM = re.compile(r"\s*(?:[-*]|\d+\.) ")
OF_GPUS = re.compile(
    r"(?:\b(?:not|never|nothing|none|no \w+)\b[^.|]{0,60}\b(?:run|ran|timed|tried|tested|shown)\b[^.|]{0,30}"
    r"|\b(?:has|have) run\b[^.|:]{0,30}|\bran )\bon (?:a |an |any |one )?(?:GPUs?|H100|H200)\b",
    flags=re.IGNORECASE,
)
"""Sentences about runs on GPUs, which stand in docs/gpu.md alone."""
UNQUOTED = re.compile(r"(?:^|\s)[\w.+~]*=?[^\s'\"]*[\[*?]|\s~\w")
"""What zsh takes for a pattern or a home outside of quotes."""


def prose(text: str) -> str:
    """A text without blocks of code and rows of tables, whose lines become empty or end with a bar."""
    text = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?:^|(?<=\n\n))(?: {4}.*\n)+", "", text)


def paragraphs(text: str) -> Iterator[list[str]]:
    """Paragraphs and items of lists, as lines."""
    lines: list[str] = []
    for line in [*prose(text).splitlines(), ""]:
        is_apart = not line.strip() or re.match(r"\s*(\||#|!\[|<!--)", line) is not None
        if lines and (is_apart or LIST_ITEM.match(line)):
            yield lines
            lines = []
        if not is_apart:
            lines.append(line)


def cells(text: str) -> Iterator[str]:
    """The cells of the tables of a text as they are shown, without the targets of links."""
    for row in re.findall(r"^\s*\|(.*)\|$", text, flags=re.MULTILINE):
        yield from (re.sub(r"\]\([^)]*\)", "]", cell).strip() for cell in re.split(r"(?<!\\)\|", row))


def wide_lines(text: str) -> Iterator[str]:
    """Lines that go beyond the columns, blocks of code among them; rows of tables and addresses may."""
    for line in text.splitlines():
        is_held = not re.match(r"\s*(\||<!--)", line) and "https://" not in line and " " in line.strip()
        if is_held and len(line) > COLUMNS:
            yield line


def speaks_of_gpus(text: str) -> list[str]:
    """What a text says of runs on GPUs, but for links to the page that says it."""
    text = " ".join(text.split())
    return OF_GPUS.findall(re.sub(r"\b[Ww](?:hat|hich \w+) ha(?:s|ve) run on GPUs", "", text))


def patterns_of_zsh(block: str) -> list[str]:
    """Commands of a block with a word that zsh would expand."""
    lines = block.replace("\\\n", " ").splitlines()
    commands = [
        line for line in lines if re.match(r"(\S+/)?python -m megatron_grpo|(\w+=\S+ )*sbatch|launchers/", line)
    ]
    bare = [re.sub(r"'[^']*'|\"[^\"]*\"|\s#.*", "", command) for command in commands]
    return [command for command, words in zip(commands, bare, strict=True) if UNQUOTED.search(words)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_paragraphs_and_cells_are_short(document: Path) -> None:
    text = document.read_text()
    assert [lines for lines in paragraphs(text) if len(lines) > PARAGRAPH_LINES] == []
    assert list(wide_lines(text)) == []
    assert [cell for cell in cells(text) if len(cell) > CELL_COLUMNS] == []


def test_what_is_too_long_is_found() -> None:
    text = f"- item\n{'  more\n' * 6}\nshort\n\n    code {'x' * 200}\n\n| a | [b](c){'x ' * 101} |\n"
    assert [len(lines) for lines in paragraphs(text)] == [7, 1]
    assert list(wide_lines(text)) == [f"    code {'x' * 200}"]
    assert max(map(len, cells(text))) > CELL_COLUMNS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_one_page_says_what_has_run_on_gpus(document: Path) -> None:
    assert document.name == "gpu.md" or speaks_of_gpus(document.read_text()) == []


@pytest.mark.parametrize(
    "sentence",
    [
        "Not yet run on a GPU.",
        "Nothing of this has run on a GPU yet.",
        "No layout of several ranks has run on GPUs yet;",
        "It has not run\non GPUs yet.",
        "(not yet run on a GPU)",
        "Not yet timed on a GPU.",
        "Parts have run on one H100 or one H200: torch alone.",
        "the canary ran on an H200",
    ],
)
def test_a_sentence_on_gpus_is_found(sentence: str) -> None:
    assert speaks_of_gpus(sentence)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_are_for_any_shell(document: Path) -> None:
    assert [command for block in blocks(document.read_text()) for command in patterns_of_zsh(block)] == []


def test_a_pattern_of_zsh_is_found() -> None:
    block = textwrap.dedent("""\
        python -m megatron_grpo.verify model=tiny:qwen3 layouts=[tp2,pp2]
        python -m megatron_grpo.train +exp=mine ~env.math
        python -m megatron_grpo.train +exp=mine '~env.math' 'k=[1,4]'  # [a]
        """)
    assert patterns_of_zsh(block) == block.splitlines()[:2]
