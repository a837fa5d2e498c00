"""Says why generation and training differ: python -m megatron_grpo.doctor RUN_DIR [step=N] [key=value ...]"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_grpo.cluster.wait_notices import announce_waits
from megatron_grpo.config.command_line import FAILED, as_command, parse_arguments, silence_packages
from megatron_grpo.config.section import Positive, Seconds
from megatron_grpo.config.started_values import TRUST
from megatron_grpo.models.source import fetch_model_folder
from megatron_grpo.preflight.image_checks import refuse_images
from megatron_grpo.run.directory import CONFIG_FILE, load_run_config
from megatron_grpo.verification.doctor.end_reason import read_end_reason

if TYPE_CHECKING:
    from megatron_grpo.verification.doctor.diagnosis import Diagnosis

USAGE = """\
python -m megatron_grpo.doctor RUN_DIR [step=N] [tokens=N] [engine=true] [key=value ...] [--json]

Compares the log-probabilities that a run recorded while sampling with those of its trainer and of transformers, and
names the reason of a difference: tokens, record, weights, precision, layer, layout, sampling, staleness or routing.
What the run itself measured comes first: a step with a large recorded error is never called healthy. Exit code 1
when something is found, 3 when nothing is and rollouts of other versions were not scored.

  RUN_DIR    folder of a run with rollouts and checkpoints
  step       a recorded step whose weights still exist (step N + 1 needs checkpoint step_N); by default the one with an
             outlying recorded error, else the newest
  tokens     largest number of sampled tokens that are scored (2048)
  engine     true: if nothing else explains its error, start an engine with the same weights and compare its layers
             (false)
  timeout_s  seconds after which no further causes are tried for generation or training; deadline of a replay (900)
  trust_run  true: the run's config.yaml may start the code that it names (false)
  key=value  keys of the run's configuration that differ now, such as policy.model.path
  --json     one JSON object instead of a table
"""
PARTLY_SEEN = 3
"""Exit code if nothing was found, and rollouts of other versions were not scored."""
_OPTIONS: dict[str, Any] = {
    "step": Positive,
    "tokens": Positive,
    "engine": bool,
    "timeout_s": Seconds,
    TRUST: bool,
    "--json": bool,
}
# Keys of a run that start something here: ranks of a replay, rendered prompts, an engine.
_SECTIONS = ("policy.", "data.", "generation.engine_args.")


@as_command("doctor", USAGE)
def main(arguments: Sequence[str]) -> int:
    """Examine a step of a run; return the exit code."""
    parsed = parse_arguments(arguments, _OPTIONS, most_words=1, is_override=lambda name: "." in name)
    if not parsed.words:
        raise ValueError("give the folder of one run; --help shows the arguments")
    run_dir, as_json = Path(os.path.expanduser(parsed.words[0])), parsed.options.pop("json", False)
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not the folder of a run")
    # A run that ended at its start has recorded the reason, which says more than the missing file.
    if not (run_dir / CONFIG_FILE).exists() and (reason := read_end_reason(run_dir)) is not None:
        raise ValueError(f"{run_dir} has no configuration, because the run ended before its first step: {reason}")
    is_trusted = parsed.options.pop(TRUST, False)
    config = load_run_config(run_dir, parsed.overrides, is_trusted=is_trusted, sections=_SECTIONS)
    if config.method.rows is not None:
        text = "learns from rows, and the doctor compares engines that sample with training"
        raise ValueError(f"{run_dir}: algorithm={config.algorithm} {text}")
    refuse_images(config, "the doctor")
    model = fetch_model_folder(config.policy.model.path)
    if not (model / "config.json").is_file():
        raise ValueError(f"policy.model.path={model} has no model; add policy.model.path=FOLDER if it has moved")
    with silence_packages(), announce_waits(), tempfile.TemporaryDirectory() as scratch:
        # After the checks, because torch takes seconds to import.
        from megatron_grpo.verification.doctor.examination import examine_run

        diagnosis = examine_run(run_dir, config, model, Path(scratch), **parsed.options)
    if as_json:
        sides = {
            name: {"distance": asdict(distance), "rounding": asdict(rounding)}
            for name, (distance, rounding) in diagnosis.sides.items()
        }
        findings = [asdict(finding) | {"explained": finding.explained} for finding in diagnosis.findings]
        print(json.dumps({"run": str(run_dir), **asdict(diagnosis), "sides": sides, "findings": findings}))
    else:
        print("\n".join(_format_diagnosis(run_dir, diagnosis)))
    if diagnosis.findings:
        return FAILED
    return PARTLY_SEEN if diagnosis.unseen_rollouts else 0


def _format_diagnosis(run_dir: Path, diagnosis: Diagnosis) -> list[str]:
    recorded = "no token_mult_prob_error of this step"
    if diagnosis.recorded_error is not None:
        worst = "" if diagnosis.recorded_worst is None else f", largest {diagnosis.recorded_worst:.6g}"
        recorded = f"token_mult_prob_error {diagnosis.recorded_error:.6g}{worst}"
    lines = [
        f"step {diagnosis.step} of {run_dir}: {diagnosis.tokens} tokens of {diagnosis.rollouts} rollouts, "
        f"sampled by version {diagnosis.version}",
        "",
        f"{'recorded by the run':<36}{recorded}",
        f"{'computed here of the scored tokens':<36}mean of exp(abs(difference)) {diagnosis.error:.6g}",
        "",
        f"{'differences of log-probabilities':<34}{'mean':>10}{'largest':>10}   {'rounding explains'}",
        f"{'generation and training':<34}{diagnosis.gap.mean:>10.1e}{diagnosis.gap.worst:>10.1e}",
    ]
    for name, (distance, rounding) in diagnosis.sides.items():
        limits = f"{rounding.mean:.1e}, {rounding.worst:.1e}"
        lines.append(f"{f'{name} and transformers':<34}{distance.mean:>10.1e}{distance.worst:>10.1e}   {limits}")
    lines += ["", *(f"remark: {remark}" for remark in diagnosis.remarks)]
    for finding in diagnosis.findings:
        lines.append(f"{finding.cause}: {finding.text}")
        if finding.before is not None and finding.after is not None:
            before, after = finding.before.mean, finding.after.mean
            means = f"mean {before:.1e} -> {after:.1e} nats"
            lines.append(f"    removes {finding.explained:.1%} of the difference ({means})")
        label = "almost as likely" if finding.after is not None else "explains a part"
        lines += [f"    {label}: {cause}" for cause in finding.others]
        lines.append(f"    change: {finding.key}")
    if diagnosis.unseen_rollouts and not diagnosis.findings:
        return [
            *lines,
            f"nothing found in these rollouts; {diagnosis.unseen_rollouts} of other versions were not scored",
        ]
    return lines if diagnosis.findings else [*lines, "nothing found: both sides compute what transformers computes"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
