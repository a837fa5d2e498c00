"""Planted defects for the doctor: the table of cases, and how an answer of the doctor is judged."""

import io
import json
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import yaml

from megatron_grpo import doctor
from megatron_grpo.config.keys import build_values
from megatron_grpo.run.directory import override_values
from tests.support.planted import engines, histories, plants, records, trainers, weights
from tests.support.planted.plants import Plant
from tests.support.recorded_runs import RecordedRun

NOWHERE = frozenset({"unexplained"})
"""Causes that claim nothing."""
TENSOR = re.compile(r"(?:model\.|lm_head)[\w.]+")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A defect and the answer that names it, or a healthy run."""

    name: str
    run: str
    """Name of the run in which it is planted (`runs.RUNS`)."""
    plant: Plant
    causes: frozenset[str] = frozenset()
    """Causes that are true; any other, except `NOWHERE`, is a wrong one. None: a healthy run."""
    words: tuple[str, ...] = ()
    """Patterns of which each has to stand in the text or the key of a finding."""
    tensors: str | None = None
    """Pattern of the tensors that a text may name; None: any."""
    must: bool = True
    """Whether it has to be named; else it is enough that the run is not called healthy, and nothing wrong is."""
    overrides: tuple[str, ...] = ()
    """Changes of the run's configuration."""
    fast: bool = False
    """Whether every run of the tests has it; the others are slow."""


@dataclass(frozen=True)
class Answer:
    """What the command said."""

    code: int
    diagnosis: dict[str, Any]
    """The JSON object; empty if the command refused."""
    errors: str
    """Standard error."""

    @property
    def texts(self) -> str:
        """Texts and keys of all findings, or the message."""
        findings = self.diagnosis.get("findings", [])
        return " | ".join(f"{finding['text']} [{finding['key']}]" for finding in findings) or self.errors

    @property
    def causes(self) -> set[str]:
        return {finding["cause"] for finding in self.diagnosis.get("findings", [])}


def examine(run: RecordedRun, *arguments: str) -> Answer:
    """The command's answer on the newest step of a run."""
    out, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        code = doctor.main([str(run.run_dir), "--json", *arguments])
    return Answer(code, json.loads(out.getvalue()) if out.getvalue() else {}, errors.getvalue())


def verdict(case: Case, answer: Answer) -> str:
    """named, unnamed, healthy or wrong, and why."""
    if answer.code == 0:
        return "healthy"
    wrong = answer.causes - case.causes - NOWHERE
    if wrong:
        return f"wrong: the cause {', '.join(sorted(wrong))}"
    named = {name for finding in answer.diagnosis.get("findings", []) for name in TENSOR.findall(finding["text"])}
    stray = sorted(name for name in named if case.tensors is not None and not re.search(case.tensors, name))
    if stray:
        return f"wrong: it accuses {', '.join(stray)}"
    missing = [word for word in case.words if not re.search(word, answer.texts, re.IGNORECASE)]
    return f"unnamed: nothing says {', '.join(missing)}" if missing else "named"


def fresh(run: RecordedRun, root: Path, *overrides: str) -> RecordedRun:
    """A run with the weights of another one, an empty record, and changes of the configuration."""
    (root / "run").mkdir(parents=True)
    if (run.run_dir / "checkpoints").is_dir():
        (root / "run" / "checkpoints").symlink_to(run.run_dir / "checkpoints")
    values = override_values(build_values(run.config), [f"run_dir={root / 'run'}", *overrides], "the test")
    return replace(run, root=root, config=values, samples=values.loop.num_generations_per_prompt)


PLANTS: tuple[ModuleType, ...] = (plants, weights, engines, trainers, records, histories)


def find_function(name: str) -> Callable[..., Any]:
    """A function that the table names."""
    function: Callable[..., Any] = next(vars(module)[name] for module in PLANTS if name in vars(module))
    return function


class _Loader(yaml.SafeLoader):
    """Reads `!name` as a call of a function of `PLANTS` with its arguments, and `!f name` as the function itself."""

    def call_function(self, name: str, node: yaml.Node) -> Any:
        function = find_function(name)
        if isinstance(node, yaml.MappingNode):
            return function(**{str(key): value for key, value in self.construct_mapping(node, deep=True).items()})
        if isinstance(node, yaml.SequenceNode):
            return function(*self.construct_sequence(node, deep=True))
        return function(yaml.safe_load(node.value))


_Loader.add_constructor("!dtype", lambda _, node: getattr(torch, node.value))
_Loader.add_constructor("!f", lambda _, node: find_function(node.value))
_Loader.add_multi_constructor("!", _Loader.call_function)


def read_cases() -> dict[str, list[Case]]:
    """The table by subject."""
    file = Path(__file__).parents[2] / "data" / "planted_defects.yaml"
    table = yaml.load(file.read_text(), _Loader)
    kinds = {"causes": frozenset, "words": tuple, "overrides": tuple}
    return {
        subject: [Case(**{key: kinds.get(key, lambda text: text)(value) for key, value in row.items()}) for row in rows]
        for subject, rows in table.items()
        if subject != "sets"
    }


CASES = read_cases()
HEALTHY = CASES.pop("healthy")
DEFECTS = [case for subject in CASES.values() for case in subject]
