"""The CPU compatibility layer: its targets exist, and what it replaces behaves like a GPU's."""

import ast
import importlib
import inspect
import json
import subprocess
import sys

import pytest
import torch

from megatron_grpo.platform.device import detect_platform
from megatron_grpo.platform.megatron_on_cpu import CUDA_MODULES, FACTORIES, apply_patches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the layer is only used without CUDA")

# In a process of its own: in this one the originals are gone after the first test.
REPLACED_NAMES = """
import importlib, json
from functools import reduce
from megatron_grpo.platform.megatron_on_cpu import apply_patches
from megatron_grpo.platform.hooks import load_hooks

# torch.compile is replaced only while Megatron-Core is imported.
rows = [one for one in load_hooks() if one.platform == "cpu" and one.names not in (("torch",), ("compile",))]
rows = [one for one in rows if one.library == "megatron-core" or one.names[0] == "Tensor"]

def found():
    return [reduce(getattr, one.names, importlib.import_module(one.module)) for one in rows]

# Without Transformer Engine some names are as after the patch: something else stands there before.
importlib.import_module("megatron.core.transformer.moe.moe_utils").te_general_gemm = object()
for hook in rows:
    if hook.module in ("megatron.core.optimizer" + part for part in ("", ".clip_grads", ".optimizer")):
        setattr(importlib.import_module(hook.module), hook.names[0], object())
before = found()
apply_patches()
once = found()
apply_patches()
print(json.dumps([[str(row), a is not b, b is c] for row, a, b, c in zip(rows, before, once, found())]))
"""


@pytest.fixture(autouse=True)
def _patched() -> None:
    apply_patches()


def mentions_cuda(tree: ast.AST) -> bool:
    return any(
        (isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.cuda."))
        or (isinstance(node, ast.Constant) and node.value == "cuda")
        for node in ast.walk(tree)
    )


def factories_on_cuda(tree: ast.AST) -> set[str]:
    """Names of torch's functions that are called with device="cuda"."""
    return {
        node.func.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        for keyword in node.keywords
        if keyword.arg == "device" and isinstance(keyword.value, ast.Constant) and keyword.value.value == "cuda"
    }


def source(module: str) -> ast.AST:
    return ast.parse(inspect.getsource(importlib.import_module(module)))


@pytest.mark.parametrize("name", CUDA_MODULES)
def test_module_still_asks_for_cuda_and_gets_the_cpu(name: str) -> None:
    assert mentions_cuda(source(name)), f"{name} needs no patch any more"
    own_torch = importlib.import_module(name).torch
    assert own_torch.cuda.current_device() == torch.device("cpu")
    assert own_torch.Tensor is torch.Tensor


def test_every_factory_with_a_literal_device_is_covered() -> None:
    assert set.union(*(factories_on_cuda(source(name)) for name in CUDA_MODULES)) == set(FACTORIES)


def test_patched_names_exist_and_are_replaced_once() -> None:
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REPLACED_NAMES], capture_output=True, text=True, check=True, timeout=400
    )
    rows = json.loads(process.stdout)
    assert len(rows) >= 8
    for row, replaced, stays in rows:
        assert replaced, f"{row} is listed but not patched"
        assert stays, f"{row} is patched again by a second call"


def test_torch_itself_is_left_alone() -> None:
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    assert torch.cuda.synchronize.__module__ == "torch.cuda"


def test_tensor_types_look_like_cuda_and_convert_back() -> None:
    weight = torch.zeros(2, dtype=torch.bfloat16)
    assert weight.type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(2).type(weight.type()).dtype == torch.bfloat16
    assert weight.type(torch.float32).dtype == torch.float32
    assert weight.cuda() is weight


def test_rng_tracker_draws_from_its_own_states() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(0)
    tracker.add("experts", 5)
    with tracker.fork("experts"):
        inside = [torch.rand(3), torch.rand(3)]
    outside = torch.rand(3)
    expected = torch.Generator().manual_seed(5)
    assert torch.equal(inside[0], torch.rand(3, generator=expected))
    assert torch.equal(inside[1], torch.rand(3, generator=expected))
    assert torch.equal(outside, torch.rand(3, generator=torch.Generator().manual_seed(0)))


def test_platform_is_the_cpu_here() -> None:
    platform = detect_platform()
    assert (platform.name, platform.backend, platform.device) == ("cpu", "gloo", torch.device("cpu"))
