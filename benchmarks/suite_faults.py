"""Plants the faults of suite_faults.yaml one at a time in a copy of the repository, and asks which test fails.

    python benchmarks/suite_faults.py --result FILE [--only PART|NAME ...] [--stages unit parity] [--limit SECONDS]
        [--confirm]

The copy is a git worktree of the commit, put first on PYTHONPATH, so that tests import it in place of the installed
package. The tests of a fault run in order of likelihood, `pytest -x -m "not slow and not later"`, by stages:

    likely       unit tests that import the faulty module, themselves or through tests/support
    unit         the other unit tests of the part's folders
    parity       files of tests/parity that reach the module over at most one other
    integration  files of tests/integration that do; only on request

In the end all tests that caught a fault run once without any; where one fails then too, the fault is tried without it.
With --confirm only the tests that a result names run, each alone with its fault: what a changed suite still catches.
FILE is written after every fault, and a later call goes on with the faults that it lacks.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from header import header

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_suffix(".yaml")
FOLDERS = {
    "losses": ("losses", "algorithms"),
    "layouts": ("trainer", "models", "batch"),
    "weight_sync": ("weight_sync", "generation"),
    "config": ("config", "preflight"),
    "data": ("data",),
    "rollouts": ("rollouts", "environments", "generation"),
}
"""Folders of tests/unit by part."""
STAGES = ("likely", "unit", "parity", "integration")
FAR = 9  # distance of a test that does not reach a module
FIRST_FILES = 2, 6  # files of the first calls of a stage: pytest imports all files of a call before its first test


@dataclass(frozen=True, slots=True)
class Fault:
    """A mistake in one file."""

    name: str
    part: str
    file: str
    before: str
    after: str

    @property
    def module(self) -> str:
        """The file's module, dotted."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(slots=True)
class Verdict:
    """Outcome of a fault: which test caught it, if any."""

    name: str
    part: str
    file: str
    caught: bool = False
    stage: str | None = None  # in which a test failed
    test: str | None = None
    tests_run: int = 0  # that passed, and the one that failed
    seconds: float = 0.0
    timed_out: bool = False  # the limit passed before all stages had ended
    sound: bool | None = None  # whether the test passes without the fault; None: not tried
    confirmed: bool | None = None  # whether the test, run alone, fails with the fault; None: not tried
    unsound: list[str] = field(default_factory=list)  # tests that fail without the fault too


def read_faults() -> list[Fault]:
    return [Fault(**row) for row in yaml.safe_load(TABLE.read_text())]


class ImportGraph:
    """Modules that files of the repository import, and how far tests are from a module."""

    def __init__(self, root: Path) -> None:
        files = [file for folder in ("megatron_grpo", "tests") for file in (root / folder).rglob("*.py")]
        names = {self._name_module(file.relative_to(root)): file for file in files}
        self._texts = {name: file.read_text(encoding="utf-8") for name, file in names.items()}
        self._imports = {name: set(self._list_imports(text)) & names.keys() for name, text in self._texts.items()}
        self.tests = {
            name: str(file.relative_to(root)) for name, file in names.items() if file.name.startswith("test_")
        }

    @staticmethod
    def _name_module(file: Path) -> str:
        return ".".join(file.with_suffix("").parts).removesuffix(".__init__")

    @staticmethod
    def _list_imports(text: str) -> Iterator[str]:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    @cache  # noqa: B019 - one graph lives as long as the program
    def _collect_package_modules(self, test: str) -> tuple[set[str], set[str]]:
        """Collect modules of the package: those of the test itself, and those of its helpers."""
        direct = {name for name in self._imports[test] if name.startswith("megatron_grpo")}
        helpers, waiting = {test}, [test]
        while waiting:
            new = {name for name in self._imports[waiting.pop()] if name.startswith("tests")} - helpers
            helpers |= new
            waiting += new
        through = {name for helper in helpers for name in self._imports[helper] if name.startswith("megatron_grpo")}
        return direct, through

    def measure_distance(self, test: str, module: str) -> int:
        """Measure it: 0 itself, 1 through helpers, 2 through a module of the package."""
        direct, through = self._collect_package_modules(test)
        if module in direct:
            return 0
        if module in through:
            return 1
        return 2 if any(module in self._imports[name] for name in through) else FAR

    def count_mentions(self, test: str, words: Sequence[str]) -> int:
        return sum(len(re.findall(rf"\b{word}\b", self._texts[test])) for word in words)


