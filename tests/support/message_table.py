"""Tables of what is said of command lines, as text files beside their tests."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.config.errors import Problem


@dataclass
class MessageRow:
    """A command line, and all that is said of it: subjects, each with a part of its text."""

    base: str
    overrides: list[str] = field(default_factory=list)
    messages: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return " ".join([self.base, *self.overrides])[:80]

    def check(self, problems: Iterable[Problem]) -> None:
        """Fail unless these are the row's messages, and there are no others."""
        texts = sorted((problem.subject, problem.text) for problem in problems)
        assert [subject for subject, _ in texts] == [subject for subject, _ in sorted(self.messages)], texts
        for subject, part in self.messages:
            assert any(part in text for key, text in texts if key == subject), texts


def read_table(file: Path) -> list[MessageRow]:
    """Read the rows of a table.

    A line "= BASE" begins the rows that add to the command line BASE. A row is lines of overrides, with two spaces
    between, and indented lines "SUBJECT  PART OF THE TEXT", none if nothing is said; lines that are indented further
    go on with the text, and an empty line ends the row.
    """
    base, rows = "", []
    for block in file.read_text().split("\n\n"):
        row = MessageRow(base)
        for line in block.splitlines():
            if line.startswith("= "):
                base = row.base = line.removeprefix("= ")
            elif line.startswith(8 * " "):
                subject, text = row.messages[-1]
                row.messages[-1] = (subject, f"{text} {line.strip()}")
            elif line.startswith(4 * " "):
                subject, _, text = line.strip().partition("  ")
                row.messages.append((subject, text))
            else:
                row.overrides += line.split("  ")
        if row.overrides:
            rows.append(row)
    return rows


def read_rows(file: str, test: str) -> list[Any]:
    """The rows of a parametrized test in tests/data/rows.yaml."""
    rows: list[Any] = yaml.safe_load((Path(__file__).parents[1] / "data" / "rows.yaml").read_text())[file][test]
    return rows
