"""What the documents show: commands, YAML, links, names of metrics and families of models."""

import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_COMMAND = re.compile(
    r"(?:\.venv/bin/)?python (?:-m megatron_grpo\.\w+|benchmarks/\w+\.py)\b|(?:\S+=\S+ )*(?:make|sbatch) \S"
)
_INLINE = re.compile(r"`((?:python -m megatron_grpo\.|python benchmarks/|make )[^`]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")


class Command(NamedTuple):
    """One command of a document."""

    document: str
    words: tuple[str, ...]
    """Without the interpreter: module or script first, or `make`, or `sbatch`."""

    def __str__(self) -> str:
        return f"{self.document}: {' '.join(self.words)}"


def commands(document: Path) -> Iterator[Command]:
    """The commands of a document, those in blocks and those within a sentence."""
    text = document.read_text()
    for block in blocks(text):
        for line in block.replace("\\\n", " ").splitlines():
            if _COMMAND.match(line):
                yield Command(document.name, _words(line))
    for command in _INLINE.findall(text.replace("\n", " ")):
        yield Command(document.name, _words(command))


def blocks(text: str) -> Iterator[str]:
    """The blocks of code of a text, fenced or indented, without their indentation."""
    fenced = re.compile(r"^```\w*\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
    yield from fenced.findall(text)
    for block in re.findall(r"(?:^(?: {4}.*)?\n)+", fenced.sub("\n", text), flags=re.MULTILINE):
        if block.strip():
            yield textwrap.dedent(block).strip("\n") + "\n"


def yaml_blocks(text: str) -> Iterator[dict[str, Any]]:
    """The blocks of a text that are fenced as YAML, or indented and begin with a key."""
    for block in blocks(text):
        if re.match(r"\w+:\n", block):
            yield yaml.safe_load(block)


def broken_links(document: Path, text: str) -> list[str]:
    """Links of a document to files that are not there, or to headings that the file has not."""
    return [link for link in _LINK.findall(text) if "://" not in link and not _leads_somewhere(document, link)]


def _leads_somewhere(document: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = document.parent / name if name else document
    return target.exists() and (not anchor or anchor in _anchors(target.read_text()))


def _anchors(text: str) -> set[str]:
    """Names of a text's headings in links: small letters, hyphens for blanks, no punctuation."""
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _words(line: str) -> tuple[str, ...]:
    words = shlex.split(line.replace("…", "..."), comments=True)
    if words[0].endswith("python"):
        return tuple(words[2:] if words[1] == "-m" else words[1:])
    return tuple(words)


METRICS = (ROOT / "docs" / "observing.md").read_text().partition("\n## Metrics\n")[2].partition("\n## Evaluation\n")[0]


def undocumented(metrics: Iterable[str]) -> set[str]:
    """Those of the metrics that the page lacks."""
    pattern = "|".join(_patterns())
    return {name for name in metrics if not re.fullmatch(pattern, name)}


def _patterns() -> set[str]:
    """First columns of the tables: whole names, with NAME for any name, and endings of the name before them."""
    patterns = {name.replace("NAME", r"\w+") for name in re.findall(r"`(val_[\w/]+)`", METRICS)}
    for cell in re.findall(r"^\| (`.*?) \|", METRICS, flags=re.MULTILINE):
        first_name = ""
        for name in re.findall(r"`([\w/]+)`", cell):
            if not name.startswith("_"):
                first_name = name
                patterns.add(name.replace("NAME", r"\w+"))
            else:
                parts = first_name.split("_")
                patterns |= {"_".join(parts[:count]) + name for count in range(1, len(parts) + 1)}
    return patterns


LIMITS = {"glm": 40, "dots1": 60}
"""Lines that a file of each family may have."""


def read_family_files() -> dict[str, str]:
    """The files in the text, by the name of their family."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    files = [file for file in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "FAMILY = Family(" in file]
    return {re.search(r'name="(\w+)"', file)[1]: file for file in files}  # type: ignore[index]
