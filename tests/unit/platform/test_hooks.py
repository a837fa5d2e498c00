"""The registry of hooks into libraries; processes without the GPU that they were given; stores that were closed."""

import ast
import importlib
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_grpo.cluster.ray_cluster import SHARED_GPUS, list_assigned_gpus
from megatron_grpo.config.errors import RunError
from megatron_grpo.platform import device
from megatron_grpo.platform import hooks as registry
from megatron_grpo.platform.device import Platform, connect_store, open_store, require_gpus
from megatron_grpo.platform.hooks import LIBRARIES, Hook, check_hooks, find_untried_versions, load_hooks

ROOT = Path(__file__).parents[3]
OWN_METHODS = {"_asdict", "_convert", "_replace", "_fields", "_link_", "_mark_", "_number_"}
"""Private names that classes of this package have from each other, and the public ones of named tuples."""


def third_party_names(tree: ast.AST) -> set[str]:
    """Names in a file that stand for a hooked library, or something in it."""
    roots = {library.package.partition(".")[0] for library in LIBRARIES.values()}
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {
                (name.asname or name.name).split(".")[0] for name in node.names if name.name.split(".")[0] in roots
            }
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in roots:
            names |= {name.asname or name.name for name in node.names}
    return names


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def used_hooks(tree: ast.AST) -> Iterator[str]:
    """Last names of private attributes of others, of private imports, and of attributes of libraries that are set."""
    libraries = third_party_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("megatron_grpo"):
            yield from (name.name for name in node.names if is_private(name.name))
        if not isinstance(node, ast.Attribute):
            continue
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        of_library = isinstance(root, ast.Name) and root.id in libraries
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "os")
        if (is_private(node.attr) and not is_own) or (of_library and isinstance(node.ctx, ast.Store)):
            yield node.attr


def test_rows_of_installed_libraries_are_there() -> None:
    missing = []
    for hook in load_hooks():
        if LIBRARIES[hook.library].find_installed() is None:
            continue
        try:
            importlib.import_module(hook.module)
        except ImportError as error:
            missing.append(f"{hook.module}: {error}")
        else:
            missing += [f"{hook.module}:{'.'.join(hook.names)}"] if hook.is_missing() else []
    assert not missing
    check_hooks("cpu")
    check_hooks("cuda")
    assert not list(find_untried_versions())


def test_every_hook_of_the_package_has_a_row() -> None:
    rows = {name for hook in load_hooks() for name in hook.names}
    without = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in [*ROOT.glob("megatron_grpo/**/*.py"), *ROOT.glob("kernels/**/*.py")]
        for name in used_hooks(ast.parse(file.read_text()))
        if name not in rows | OWN_METHODS
    }
    assert not without, "give these a row in platform/hooks.yaml"


def test_every_row_is_used() -> None:
    text = "".join(file.read_text() for file in ROOT.glob("megatron_grpo/**/*.py"))
    assert not [hook for hook in load_hooks() if hook.names[-1] not in text]


@pytest.mark.parametrize(
    ("module", "names", "missing"),
    [
        ("made_up", ("there",), False),
        ("made_up", ("Kind", "inside"), False),
        ("made_up", ("gone",), True),
        ("made_up", ("Kind", "gone"), True),
        ("made_up.sub", ("not_imported",), False),
        ("made_up.lost", ("not_imported",), True),
    ],
)
def test_a_missing_symbol_is_one_clear_error(
    module: str, names: tuple[str, ...], missing: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "made_up").mkdir()
    (tmp_path / "made_up" / "__init__.py").write_text("there = 1\nclass Kind:\n    inside = 1\n")
    (tmp_path / "made_up" / "sub.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "made_up", ModuleType("made_up"))
    del sys.modules["made_up"]
    monkeypatch.setitem(LIBRARIES, "made-up", registry.Library("made_up", ">=1,<2", ("pytest",)))
    monkeypatch.setattr(registry, "load_hooks", lambda: (Hook("made-up", "both", module, names, "a reason"),))
    check_hooks("cuda")  # not imported here: nothing to look for
    importlib.import_module("made_up")
    if not missing:
        check_hooks("cuda")
        return
    with pytest.raises(RunError) as caught:
        check_hooks("cuda")
    text = str(caught.value)
    version = importlib.import_module("pytest").__version__
    assert f"pytest {version} has no {module}.{'.'.join(names)}" in text
    assert text.endswith("(a reason); install pytest>=1,<2")


def test_an_untried_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIBRARIES, "made-up", registry.Library("made_up", "<1", ("pytest",)))
    assert [name for name, _, _ in find_untried_versions()] == ["pytest"]


