"""Programs with their Python tests, from tests/data: honest ones of many kinds, each right and wrong; hostile ones.

A file has an entry for each program: a line `=== NAME`, the program, and parts that begin with lines `--- PART`. Parts
of honest programs: `test`, a text of tests, and `wrong`, a text of the program and what makes it wrong in its place.
Parts of hostile programs: `test`, or `tests` with the name of an entry of tests (else those of `tests: equal`);
`after`, with the name of an entry of text before the program; `touches`, if figures tell that it looks into its
interpreter.
"""

from dataclasses import dataclass
from pathlib import Path

_DATA = Path(__file__).parents[1] / "data"


@dataclass(frozen=True)
class Honest:
    """A right program with its tests, and a wrong one."""

    kind: str
    program: str
    tests: tuple[str, ...]
    wrong: str


@dataclass(frozen=True)
class Hostile:
    """A program that wants a reward without solving anything, with tests that it can hope to fool."""

    kind: str
    program: str
    tests: tuple[str, ...]
    touches: bool


Parts = list[tuple[str, str]]


def _entries(file: str) -> dict[str, Parts]:
    """Entries of a file by name; the parts of each with their texts, the program under "" first."""
    entries: dict[str, Parts] = {}
    for entry in (_DATA / file).read_text().removeprefix("=== ").split("\n=== "):
        name, *parts = f"{entry.strip()}\n".split("\n--- ")
        name, _, program = name.partition("\n")
        entries[name] = [
            ("", program),
            *((key, text.strip("\n")) for key, _, text in (part.partition("\n") for part in parts)),
        ]
    return entries


def _of(parts: Parts, name: str) -> tuple[str, ...]:
    return tuple(text for key, text in parts if key == name)


def _honest() -> list[Honest]:
    programs = []
    for kind, parts in _entries("honest_programs.txt").items():
        (program,), ((right, _, wrong),) = _of(parts, ""), (text.partition("\n") for text in _of(parts, "wrong"))
        assert right in program, f"{kind} has no text {right}"
        programs.append(Honest(kind, program, _of(parts, "test"), program.replace(right, wrong)))
    return programs


def _hostile() -> list[Hostile]:
    entries, programs = _entries("hostile_programs.txt"), []
    for kind, parts in entries.items():
        if kind.startswith(("tests: ", "part: ")):
            continue
        (program,) = _of(parts, "")
        before = [f"{entries[f'part: {name}'][0][1]}\n" for name in _of(parts, "after")]
        (tests,) = _of(parts, "tests") or ("equal",)
        texts = _of(parts, "test") or hostile_tests(tests)
        programs.append(Hostile(kind, "".join([*before, program]), texts, bool(_of(parts, "touches"))))
    return programs


def hostile_tests(name: str) -> tuple[str, ...]:
    """Tests that several hostile programs attack, by their name."""
    return _of(_entries("hostile_programs.txt")[f"tests: {name}"], "test")


HONEST, HOSTILE = _honest(), _hostile()
