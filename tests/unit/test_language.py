"""Names and first lines of docstrings in package and tests: what docs/extending.md asks of them, counted."""

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_grpo"
VERBS = frozenset((ROOT / "tests" / "support" / "verbs.txt").read_text().split())
REFUSED = frozenset((ROOT / "tests" / "support" / "refused_names.txt").read_text().split())
"""Pronouns and bare participles, which do not say what they name."""

MOST_WORDS, MEDIAN_WORDS = 14, 10
MOST_FUNCTION_LINES, MOST_FILE_LINES = 60, 420
MOST_TEST_WORDS = 20
"""A test says in a sentence what it shows, and a helper of tests what it stands in for."""

QUANTITIES = ("losses",)
"""Folders whose functions are formulas and have the name of what they compute, like `leave_one_out_baseline`."""
NOUNS = frozenset(
    {
        "main",
        # Names that users of NeMo RL know, or that the documents promise.
        "async_grpo_train",
        "chord_step",
        "chord_train",
        "distillation_step",
        "distillation_train",
        "dpo_step",
        "dpo_train",
        "grpo_step",
        "grpo_train",
        "kto_train",
        "labelled_data_processor",
        "math_data_processor",
        "option_problems",
        "ppo_step",
        "ppo_train",
        "preference_data_processor",
        "recorded_data_processor",
        "reward_model_train",
        "self_distillation_step",
        "self_distillation_train",
        "sft_step",
        "sft_train",
        "supervised_data_processor",
        "dynamic_sampling",
        "refit_policy_generation",
        "sampling_step",
        "setup",
    }
)
CONVERSIONS = ("as_", "from_", "in_", "of_", "on_", "to_", "with_", "without_")
"""Beginnings of conversions, constructors of other forms, and of functions that an event calls."""
NOUN_DECORATORS = frozenset(
    {"property", "cached_property", "setter", "contextmanager", "asynccontextmanager", "staticproperty", "override"}
)
"""What is used like a value or like a phrase after `with`; and methods that a library names."""
OF_LIBRARIES = frozenset(
    {
        "backward",
        "setup_variant_attrs",
        "backward_step",
        "fileno",
        "gating",
        "isatty",
        "postprocess",
        "preprocess",
        "routing",
        "sharded_state_dict",
        "shared_experts_compute",
        "unshare",
    }
)
"""Methods that torch, Megatron-Core and Python call by these names, where `override` does not say so."""
WRITTEN_BY_USERS = frozenset(
    {
        ("data/scores.py", "done"),  # a field of `Turn`, which users' environments set
        ("environments/tasks.py", "whole"),  # an option of an environment
        ("environments/tools.py", "found"),  # a parameter of a tool, which its description shows to the model
        ("verification/doctor/diagnosis.py", "others"),  # a key of doctor's JSON
    }
)
"""Refused names that stand in users' files or calls, so that another name would break them."""

SOURCES = sorted(PACKAGE.rglob("*.py"))
NOT_HELD = ("tests/integration/test_rollout_pool.py", "tests/unit/losses")
"""Tests whose names are not held to the same words."""
TEST_SOURCES = sorted(
    source
    for source in (*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py"))
    if not any(source.is_relative_to(ROOT / folder) for folder in NOT_HELD)
)
SHORT_HELPERS = frozenset({"fetched", "mapped", "undocumented", "validating"})
"""Helpers of `tests/support` that many tests call by one word."""
PARTICIPLES = frozenset({"begun", "chosen", "drawn", "learnt", "lent", "sent", "spoken", "taught", "written"})
"""Irregular ones; beside them every name of a single word in -ed."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def trees(*, without: tuple[str, ...] = ()) -> Iterator[tuple[Path, ast.Module]]:
    """The sources of the package but for some folders, parsed."""
    for source in SOURCES:
        path = source.relative_to(PACKAGE)
        if path.parts[0] not in without:
            yield path, ast.parse(source.read_text())


def names_of(tree: ast.Module) -> Iterator[str]:
    """Names that are assigned or are parameters, functions or attributes of classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, Function):
            yield node.name


