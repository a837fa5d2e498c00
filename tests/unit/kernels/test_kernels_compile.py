"""The Triton kernels compile to machine code of GPUs, on a machine without one: the interpreter checks no types."""

import re
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_grpo_kernels import fp8_kernels, fused_logprob

GPUS = pytest.mark.parametrize(
    "capability", [pytest.param(80, id="A100", marks=pytest.mark.slow), pytest.param(90, id="H100")]
)
FLOAT32, INDEX = "*fp32", "i32"


def shared_memory(kernel: Any, signature: dict[str, str], settings: dict[str, Any], capability: int) -> int:
    """Bytes of a block of the grid, of a kernel compiled for pointers, and a hidden size, that 16 divides."""
    settings = dict(settings)
    options = {name: settings.pop(name) for name in ("num_warps", "num_stages") if name in settings}
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    assert {name for name, kind in signature.items() if kind == "constexpr"} == settings.keys()
    divided = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name == "width"
    }
    source = ASTSource(kernel, signature, settings, divided)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    return int(compiled.metadata.shared)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton 3.9 warns that 3.10 may have another default


@GPUS
@pytest.mark.parametrize(("even", "capped"), [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fused_logprobs(
    dtype: str,
    even: bool,
    capped: bool,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They fit into shared memory, and all but a few numbers of a thread into its registers."""
    monkeypatch.setattr(triton.knobs.nvidia, "dump_ptxas_log", True)
    tile = fused_logprob.SINGLE if dtype == "fp32" else fused_logprob.HALF
    settings = {**tile, "EVEN": even, "CAPPED": capped, "WIDEN": False}
    numbers = dict.fromkeys(("tokens", "all_columns", "width", "columns_of_split"), INDEX)
    numbers |= dict.fromkeys(("scale", "cap"), "fp32")
    inputs = {"hidden": f"*{dtype}", "weight": f"*{dtype}", "local": "*i64"} | numbers
    reduce = inputs | {"highest": FLOAT32, "sums": FLOAT32}
    differentiate = inputs | dict.fromkeys(("logsumexp", "entropy", "of_logprobs", "of_entropy"), FLOAT32)
    # What a block may have on every GPU since 2020, less what the system takes.
    limit = 99 * 1024
    assert shared_memory(fused_logprob._reduce_logits, reduce, settings, capability) <= limit
    for of_entropy in (True, False):
        used = shared_memory(
            fused_logprob._differentiate_logits,
            differentiate | {"grad": f"*{dtype}"},
            settings | {"OF_ENTROPY": of_entropy},
            capability,
        )
        assert used <= limit
    spilled = [int(size) for size in re.findall(r"(\d+) bytes spill loads", capsys.readouterr().out)]
    assert len(spilled) == 3
    assert max(spilled) <= (64 if capped else 32), "bytes of a thread; a row of the tile would be 256"


@GPUS
def test_fp8_blocks(capability: int) -> None:
    signature = {"values": "*bf16", "bits": "*u8", "scales": FLOAT32, "rows": INDEX, "columns": INDEX}
    shared_memory(fp8_kernels._quantise, signature, fp8_kernels.SETTINGS, capability)
