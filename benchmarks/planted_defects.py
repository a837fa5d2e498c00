"""Plants defects in short real runs, and asks whether the run and the doctor notice; prints JSON.

    python benchmarks/planted_defects.py [--only NAME ...] [--folder DIR]

By run: `errors`, token_mult_prob_error by step; `begins`, the first step where it exceeds 1.01; `noticed`, the first
step that the run itself marked or refused, with its words; `doctor`, exit code and findings of the doctor on the newest
step that it can examine; `verdict`: named, unnamed, healthy, wrong, or refused by the run before a token was wrong (for
a healthy run: clean or wrong). `within_two` counts, among the runs whose error exceeds 1.01, those that noticed it at
once or a step later, with defaults.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from header import header

ROOT = Path(__file__).parents[1]
STEPS = 5
SHOWN = ("cause", "name", "text", "key")
LARGE = 1.01
"""Probability error that a run has to notice."""
OPTIONS = (
    f"grpo.max_num_steps={STEPS}",
    "grpo.num_prompts_per_step=8",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "checkpointing.save_period=1",
    "checkpointing.keep_top_k=null",
    "logger.tensorboard=false",
    "logger.progress=false",
)
ALONE = ("policy.parallel.pipeline=1", "generation.parallel.pipeline=1")
TENSOR = ("policy.parallel.pipeline=1", "policy.parallel.tensor=2", "generation.parallel.pipeline=1")
DATA = ("policy.parallel.pipeline=1", "policy.parallel.data=2", "generation.parallel.pipeline=1")
UNCHECKED = "refit.canary=false"
ADAPTERS = ("policy.lora.rank=4", "policy.optimizer.lr=3e-3")


@dataclass(frozen=True)
class Trial:
    """A run with a defect, and the answer that names it."""

    name: str
    defect: str | None
    """Name in `planted/faults.py`; None: nothing is wrong in the run itself."""
    causes: tuple[str, ...] = ()
    """Causes that are true, beside unexplained; none: the run is healthy."""
    words: tuple[str, ...] = ()
    """Patterns that have to stand in text or key of the findings, or in a refusal."""
    overrides: tuple[str, ...] = ALONE
    recipe: str = "quickstart"
    damage: Callable[[Path], None] | None = None
    """What is done to the run's folder afterwards."""
    in_doctor: bool = False
    """Whether the doctor's own process has the defect too, as one of the installed code; else only the run had it."""


def edit_token(run_dir: Path) -> None:
    """Another token in the third rollout of the newest step."""
    _edit(run_dir, "token_ids", lambda column: column[2].__setitem__(-2, 5 if column[2][-2] != 5 else 6))


def exchange_logprobs(run_dir: Path) -> None:
    """The log-probabilities of two rollouts of the newest step in each other's place, as far as both are long."""

    def exchange(column: list[list[float]]) -> None:
        first_logprob, second_logprob = column[2], column[11]
        size = min(len(first_logprob), len(second_logprob))
        first_logprob[:size], second_logprob[:size] = second_logprob[:size], first_logprob[:size]

    _edit(run_dir, "logprobs", exchange)


