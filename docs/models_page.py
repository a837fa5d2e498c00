"""Writes the table of model families in docs/layouts.md from results of tests and dry runs, for `make docs`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from megatron_grpo.models.families import FAMILIES
from megatron_grpo.models.families.reading import UnknownFamilyError, parse_model_shape

ROOT = Path(__file__).parents[1]
PAGE, MARK = ROOT / "docs" / "layouts.md", "<!-- models -->"
RESULTS = ROOT / "benchmarks" / "results"
PROOFS, DRY_RUNS, ON_GPU = "*_model_proofs.json", "*_dry_recipes*.json", "*_gpu_check_h100_families.json"
WHOLE_RUNS = "*_family_runs.json"

RELEASED = {
    "qwen3": "Qwen3, dense",
    "qwen2": "Qwen2, Qwen2.5, DeepSeek-R1-Distill-Qwen",
    "llama": "Llama 2 to 3.3, DeepSeek-R1-Distill-Llama",
    "gemma3": "Gemma 3, text",
    "qwen3_moe": "Qwen3-30B-A3B, Qwen3-235B-A22B",
    "mixtral": "Mixtral",
    "deepseek_v3": "DeepSeek-V3, R1, Kimi-K2, Moonlight",
    "deepseek_v32": "DeepSeek-V3.2",
    "glm_moe_dsa": "GLM-5",
    "glm4": "GLM-4-0414",
    "glm4_moe": "GLM-4.5 to 4.7, GLM-4.5-Air",
    "phi3": "Phi-3, Phi-4",
    "olmo3": "OLMo 3",
    "minimax_m2": "MiniMax-M2",
    "gpt_oss": "gpt-oss-20b, gpt-oss-120b",
    "qwen3_5": "Qwen3.5 and 3.6, dense, text part",
    "qwen3_5_moe": "Qwen3.5 and 3.6, mixtures, text part",
    "qwen3_next": "Qwen3-Next",
    "llama4": "Llama 4, text",
    "gemma4": "Gemma 4 31B and 26B-A4B, text",
    "nemotron_h": "Nemotron-H, Nemotron 3",
    "mistral": "Mistral without windows",
    "ministral3": "Ministral 3, text",
    "seed_oss": "Seed-OSS",
}
"""Released models by family."""

_INTRODUCTION = """\
Made by `make docs` from what tests and dry runs showed (`benchmarks/model_proofs.py`,
`benchmarks/family_runs.py`, `benchmarks/dry_recipes.py`, `make gpu-check`); edit
`docs/models_page.py`, not this table.

- *CPU*: a tiny random model of the family in float32, by Megatron-Core, in so many combinations of
  layout and packing; the largest differences of log-probabilities (absolute) and of gradients
  (relative norm of a tensor) from transformers. Exported weights equal the imported ones bit by
  bit.
- *refit traced*: vLLM's own loaders, run on tensors whose elements are their numbers, put them
  where the trace says; cases.
- *engine*: vLLM on a CPU serves log-probabilities of transformers before and after refits; cases.
  "-": not run for this table. Delta nets run there in bfloat16 only. MiniMax-M2 and experts without
  gates (Nemotron 3) have no kernel there.
- *whole run*: three steps of `megatron_grpo.train` with vLLM on a CPU and all checks of refits as
  they are by default (all weights after the first step, a canary at every refit), in minutes, and
  the canary's largest difference. "refused": before the start, since vLLM has no kernel there.
- *cuda-check*: a refit fills vLLM's class for CUDA, in bfloat16 and FP8, on a device that computes
  nothing; cases. [gpu.md](gpu.md) lists what else `make cuda-check` holds for every family.
- *H100*: the same tiny model on one GPU, in float32, by torch's layers; [gpu.md](gpu.md) has more.
- *recipe (dry run)*: recipes for GPUs, and the memory of the fullest rank in a dry run at true
  size, in GB of 80.

