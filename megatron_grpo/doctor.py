"""Says why generation and training differ: python -m megatron_grpo.doctor RUN_DIR [step=N] [key=value ...]"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.config.conversion import convert_argument
from megatron_grpo.config.help import FAILED, run_command
from megatron_grpo.config.section import Positive, Seconds
from megatron_grpo.models.source import fetch_model_folder
from megatron_grpo.observability.summary import read_end_reason
from megatron_grpo.run.directory import CONFIG_FILE
from megatron_grpo.run.recorded_config import load_run_config

if TYPE_CHECKING:
    from megatron_grpo.verification.doctor.examination import Diagnosis

USAGE = """\
python -m megatron_grpo.doctor RUN_DIR [step=N] [tokens=N] [engine=true] [key=value ...] [--json]

Compares the log-probabilities that a run recorded while sampling with those of its trainer and of transformers, and
names the reason of a difference: tokens, record, weights, precision, layer, layout, sampling, staleness or routing.
What the run itself measured comes first: a step with a large recorded error is never called healthy. Exit code 1
when something is found.

  RUN_DIR    folder of a run with rollouts and checkpoints
  step       a recorded step; by default the one whose recorded error stands out, else the newest; of those whose
             weights there are (checkpoint step_N for step N + 1)
  tokens     most sampled tokens that are scored (2048)
  engine     true: if nothing else explains the engine, start one with the same weights and compare its layers (false)
  timeout_s  seconds after which no further cause is tried on a side, and deadline of a replay (900)
  key=value  keys of the run's configuration that differ now, such as policy.model.path
  --json     one JSON object instead of a table
"""
_OWN: dict[str, Any] = {"step": Positive, "tokens": Positive, "engine": bool, "timeout_s": Seconds}


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    return run_command("doctor: ", arguments, USAGE, _run)


def _run(arguments: Sequence[str]) -> int:
    run_dir, own, overrides = _split(arguments)
    given = {name: convert_argument(name, own[name], kind) for name, kind in _OWN.items() if name in own}
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not the folder of a run")
    if not (run_dir / CONFIG_FILE).exists() and (reason := read_end_reason(run_dir)) is not None:
        raise ValueError(f"{run_dir} has no configuration, because the run ended before its first step: {reason}")
    config = load_run_config(run_dir, overrides)
    model = fetch_model_folder(config.policy.model.path)
    if not (model / "config.json").is_file():
        raise ValueError(f"policy.model.path={model} has no model; add policy.model.path=FOLDER if it has moved")
    logging.disable(logging.WARNING)  # packages log their fallbacks
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    try:
        with warnings.catch_warnings(action="ignore"), tempfile.TemporaryDirectory() as scratch:
            from megatron_grpo.verification.doctor.examination import diagnose  # here: torch takes seconds to import

            diagnosis = diagnose(run_dir, config, model, Path(scratch), **given)
    finally:
        logging.disable(logging.NOTSET)
    print(json.dumps(_as_json(run_dir, diagnosis)) if "--json" in arguments else "\n".join(_lines(run_dir, diagnosis)))
    return FAILED if diagnosis.findings else 0


def _split(arguments: Sequence[str]) -> tuple[Path, dict[str, str], list[str]]:
    """(folder of the run, the command's own arguments by name, overrides of the configuration)."""
    folders, own, overrides = [], {}, []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument == "--json":
            continue
        if name in _OWN and equals:
            own[name] = value
        elif equals and "." in name:
            overrides.append(argument)
        elif equals or argument.startswith("-"):
            raise ValueError(f"{argument} is not understood; --help shows what there is")
        else:
            folders.append(argument)
    if len(folders) != 1:
        raise ValueError(f"give the folder of one run, not {len(folders)}; --help shows what there is")
    return Path(os.path.expanduser(folders[0])), own, overrides


def _as_json(run_dir: Path, found: Diagnosis) -> dict[str, Any]:
    sides = {
        name: {"distance": asdict(distance), "rounding": asdict(rounding)}
        for name, (distance, rounding) in found.sides.items()
    }
    findings = [asdict(one) | {"explained": one.explained} for one in found.findings]
    return {"run": str(run_dir), **asdict(found), "sides": sides, "findings": findings}


def _lines(run_dir: Path, found: Diagnosis) -> list[str]:
    lines = [
        f"step {found.step} of {run_dir}: {found.tokens} tokens of {found.rollouts} rollouts, "
        f"sampled by version {found.version}",
        "",
        f"{'recorded by the run':<36}{_recorded(found)}",
        f"{'computed here of the scored tokens':<36}mean of exp(abs(difference)) {found.error:.6g}",
        "",
        f"{'differences of log-probabilities':<34}{'mean':>10}{'largest':>10}   {'rounding explains'}",
        f"{'generation and training':<34}{found.gap.mean:>10.1e}{found.gap.worst:>10.1e}",
    ]
    for name, (distance, rounding) in found.sides.items():
        limits = f"{rounding.mean:.1e}, {rounding.worst:.1e}"
        lines.append(f"{f'{name} and transformers':<34}{distance.mean:>10.1e}{distance.worst:>10.1e}   {limits}")
    lines += ["", *(f"remark: {one}" for one in found.remarks)]
    for one in found.findings:
        lines.append(f"{one.cause}: {one.text}")
        if one.before is not None and one.after is not None:
            lines.append(f"    explains {one.explained:.1%}: {one.before.mean:.1e} -> {one.after.mean:.1e} on average")
        lines += [f"    comes near, too: {other}" for other in one.others]
        lines.append(f"    change: {one.key}")
    return lines if found.findings else [*lines, "nothing found: both sides compute what transformers computes"]


def _recorded(found: Diagnosis) -> str:
    """The figures that the run recorded of the step, for people."""
    if found.recorded_error is None:
        return "no token_mult_prob_error of this step"
    worst = "" if found.recorded_worst is None else f", largest {found.recorded_worst:.6g}"
    return f"token_mult_prob_error {found.recorded_error:.6g}{worst}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