def list_definitions(source: str, position: int) -> list[str]:
    """List the functions and classes around a position, and the file's functions that call them."""
    line = source.count("\n", 0, position) + 1
    definitions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    ]
    around = [node.name for node in definitions if node.lineno <= line <= (node.end_lineno or 0)]
    callers = [
        node.name
        for node in definitions
        if any(isinstance(part, ast.Name) and part.id in around for part in ast.walk(node))
    ]
    return [name for name in dict.fromkeys([*around, *callers]) if not name.startswith("__")]


def split_words(text: str) -> set[str]:
    return {word.removesuffix("s") for word in re.findall(r"[a-z0-9]+", text.lower())} - {
        "test",
        "py",
        "megatron",
        "grpo",
    }


def plan_stages(graph: ImportGraph, fault: Fault, stages: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each stage with its files, the likeliest first."""
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    definitions = list_definitions(source, source.index(fault.before))
    about = split_words(f"{fault.name} {fault.module}")
    ranked = sorted(
        (
            graph.measure_distance(test, fault.module),
            -len(about & split_words(test.rpartition(".")[2])) - (graph.count_mentions(test, definitions) > 0),
            -graph.count_mentions(test, definitions),
            test,
        )
        for test in graph.tests
    )
    folders = tuple(f"tests/unit/{folder}/" for folder in FOLDERS[fault.part])
    files: dict[str, list[str]] = {stage: [] for stage in STAGES}
    for distance, _, mentions, test in ranked:
        path = graph.tests[test]
        kind = path.split("/")[1]
        if kind == "unit" and (distance <= 1 or (distance == 2 and mentions)):
            files["likely"].append(path)
        elif path.startswith(folders):
            files["unit"].append(path)
        elif kind in ("parity", "integration") and distance < FAR:
            files[kind].append(path)
    for stage in stages:
        begin = 0
        for size in (*FIRST_FILES, len(ranked)):
            if part := files[stage][begin : begin + size]:
                yield stage, part
            begin += size


@contextmanager
def make_copy() -> Iterator[Path]:
    """Make a worktree of the commit, and remove it."""
    copy = Path(tempfile.mkdtemp(prefix="suite_faults_")) / "tree"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(copy), "HEAD"], cwd=ROOT, check=True)
    try:
        yield copy
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(copy)], cwd=ROOT, check=False)
        shutil.rmtree(copy.parent, ignore_errors=True)


@contextmanager
def plant(fault: Fault, copy: Path) -> Iterator[None]:
    """Have the fault in the copy, in the body."""
    file = copy / fault.file
    text = file.read_text(encoding="utf-8")
    assert text.count(fault.before) == 1, f"{fault.file} has not exactly one place for {fault.name}"
    try:
        _write(file, text.replace(fault.before, fault.after))
        yield
    finally:
        _write(file, text)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    # Python knows compiled files by seconds and size, and a fault may change neither.
    Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def run_python(copy: Path, words: Sequence[str], limit: float) -> tuple[int | None, str]:
    """Run Python in the copy; returns exit code (None: too long) and output."""
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=copy, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(max(limit, 1.0))
        finally:  # also when the benchmark itself is ended
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()


def run_tests(copy: Path, tests: Sequence[str], limit: float, deselected: Sequence[str] = ()) -> tuple[Any, ...]:
    """Run tests until one fails; returns exit code, its name if any, and tests run."""
    options = ["-m", "pytest", "-x", "-v", "-m", "not slow and not later", "-p", "no:cacheprovider", "--color=no"]
    options += [word for test in deselected for word in ("--deselect", test)]
    code, output = run_python(copy, [*options, *tests], limit)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/[^\n]+?)(?: - .*)?$", output, re.MULTILINE)
    ended = re.findall(r"^tests/\S.* (?:PASSED|FAILED|ERROR)(?: +\[ *\d+%\])?$", output, re.MULTILINE)
    if code not in (0, 1, 5, None) and failed is None:
        print(output[-2000:], file=sys.stderr)
    return code, failed[1] if failed is not None else None, len(ended)


def try_fault(
    graph: ImportGraph, fault: Fault, copy: Path, stages: Sequence[str], limit: float, unsound: list[str]
) -> Verdict:
    """Run the stages until a test catches the fault or the limit has passed."""
    verdict, began = Verdict(fault.name, fault.part, fault.file, unsound=unsound), time.monotonic()
    with plant(fault, copy):
        for stage, files in plan_stages(graph, fault, stages):
            code, test, count = run_tests(copy, files, limit - (time.monotonic() - began), unsound)
            verdict.tests_run += count
            verdict.seconds = round(time.monotonic() - began, 1)
            verdict.timed_out = code is None
            if test is not None:
                verdict.caught, verdict.stage, verdict.test = True, stage, test
            if verdict.caught or verdict.timed_out:
                break
    return verdict


def confirm(fault: Fault, verdict: Verdict, copy: Path, limit: float) -> None:
    """Run the test that caught a fault alone, with the fault."""
    with plant(fault, copy):
        _, test, _ = run_tests(copy, [str(verdict.test)], limit)
    verdict.confirmed = test is not None


def check_soundness(copy: Path, verdicts: Sequence[Verdict]) -> None:
    """Run the tests that caught a fault without any, and find those that fail then too."""
    unchecked = [verdict for verdict in verdicts if verdict.test is not None and verdict.sound is None]
    tests = sorted({str(verdict.test) for verdict in unchecked})
    words = ["-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", "--color=no", *tests]
    _, output = run_python(copy, words, 60.0 * len(tests)) if tests else (0, "")
    passed = set(re.findall(r"^PASSED (tests/.+)$", output, re.MULTILINE))
    for verdict in unchecked:
        verdict.sound = verdict.test in passed
        verdict.unsound += [] if verdict.sound else [str(verdict.test)]


def summarize(verdicts: Sequence[Verdict]) -> dict[str, dict[str, int]]:
    """Count faults by part, and by the stage that caught them."""
    summary: dict[str, dict[str, int]] = {}
    for verdict in verdicts:
        counts = summary.setdefault(verdict.part, dict.fromkeys(("faults", "caught", *STAGES), 0))
        counts["faults"] += 1
        counts["caught"] += verdict.caught
        if verdict.stage is not None:
            counts[verdict.stage] += 1
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART|NAME")
    parser.add_argument("--stages", nargs="+", default=STAGES[:3], choices=STAGES)
    parser.add_argument("--limit", type=float, default=900.0, metavar="SECONDS", help="of one fault")
    parser.add_argument("--again", action="store_true", help="try faults anew that the result has")
    parser.add_argument("--confirm", action="store_true", help="run the tests that the result names, and no others")
    parser.add_argument("--list", action="store_true", help="print the files of each stage alone")
    options = parser.parse_args()
    earlier = json.loads(options.result.read_text())["faults"] if options.result.is_file() else []
    verdicts = {row["name"]: Verdict(**row) for row in earlier}
    graph, faults = ImportGraph(ROOT), read_faults()
    chosen = [fault for fault in faults if not options.only or {fault.part, fault.name} & set(options.only)]
    if options.list:
        for fault in chosen:
            print(
                fault.name, *(f"\n  {stage}: {' '.join(files)}" for stage, files in plan_stages(graph, fault, STAGES))
            )
        return

    def write_result() -> None:
        ordered = [verdicts[fault.name] for fault in faults if fault.name in verdicts]
        result = {**header("suite_faults"), "summary": summarize(ordered), "faults": list(map(asdict, ordered))}
        options.result.write_text(json.dumps(result, indent=1) + "\n")

    with make_copy() as copy:
        _, imported = run_python(copy, ["-c", "import megatron_grpo; print(megatron_grpo.__file__)"], 60.0)
        print(imported.strip(), flush=True)
        assert imported.startswith(str(copy)), "the tests would import another copy"
        if options.confirm:
            for fault in chosen:
                if (verdict := verdicts.get(fault.name)) is not None and verdict.test is not None:
                    confirm(fault, verdict, copy, options.limit)
                    print(fault.name, verdict.confirmed, flush=True)
                    write_result()
            return
        unsound: dict[str, list[str]] = {}
        while True:
            for fault in chosen:
                if fault.name in verdicts and not options.again:
                    continue
                arguments = options.stages, options.limit, unsound.get(fault.name, [])
                verdict = verdicts[fault.name] = try_fault(graph, fault, copy, *arguments)
                print(json.dumps(asdict(verdict)), flush=True)
                write_result()
            options.again = False
            check_soundness(copy, [verdicts[fault.name] for fault in chosen])
            write_result()
            unsound = {
                fault.name: verdicts[fault.name].unsound for fault in chosen if verdicts[fault.name].sound is False
            }
            if not unsound:
                break
            for name in unsound:
                del verdicts[name]


if __name__ == "__main__":
    main()
