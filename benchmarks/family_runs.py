"""Trains a tiny model of each family for three steps, with vLLM on this CPU; writes JSON for docs/layouts.md.

    python benchmarks/family_runs.py RESULT.json [FAMILY ...]

Runs are `megatron_grpo.train` with the checks of refits as they are by default, one after the other, each in processes
of its own. Names are those of `tests/support/engine_configs.py`; without any, all models of text, and results of others
stay as they are in the file. By run: `verdict` is passed, refused (before a process of the run started) or failed, with
the `reason`; `steps`; `comparisons` of all weights after steps and `canaries`, which engines passed; the largest
`canary` and `token_mult_prob_error`; `minutes`. The weights before the first step are checked, too, or no step begins.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from header import header

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
STEPS = 3
TIMEOUT_S = 900.0
SHORT = (
    f"grpo.max_num_steps={STEPS}",
    "grpo.num_prompts_per_step=4",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "policy.parallel.pipeline=1",
    "policy.optimizer.warmup_steps=0",
    "generation.parallel.pipeline=1",
    "checkpointing.enabled=false",
    "logger.tensorboard=false",
    "logger.progress=false",
    "prepare.name=null",
    # A model that knows nothing has rewards, too, and so gradients.
    "env.addition.type=reward_functions",
    "env.addition.reward_funcs=[small_model.even_words]",
)


def main(arguments: list[str]) -> int:
    from tests.support.engine_configs import ENGINE_CONFIGS

    file, *names = arguments
    texts = [name for name in ENGINE_CONFIGS if not name.endswith("_vision")]
    result = json.loads(Path(file).read_text()) if Path(file).exists() else {}
    runs: dict[str, Any] = result.get("runs", {})
    for name in names or texts:
        with tempfile.TemporaryDirectory() as folder:
            runs[name] = run_family(ENGINE_CONFIGS[name], Path(folder))
        print(f"{name}: {runs[name]}", flush=True)
        ordered = {text: runs[text] for text in texts if text in runs}
        Path(file).write_text(json.dumps({**header("family_runs"), "runs": ordered}, indent=1) + "\n")
    return 0 if all(run["verdict"] != "failed" for run in runs.values()) else 1


def run_family(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make a model of a config.json's sizes, and train it; what came of it."""
    make_inputs(config, folder)
    began = time.monotonic()
    paths = (f"policy.model.path={folder / 'model'}", f"data.train_path={folder / 'train.jsonl'}", "data.val_path=null")
    engine = ["generation.engine.dtype=bfloat16"] if "linear_conv_kernel_dim" in config else []
    command = [sys.executable, "-m", "megatron_grpo.train", "+exp=quickstart", f"run_dir={folder / 'run'}"]
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
        process = subprocess.run(
            [*command, *SHORT, *paths, *engine],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"verdict": "failed", "reason": f"still running after {TIMEOUT_S:g} s"}
    metrics = folder / "run" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    result = judge(process.returncode, process.stdout.replace(f"{folder}/", ""), rows)
    return {**result, "minutes": round((time.monotonic() - began) / 60, 2)}


def make_inputs(config: dict[str, Any], folder: Path) -> None:
    """Write model/, with a tokenizer of digits, and train.jsonl."""
    from megatron_grpo.models.source import EOS, PAD, VOCABULARY
    from megatron_grpo.prepare.lessons import make_prompt_rows
    from megatron_grpo.prepare.models import make_tokenizer
    from megatron_grpo.verification.problem import make_model

    tokens = {"vocab_size": len(VOCABULARY), "pad_token_id": VOCABULARY[PAD], "eos_token_id": VOCABULARY[EOS]}
    model = make_model({**config, **tokens, "bos_token_id": None, "torch_dtype": "float32"}, folder / "model", seed=0)
    make_tokenizer(VOCABULARY, config["max_position_embeddings"]).save_pretrained(model)
    rows = make_prompt_rows("addition")["train.jsonl"][:64]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def judge(code: int, output: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Say what a run showed, by its exit code, output and rows of metrics."""
    if code == 2 and not rows:
        lines = [line.strip() for line in output.splitlines() if line.startswith("  policy.model.path")]
        return {"verdict": "refused", "reason": " ".join(" ".join(lines).split()) or output[-500:]}
    checks = [row["throughput"] for row in rows]
    errors = [check["canary_logprob_error"] for check in checks if "canary_logprob_error" in check]
    figures = {
        "steps": len(rows),
        "comparisons": sum("weight_check_s" in check for check in checks),
        "canaries": len(errors),
        "canary": max(errors, default=0.0),
        "token_mult_prob_error": max((row["token_mult_prob_error"] for row in rows), default=0.0),
    }
    has_learned = all(row["grad_norm"] > 0 for row in rows)
    if code or len(rows) < STEPS or not has_learned or not figures["comparisons"] or not figures["canaries"]:
        return {"verdict": "failed", "reason": output[-1500:], **figures}
    return {"verdict": "passed", **figures}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
