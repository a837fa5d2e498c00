"""Plans that do not fit, each for another reason: whether they fit with the advice that they give, planned anew.

    python benchmarks/plan_advice.py [case ...] > result.json

Needs no GPU and no weights. Models are those of tests/data/hf_configs. A case is right if its advice fits, or if the
advice says that nothing does; the seconds are those of the plan with its advice.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dry_recipes import CONFIGS
from header import header

_LONG = [
    "policy.max_total_sequence_length=131072",
    "policy.microbatch_tokens=131072",
    "policy.logprob_microbatch_tokens=131072",
    "data.max_input_seq_length=1024",
    "generation.max_new_tokens=130048",
]
CASES: dict[str, tuple[str, str, list[str]]] = {
    "weights": ("qwen3_32b_8gpu_colocated", "qwen3_32b", ["policy.parallel.tensor=2", "policy.parallel.data=4"]),
    "optimizer": ("qwen3_8b_8gpu", "qwen3_8b", ["cluster.gpu=a100-40gb"]),
    "activations": (
        "qwen3_8b_8gpu",
        "qwen3_8b",
        ["policy.activation_checkpointing=false", "policy.microbatch_tokens=51200"],
    ),
    "logits": (
        "qwen3_8b_8gpu",
        "qwen3_8b",
        [
            "policy.logprob_kernel=chunked",
            "policy.logprob_chunk_size=200000",
            "policy.logprob_microbatch_tokens=163840",
        ],
    ),
    "kv_cache": ("qwen3_8b_8gpu", "qwen3_8b", ["generation.engine.gpu_memory_utilization=0.2"]),
    "sequence": ("llama3_8b_8gpu", "llama3_1_8b", [*_LONG, "cluster.nodes=2", "policy.activation_checkpointing=false"]),
    "reference": (
        "qwen3_8b_8gpu",
        "qwen3_8b",
        [
            "cluster.gpu=a100-40gb",
            "policy.parallel.tensor=4",
            "policy.parallel.pipeline=1",
            "policy.microbatch_tokens=30720",
        ],
    ),
    "experts": ("qwen3_30b_a3b_4nodes", "qwen3_30b_a3b", ["policy.parallel.expert=1"]),
    "value_model": ("qwen3_8b_8gpu", "qwen3_8b", ["algorithm=ppo", "cluster.nodes=2"]),
    "host": ("qwen3_32b_8gpu_colocated", "qwen3_32b", ["plan.host_memory_gib=600"]),
    "nothing_here": ("qwen3_8b_8gpu", "llama3_3_70b", ["cluster.gpu=l40s", "grpo.num_prompts_per_step=120"]),
}
"""By reason: recipe, model, and keys that are changed; the GPU is an H100 where none is named."""


def plan_of(arguments: list[str]) -> dict[str, Any]:
    """The plan that the command prints as JSON."""
    import contextlib
    import io

    from megatron_grpo import plan

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = plan.main([*arguments, "--json"])
    assert code in (0, 1), f"plan {' '.join(arguments)} failed"
    figures: dict[str, Any] = json.loads(text.getvalue())
    return figures


def measure(name: str, folder: Path) -> dict[str, Any]:
    """A case: its plan, and the plan with the keys of its advice."""
    recipe, model, keys = CASES[name]
    shutil.copytree(CONFIGS / model, folder / model, dirs_exist_ok=True)
    gpu = [] if any(key.startswith("cluster.gpu=") for key in keys) else ["cluster.gpu=h100"]
    arguments = [f"+exp={recipe}", f"policy.model.path={folder / model}", *gpu, *keys]
    began = time.monotonic()
    before = plan_of(arguments)
    row = {"case": name, "seconds": round(time.monotonic() - began, 1), "problem": before["problems"]}
    advice = before["advice"] or {"overrides": [], "text": "fits as it is"}
    changed = {key.partition("=")[0] for key in advice["overrides"]}
    overrides = [key for key in arguments if key.partition("=")[0] not in changed | _other_names(changed)]
    after = plan_of([*overrides, *advice["overrides"]]) if advice["overrides"] else None
    return {**row, "advice": advice, "fits_with_it": None if after is None else after["fits"]}


def _other_names(keys: set[str]) -> set[str]:
    """Short names of keys, which the command line takes too."""
    return {"cluster.nodes"} if "cluster.num_nodes" in keys else set()


def main() -> None:
    """Print the cases on the command line, or all."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(name, Path(folder)) for name in sys.argv[1:] or CASES]
    right = sum(row["fits_with_it"] is True or not row["advice"]["overrides"] for row in rows)
    print(json.dumps({**header("plan_advice"), "cases": len(rows), "right": right, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