def test_dependencies_stay_within_the_tried_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(requirement for extra in project["optional-dependencies"].values() for requirement in extra),
    ]
    for library in LIBRARIES.values():
        upper = library.tried.partition(",")[2]
        for distribution in library.distributions:
            of_it = [
                requirement
                for requirement in requirements
                if requirement.partition(">")[0].partition("[")[0] == distribution
            ]
            assert all(requirement.endswith(upper) for requirement in of_it), of_it


# In a process of its own, whose platform is said to be CUDA before anything else is imported.
IMPORT_EVERYTHING = """
import importlib, json, sys
from pathlib import Path
import torch
from megatron_grpo.platform import device
cuda = device.Platform("cuda", torch.device("cuda", 0), "nccl")
device.detect_platform = lambda: cuda

import megatron_grpo
root = Path(megatron_grpo.__path__[0])
needs = []
for file in sorted(root.rglob("*.py")):
    parts = file.relative_to(root).with_suffix("").parts
    if parts[-1].startswith("cpu_") or parts[-1] == "megatron_on_cpu" or parts[0] == "conf" or parts[-1][:2] == "__":
        continue
    try:
        importlib.import_module(".".join(("megatron_grpo", *parts)))
    except ModuleNotFoundError as error:
        needs.append(error.name.split(".")[0])

import ray
from megatron_grpo.config.schema import GenerationConfig
from megatron_grpo.models.routed_experts import RoutedForm
from megatron_grpo.generation import engine
from megatron_grpo.generation.engine_arguments import VllmSettings, make_engine_arguments
ray.get_gpu_ids = lambda: [0]
settings = VllmSettings(
    index=0,
    model_path="model",
    config=GenerationConfig(),
    precision="bfloat16",
    max_total_sequence_length=8,
    routed=RoutedForm(layers=(0,), experts=8, top_k=2),
)
engine.prepare_processes(settings, "generation engine 0")
arguments = make_engine_arguments(settings)
names = [name for name in sys.modules if name.startswith("megatron_grpo.")]
found = [name for name in names if name.split(".")[-1].startswith("cpu_") or name.endswith(".megatron_on_cpu")]
print(json.dumps([arguments, found, len(names), needs]))
"""


@pytest.mark.slow
def test_no_module_imports_cpu_support() -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORT_EVERYTHING], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    arguments, modules, count, needs = json.loads(process.stdout.splitlines()[-1])
    assert not modules
    assert count > 150, "the modules were imported"
    assert set(needs) <= {"modelopt", "transformer_engine", "vllm"}
    assert arguments["enable_return_routed_experts"] is True
    assert "worker_cls" not in arguments


def test_a_gpu_that_is_given_and_not_seen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(device, "detect_platform", lambda: Platform("cpu", torch.device("cpu"), "gloo"))
    require_gpus([])
    with pytest.raises(RuntimeError, match=r"gave this process GPU 3 of .*CUDA_VISIBLE_DEVICES=3.*nvidia-smi"):
        require_gpus([3])


def test_a_gpu_that_is_seen_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "detect_platform", lambda: Platform("cuda", torch.device("cuda", 0), "nccl"))
    require_gpus([0])


def test_gpus_that_are_shared_with_ranks_are_assigned_as_those_of_ranks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray counts none for such a process."""
    monkeypatch.setattr("ray.get_gpu_ids", lambda: [7])
    assert list_assigned_gpus() == ["7"]
    monkeypatch.setattr("ray.get_gpu_ids", list)
    assert list_assigned_gpus() == []
    monkeypatch.setenv(SHARED_GPUS, "2,3")
    assert list_assigned_gpus() == ["2", "3"]


def test_a_store_is_reached_at_its_address() -> None:
    store = open_store("127.0.0.1", 10.0)
    connect_store(store.host, store.port, 10.0).set("key", "value")
    assert store.get("key") == b"value"


def test_a_closed_store_is_noticed_at_once() -> None:
    store = open_store("127.0.0.1", 10.0)
    host, port = store.host, store.port
    del store
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"no store listens at {host}:{port}"):
        connect_store(host, port, 10.0)
    assert time.monotonic() - began < 5.0
