"""Runs in which defects are planted: their models, versions and checkpoints."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.recorded_runs import RecordedRun, edit_config, edited_copy, make_run


def _run(family: str, *overrides: str, versions: int = 2, **config: Any) -> Callable[[Path], RecordedRun]:
    def make(root: Path) -> RecordedRun:
        run = make_run(root, family, *overrides, **config)
        for _ in range(versions - 1):
            run.add_version()
        return run

    return make


def _make_tied(root: Path) -> RecordedRun:
    """A model whose head is its embedding."""
    (root / "plain").mkdir()
    plain = make_run(root / "plain", "qwen3").versions[0]
    edit_config(plain, tie_word_embeddings=True)
    tied = edited_copy(plain, root / "tied", lambda now: {name: now[name] for name in now if name != "lm_head.weight"})
    shutil.rmtree(root / "plain")
    run = make_run(root, tied)
    run.add_version()
    return run


RUNS: dict[str, Callable[[Path], RecordedRun]] = {
    "dense": _run("qwen3", versions=3),
    "tied": _make_tied,
    "biases": _run("qwen2"),
    "llama": _run("llama", "policy.packing=true"),
    "experts": _run("qwen3_moe"),
    "shared experts": _run("deepseek_v3"),
    "gemma": _run("gemma3"),
    "adapters": _run("qwen3", "policy.lora.rank=4", versions=3),
    "bfloat16": _run("qwen3", "policy.precision=bfloat16"),
    "bfloat16 experts": _run("qwen3_moe", "policy.precision=bfloat16"),
    "bfloat16 adapters": _run("qwen3", "policy.precision=bfloat16", "policy.lora.rank=4"),
    "gpt_oss": _run("gpt_oss"),
    "glm4": _run("glm4"),
    "mixtral": _run("mixtral"),
    "colder": _run("llama", "generation.temperature=0.7"),
}
"""Runs by name: each makes models, versions and checkpoints in a folder."""
