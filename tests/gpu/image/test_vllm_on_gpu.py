"""vLLM alone, without anything of ours: what its warm-up does with batches longer than its sequences."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.integration.vllm_helpers import ON_GPUS, make_model

SEQUENCES, LENGTH = 2, 32
BATCHES = (SEQUENCES * LENGTH, 8192)
"""Tokens of a batch: as many as its sequences may have, and vLLM's default for a server."""
PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams
arguments, on_gpus = json.loads(sys.argv[1]), {on_gpus}
if not on_gpus:
    arguments["kv_cache_memory_bytes"] = 2**26
engine = LLM(**arguments)
outputs = engine.generate([{{"prompt_token_ids": [2, 3, 4]}}], SamplingParams(max_tokens=4, temperature=0.0))
print("answered", len(outputs[0].outputs[0].token_ids))
"""


def run_engine(folder: Path, batch_tokens: int) -> subprocess.CompletedProcess[str]:
    """Answer a prompt in a process of its own, which an illegal address ends."""
    arguments = {
        "model": str(folder),
        "dtype": "float32",
        "max_model_len": LENGTH,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": batch_tokens,
        "gpu_memory_utilization": 0.3,
        "enforce_eager": True,
    }
    command = [sys.executable, "-c", PROGRAM.format(on_gpus=ON_GPUS), json.dumps(arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)


def test_a_batch_of_as_many_tokens_as_its_sequences_have(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """What a longer one does is recorded: by vLLM's source, an illegal address (docs/gpu.md)."""
    folder = make_model(tmp_path / "model", seed=0)
    results = [run_engine(folder, tokens) for tokens in BATCHES[: 2 if ON_GPUS else 1]]
    for tokens, result in zip(BATCHES, results, strict=False):
        illegal = "illegal memory access" in result.stdout + result.stderr
        record_property(f"{tokens} tokens", "illegal address" if illegal else f"exit code {result.returncode}")
    assert "answered" in results[0].stdout, results[0].stderr[-2000:]