def _edit(run_dir: Path, name: str, change: Callable[[list[Any]], object]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = _newest(run_dir)
    table = pq.read_table(file)
    column = table.column(name).to_pylist()
    change(column)
    number = table.schema.get_field_index(name)
    field = table.schema.field(number)
    pq.write_table(table.set_column(number, field, pa.array(column, type=field.type)), file)


def cut_file(run_dir: Path) -> None:
    """The newest file of rollouts ends in its middle."""
    file = _newest(run_dir)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _newest(run_dir: Path) -> Path:
    """The file of rollouts of the newest step that has a checkpoint before it."""
    return run_dir / "rollouts" / f"step_{STEPS}.parquet"


WEIGHTS, STALE = ("weights",), ("weights", "staleness")
LAYOUT, RECORD = ("layout", "packing", "layer", "staleness"), ("tokens", "record")
TRIALS = (
    Trial("healthy", None, overrides=()),
    Trial("healthy, experts", None, recipe="quickstart_moe", overrides=()),
    Trial("healthy, asynchronous", None, recipe="quickstart_async"),
    Trial("healthy, adapters on two replicas", None, overrides=(*DATA, *ADAPTERS)),
    Trial("healthy, bfloat16", None, overrides=(*ALONE, "policy.precision=bfloat16")),
    Trial("matrix of the engine 5% off", "matrix_off", WEIGHTS, (r"layers\.1\.mlp\.(down|up)_proj",)),
    Trial("stale tied head", "stale_embedding", STALE, ("embed_tokens|lm_head|head", r"version [12]")),
    Trial("stale stage", "stale_stage", STALE, (r"stage|layers?[ .]2", r"version [12]"), overrides=()),
    Trial("keys and values exchanged", "keys_and_values", WEIGHTS, ("k_proj|keys", "v_proj|values", r"layers?[ .]1")),
    Trial("query heads permuted", "heads_permuted", WEIGHTS, (r"heads|q_proj", r"layers?[ .]0")),
    Trial(
        "two rows exchanged", "rows_exchanged", WEIGHTS, ("rows", r"layers\.1\.mlp\.down_proj", "17 in the place of 3")
    ),
    Trial("experts exchanged", "experts_exchanged", WEIGHTS, ("expert", r"layers?[ .]1"), (), "quickstart_moe"),
    Trial("adapters missing in the engine", "adapters_missing", STALE, ("adapter|version 0",), (*DATA, *ADAPTERS)),
    Trial("asynchronous engine behind", "stale_engine", STALE, ("version 1",), recipe="quickstart_async"),
    Trial("top_p in the engine alone", "top_p", ("sampling",), ("top_p",)),
    Trial("one seed for all samples", "one_seed", ("sampling",), ("copies|seed",)),
    Trial("repetition penalty in the engine alone", "repetition_penalty", ("sampling",), ("repetition_penalty",)),
    Trial(
        "another epsilon in engine_args",
        None,
        ("layer", "weights", "model"),
        ("eps",),
        (*ALONE, "generation.engine_args.hf_overrides={rms_norm_eps: 0.01}"),
    ),
    Trial(
        "another epsilon, no canary",
        None,
        ("layer", "weights", "model"),
        ("rms_norm_eps",),
        (*ALONE, UNCHECKED, "generation.engine_args.hf_overrides={rms_norm_eps: 0.01}"),
    ),
    Trial("packed sequences leak", "leak", LAYOUT, ("pack|layout",), DATA),
    Trial("packed sequences leak, no canary", "leak", LAYOUT, ("pack",), (*DATA, UNCHECKED)),
    Trial(
        "packed sequences leak in the doctor too",
        "leak",
        LAYOUT,
        ("pack|self_attn",),
        (*DATA, UNCHECKED),
        in_doctor=True,
    ),
    Trial("one replica off, no canary", "replica_off", LAYOUT, ("data|replica|layout|rollouts",), (*DATA, UNCHECKED)),
    Trial("second stage off, no canary", "stage_off", LAYOUT, (r"pipeline|layout|layers?[ .]2",), (UNCHECKED,)),
    Trial("shards of the vocabulary exchanged", "vocabulary_shards", LAYOUT, ("tensor|layout",), TENSOR),
    Trial("second stage off", "stage_off", LAYOUT, (r"pipeline|layout|layers?[ .]2",), ()),
    Trial("one replica off", "replica_off", LAYOUT, ("data|replica|layout|rollouts",), DATA),
    Trial(
        "temperature not applied in training",
        "no_temperature",
        ("sampling", *LAYOUT),
        ("temperature|layout",),
        (*ALONE, "generation.temperature=0.7"),
    ),
    Trial("a token of the record edited", None, RECORD, ("prompt [0-9]+, sample 2",), damage=edit_token),
    Trial("log-probabilities exchanged", None, RECORD, ("sample 2", "sample 3"), damage=exchange_logprobs),
    Trial("rollouts cut off", None, RECORD, (rf"step_{STEPS}\.parquet",), damage=cut_file),
)


def try_run(trial: Trial, folder: Path) -> dict[str, Any]:
    """Make the run, damage its record, and ask the doctor."""
    run_dir, began = folder / re.sub(r"\W+", "_", trial.name), time.monotonic()
    log = run_dir.with_suffix(".log")
    if not log.exists():  # else it was made before
        command = ["megatron_grpo.train", f"+exp={trial.recipe}", f"run_dir={run_dir}", *OPTIONS, *trial.overrides]
        code, text = _python(command, trial.defect)
        log.write_text(f"{text}\nexit code {code}\n")
        if trial.damage is not None:
            trial.damage(run_dir)
    started_at = time.monotonic()
    errors, marked = _steps(run_dir)
    is_refused = _is_refused(trial, errors, log.read_text())
    is_settled = is_refused or not trial.causes  # tokens of older weights differ in healthy asynchronous runs
    begins = None if is_settled else next((step for step, error in errors.items() if error > LARGE), None)
    code, text = _python(["megatron_grpo.doctor", str(run_dir), "--json"], trial.defect if trial.in_doctor else None)
    answer = json.loads(text.splitlines()[-1]) if code in (0, 1) and text.strip().endswith("}") else {}
    return {
        "errors": errors,
        "begins": begins,
        "noticed": _find_notice(log.read_text(), marked, errors),
        "doctor": {
            "exit": code,
            "findings": [
                {key: finding[key] for key in ("cause", "name", "text", "key")}
                for finding in answer.get("findings", [])
            ],
            "refusal": None if answer else text.strip()[-400:],
        },
        "verdict": "refused" if is_refused else judge(trial, code, answer, text),
        "seconds": {"run": round(started_at - began, 1), "doctor": round(time.monotonic() - started_at, 1)},
    }


def _is_refused(trial: Trial, errors: dict[int, float], log: str) -> bool:
    """Whether a check of weights ended the run before a token was sampled wrongly."""
    is_right = not errors or errors[max(errors)] <= LARGE
    return bool(trial.causes) and trial.damage is None and _exit_code(log) != 0 and is_right and "serve" in log


def _exit_code(log: str) -> int:
    return int(log.strip().rsplit(" ", 1)[-1])


def _python(command: Sequence[str], defect: str | None) -> tuple[int, str]:
    """Exit code and output of a module's command line, with a defect planted."""
    paths = [str(Path(__file__).parent / "planted"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    changes = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PLANTED_DEFECT": defect or "",
        "OMP_NUM_THREADS": "1",
    }
    environment = {**os.environ, **changes}
    process = subprocess.run(
        [sys.executable, "-m", *command], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    return (
        process.returncode,
        process.stdout if process.stdout and "--json" in command else process.stdout + process.stderr,
    )


def _steps(run_dir: Path) -> tuple[dict[int, float], list[int]]:
    """The probability error by step, and the steps that the run marked."""
    file = run_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    errors = {row["step"]: row["token_mult_prob_error"] for row in rows if "token_mult_prob_error" in row}
    return errors, [row["step"] for row in rows if row.get("token_mult_prob_error_off")]


def _find_notice(log: str, marked: Sequence[int], errors: dict[int, float]) -> dict[str, Any] | None:
    """The step in which the run said that something is off, and its words; None: it did not."""
    code = _exit_code(log)
    words = [line for line in log.splitlines() if "disagree" in line or "must not serve" in line or " differs " in line]
    step = min(marked, default=None)
    if step is None and code:
        step = max(errors, default=0)  # a refit after this step failed
    if step is None and not words:
        return None
    return {"step": step, "exit": code, "words": words[0][-300:] if words else log.strip().splitlines()[-2][-300:]}


def judge(trial: Trial, code: int, answer: dict[str, Any], text: str) -> str:
    """The doctor's answer against the truth."""
    causes = {finding["cause"] for finding in answer.get("findings", [])} - {"unexplained"}
    if not trial.causes:
        return "clean" if code == 0 else "wrong"
    if code == 0:
        return "healthy"
    if causes - set(trial.causes):
        return "wrong"
    explanation = " ".join(f"{finding['text']} {finding['key']}" for finding in answer.get("findings", [])) or text
    return "named" if all(re.search(word, explanation, re.IGNORECASE) for word in trial.words) else "unnamed"


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Verdicts by number, and the runs that noticed a large error in time."""
    verdicts = [result["verdict"] for result in results.values()]
    large = {name: result for name, result in results.items() if result["begins"] is not None}
    timely = [
        name
        for name, result in large.items()
        if result["noticed"] is not None and (result["noticed"]["step"] or 0) <= result["begins"] + 1
    ]
    return {
        "verdicts": {verdict: verdicts.count(verdict) for verdict in sorted(set(verdicts))},
        "large": len(large),
        "within_two": len(timely),
        "late": sorted(large.keys() - set(timely)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="patterns of names")
    parser.add_argument("--folder", type=Path, help="keep the runs here, and do not make again those that are there")
    options = parser.parse_args()
    chosen = [
        chosen_trial
        for chosen_trial in TRIALS
        if not options.only or any(re.search(name, chosen_trial.name) for name in options.only)
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        results = {}
        for trial in chosen:
            results[trial.name] = try_run(trial, folder)
            print(f"{trial.name}: {json.dumps(results[trial.name])}", file=sys.stderr, flush=True)
        text = json.dumps({**header("planted_defects"), **summary(results), "runs": results}, indent=2)
        print(text.replace(str(folder), "FOLDER"))


if __name__ == "__main__":
    main()