def nameless_functions(tree: ast.Module) -> Iterator[str]:
    """Functions whose name begins with no verb, and has no reason not to."""
    for node in ast.walk(tree):
        if not isinstance(node, Function) or node.name.startswith("__"):
            continue
        decorators = {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}
        name = node.name.strip("_")
        if decorators & NOUN_DECORATORS or name in NOUNS | OF_LIBRARIES or name.startswith(CONVERSIONS):
            continue
        if name.split("_")[0] not in VERBS and not name.startswith("visit_"):
            yield node.name


def bare_functions(tree: ast.Module) -> Iterator[str]:
    """Functions of a module of tests that are a bare participle, or return nothing and begin with no verb."""
    for node in tree.body:
        if isinstance(node, Function) and node.name in nameless_functions(ast.Module([node], [])):
            word, returns = node.name.strip("_"), node.returns
            is_participle = "_" not in word and (word.endswith("ed") or word in PARTICIPLES)
            gives_nothing = isinstance(returns, ast.Constant) and returns.value is None
            is_fixture = any("fixture" in ast.unparse(decorator) for decorator in node.decorator_list)
            if (is_participle or gives_nothing) and not is_fixture and not word.startswith("pytest_"):
                yield node.name


def first_lines(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Functions and classes with the number of words in the first line of their docstring."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef) and (text := ast.get_docstring(node)):
            yield node.name, len(text.split("\n")[0].split())


def test_names_say_what_they_name() -> None:
    refused = {(str(path), name) for path, tree in trees() for name in names_of(tree) if name.strip("_") in REFUSED}
    assert refused == WRITTEN_BY_USERS


def test_functions_begin_with_a_verb() -> None:
    nameless = [f"{path}: {name}" for path, tree in trees(without=QUANTITIES) for name in nameless_functions(tree)]
    assert nameless == []


def test_first_lines_say_the_meaning_alone() -> None:
    lines = [(f"{path}: {name}", words) for path, tree in trees() for name, words in first_lines(tree)]
    assert [f"{name}: {words} words" for name, words in lines if words > MOST_WORDS] == []
    assert statistics.median(words for _, words in lines) <= MEDIAN_WORDS


def test_names_in_tests_say_what_they_name() -> None:
    """Fixtures, oracles and builders have the name of what they give."""
    problems = []
    for source in TEST_SOURCES:
        tree, path = ast.parse(source.read_text()), source.relative_to(ROOT)
        problems += [f"{path}: {name}" for name in names_of(tree) if name.strip("_") in REFUSED]
        problems += [
            f"{path}: {name} is no noun and no verb" for name in bare_functions(tree) if name not in SHORT_HELPERS
        ]
        problems += [
            f"{path}: {name} has {words} words" for name, words in first_lines(tree) if words > MOST_TEST_WORDS
        ]
    assert problems == []


def test_no_module_name_stands_twice() -> None:
    counts = Counter(source.name for source in SOURCES if not source.name.startswith("__"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_functions_and_files_are_short() -> None:
    long = [
        f"{path}: {node.name}"
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, Function) and (node.end_lineno or 0) - node.lineno >= MOST_FUNCTION_LINES
    ]
    assert long == []
    assert [source.name for source in SOURCES if source.read_text().count("\n") > MOST_FILE_LINES] == []


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("for one in range(3): pass", "one"),
        ("def made(): pass", "made"),
        ("class A:\n    def _f(self, given): pass", "given"),
    ],
)
def test_a_pronoun_is_noticed(source: str, problem: str) -> None:
    assert problem in {name for name in names_of(ast.parse(source)) if name in REFUSED}


def test_a_function_without_a_verb_is_noticed() -> None:
    source = "def joined(): pass\ndef join(): pass\n@property\ndef parts(self): pass\ndef as_text(): pass\n"
    assert list(nameless_functions(ast.parse(source))) == ["joined"]


def test_code_outside_the_configuration_reads_the_loop_that_runs() -> None:
    """`config.grpo` holds defaults in a PPO run: the shared keys are in the section of the algorithm that runs."""
    pattern = re.compile(r"\bconfig\.(?:grpo|ppo|sft|dpo)\b")
    lines = [
        f"{file.relative_to(PACKAGE)}:{number}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file.relative_to(PACKAGE).parts[0] != "config"
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert not lines, f"use config.loop: {lines}"