DeepSeek-V3.2's and GLM-5's sparse attention has no engine on a CPU
([how it is trained](#sparse-attention)). Not here: Gemma 4 E2B and E4B, and models that read
images: in folders of Qwen3.5, Gemma 3 and 4, Llama 4, Mistral Small 3.1 and Ministral 3 the text
part alone is trained, in those of Qwen2.5-VL and Qwen3-VL also [with images](#images). Any model is
checked by one command, which names the nearest family of a model that has none:

    python -m megatron_grpo.verify model=FOLDER shrink=true

| Family | Models | CPU | refit traced | engine | whole run | cuda-check | H100 | recipe (dry run) |
|---|---|---|---|---|---|---|---|---|"""


def read_newest(pattern: str) -> dict[str, Any]:
    """Read the newest result whose name matches; empty: there is none."""
    files = sorted(RESULTS.glob(pattern))
    return json.loads(files[-1].read_text()) if files else {}


def list_recipes() -> dict[str, list[str]]:
    """List the recipes for GPUs by family, with the memory of their dry runs."""
    memory: dict[str, float] = {}
    for file in sorted(RESULTS.glob(DRY_RUNS)):
        rows = json.loads(file.read_text())["results"] if "fp8" not in file.name else []
        newest = {row["recipe"]: 0.0 for row in rows}
        for row in rows:
            newest[row["recipe"]] = max(newest[row["recipe"]], row.get("peak_gib", 0.0) * 2**30 / 1e9)
        memory |= newest
    recipes: dict[str, list[str]] = {}
    for file in sorted((ROOT / "conf" / "exp").glob("*.yaml")):
        path = re.search(r"^    path: (\S+/\S+)$", file.read_text(), flags=re.MULTILINE)
        family = find_family(path[1]) if path is not None else None
        if family is not None:
            amount = f" ({memory[file.stem]:.0f})" if file.stem in memory else ""
            recipes.setdefault(family, []).append(f"`{file.stem}`{amount}")
    return recipes


def find_family(hub_name: str) -> str | None:
    """Find the family of a released model by its stored config.json; None: it is not stored."""
    letters = re.sub("[^a-z0-9]", "", hub_name.rpartition("/")[2].lower())
    folders = (ROOT / "tests" / "data" / "hf_configs").iterdir()
    names = [folder for folder in folders if letters.startswith(re.sub("[^a-z0-9]", "", folder.name))]
    if not names:
        return None
    raw = json.loads((max(names, key=lambda folder: len(folder.name)) / "config.json").read_text())
    try:
        return parse_model_shape(raw).family
    except UnknownFamilyError:
        return None


def format_table() -> str:
    """Format the table and what its columns mean."""
    columns, recipes = read_newest(PROOFS).get("columns", {}), list_recipes()
    runs = read_newest(WHOLE_RUNS).get("runs", {})
    on_gpu = read_newest(ON_GPU).get("checks", {}).get("families", {}).get("tests", {})
    lines = [_INTRODUCTION]
    for family in FAMILIES:
        cpu = columns.get("verify", {}).get(family, {})
        verified = f"{cpu['passed']}: {cpu['logprob']:.0e}, {cpu['gradient']:.0e}" if "logprob" in cpu else "-"
        gpu = next((entry["verdict"] for test, entry in on_gpu.items() if test.endswith(f"[{family}]")), "-")
        cases = [format_cases(columns.get(column, {}).get(family)) for column in ("trace", "engine", "cuda")]
        cases.insert(2, format_run(runs.get(family)))
        cells = [f"`{family}`", RELEASED[family], verified, *cases, gpu, ", ".join(recipes.get(family, ["-"]))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def format_page() -> str:
    """Format the page with the table of now between its marks."""
    before, _, after = PAGE.read_text().split(MARK)
    return f"{before}{MARK}\n{format_table()}\n{MARK}{after}"


def format_cases(entry: dict[str, int] | None) -> str:
    """Format how many cases passed, and how many of them failed."""
    if entry is None:
        return "-"
    return f"{entry['passed']}" + (f", {entry['failed']} failed" if entry["failed"] else "")


def format_run(run: dict[str, Any] | None) -> str:
    """Format how long a whole run took, and how far the canary was off; or that it was refused or failed."""
    if run is None:
        return "-"
    return f"{run['minutes']:.1f}: {run['canary']:.0e}" if run["verdict"] == "passed" else run["verdict"]


if __name__ == "__main__":
    PAGE.write_text(format_page())
