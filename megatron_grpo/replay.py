"""Repeats one recorded step of a run: python -m megatron_grpo.replay RUN_DIR step=N policy.parallel.tensor=2"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from megatron_grpo.batch.replay_files import find_library_versions
from megatron_grpo.cluster.wait_notices import announce_waits
from megatron_grpo.config.command_line import FAILED, as_command, parse_arguments, silence_packages
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.config.section import Positive, Seconds
from megatron_grpo.run.checkpoints import CHECKPOINTS_FOLDER, resolve_checkpoint

if TYPE_CHECKING:
    from megatron_grpo.verification.replay.compare import Comparison
    from megatron_grpo.verification.replay.record import RecordedStep

USAGE = """\
python -m megatron_grpo.replay RUN_DIR step=N [section.key=value ...] [--json]

Repeats step N of a run on this machine, from its checkpoint and its rollouts, and compares hidden states,
log-probabilities, loss, gradients and the update of the weights: with what the run recorded, and with a second replay,
in which keys are changed. Says in which layer, tensor and token they first differ. Exit code 0: they agree; 1: they
differ; 2: a mistake.

  RUN_DIR        folder of the run; logger.replay_every=N of the run keeps what a replay needs (docs/debugging.md)
  step           number of the step; best (ranked first) or latest: the step that ended with that checkpoint
  section.key    a change, of policy, reference or loss_fn: policy.parallel.tensor=2, policy.precision=float32
  baseline       run: replay the step unchanged too, and compare the changed replay with it; an unchanged step of which
                 the run recorded no figures is replayed twice; record: compare with the record alone, where the run's
                 own layout is too large for this machine (run)
  device         cpu, or gpu: a GPU for each rank; auto: GPUs where there are any (auto)
  hidden_tokens  tokens whose hidden states are compared, of the first sequences (4096)
  timeout_s      deadline of one replay (600)
  trust_run      true: the run's configuration may start the code that it names (false)
  --json         results as JSON
"""
# Sections whose keys a replay can change; what other sections decide is recorded.
_SECTIONS = ("policy.", "reference.", "loss_fn.")
# Names of the compared sides: the record; its replay; a second replay, if the run recorded no figures; and the replay
# with changes.
RECORDED, REPLAYED, AGAIN, CHANGED = "recorded", "replayed", "replayed again", "changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """The checked command line of a replay; USAGE explains the options."""

    run_dir: Path
    step: Positive
    overrides: list[str] = field(default_factory=list)
    baseline: Literal["run", "record"] = "run"
    device: Literal["auto", "cpu", "gpu"] = "auto"
    hidden_tokens: Positive = 4096
    timeout_s: Seconds = 600.0
    trust_run: bool = False
    json: bool = False


# Exit code 1 means "replayed, and different", so a step that cannot be replayed exits with 2, as a mistake does.
@as_command("replay", USAGE)
def main(arguments: Sequence[str]) -> int:
    """Replay a step, and print the comparisons; return the exit code."""
    request = read_request(arguments)
    with silence_packages(), announce_waits():
        record, comparisons = replay(request)
    agrees = all(comparison.agrees for comparison in comparisons)
    recorded_versions = {} if record.figures is None else record.figures.versions
    if request.json:
        versions = {"recorded": recorded_versions, "here": find_library_versions()}
        print(json.dumps({**_to_json(record, comparisons), "agrees": agrees, "versions": versions}))
    else:
        _print_comparisons(record, comparisons, recorded_versions)
    return 0 if agrees else FAILED


def replay(request: ReplayRequest) -> tuple[RecordedStep, list[Comparison]]:
    """Replay the step, unchanged and changed, and compare all sides.

    Raises:
        ValueError: the record or the changes cannot be used; says why.
        RunError: a rank failed, or there is no GPU for each rank.
    """
    import torch  # here, because it takes seconds

    from megatron_grpo.verification.replay.compare import choose_tolerances, compare, read_recorded
    from megatron_grpo.verification.replay.record import open_step
    from megatron_grpo.verification.replay.replayed_step import replay_step

    open_recorded = partial(open_step, request.run_dir, request.step, is_trusted=request.trust_run)
    changed = open_recorded(request.overrides) if request.overrides else None
    record = open_recorded()
    if changed is not None:
        _require_loadable(record, changed.config.policy)
    sides = {RECORDED: (read_recorded(record), record.config.policy)}
    replayed_steps = {}
    if request.baseline == "run" or changed is None:
        replayed_steps[REPLAYED] = record
    if request.baseline == "run" and changed is None and record.figures is None:
        # Without recorded figures and changes, only a second replay shows whether the step repeats.
        replayed_steps[AGAIN] = record
    if changed is not None:
        replayed_steps[CHANGED] = changed
    gpus = 0 if request.device == "cpu" else torch.cuda.device_count()
    if request.device == "gpu" and not gpus:
        raise ConfigError([Problem("device=gpu", "this machine has no GPU that torch sees")])
    for name, step in replayed_steps.items():
        figures = replay_step(step, hidden_tokens=request.hidden_tokens, timeout_s=request.timeout_s, gpus=gpus)
        sides[name] = (figures, step.config.policy)
    comparisons = []
    for second, first in itertools.combinations(sides, 2):
        limits = choose_tolerances(sides[first][1], sides[second][1])
        comparison = compare((first, second), record, (sides[first][0], sides[second][0]), limits)
        if comparison.differences:
            comparisons.append(comparison)
    if not comparisons:
        text = "recorded nothing that a replay could be compared with: leave baseline=record out"
        raise ConfigError([Problem(f"step={request.step}", text)])
    return record, comparisons


def _require_loadable(record: RecordedStep, policy: PolicyConfig) -> None:
    """Raise a ConfigError if these settings cannot load the checkpoint."""
    recorded = record.config.policy
    changes = {
        "policy.lora": (recorded.lora.description, policy.lora.description),
        "policy.optimizer.distributed": (recorded.optimizer.distributed, policy.optimizer.distributed),
    }
    problems = [
        Problem(
            key, f"was {old} in the run, and is {new}: the state in {record.checkpoint} can only be loaded as it was"
        )
        for key, (old, new) in changes.items()
        if old != new and record.checkpoint is not None
    ]
    if problems:
        raise ConfigError(problems)


def _to_json(record: RecordedStep, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    rows = []
    for comparison in comparisons:
        differences = [
            asdict(difference) | {"agrees": difference.agrees, "layer": difference.layer}
            for difference in comparison.differences
        ]
        row = {"agrees": comparison.agrees, "place": comparison.first_difference, "differences": differences}
        rows.append(asdict(comparison) | row)
    checkpoint = None if record.checkpoint is None else str(record.checkpoint)
    return {"run_dir": str(record.run_dir), "step": record.step, "checkpoint": checkpoint, "comparisons": rows}


def _print_comparisons(
    record: RecordedStep, comparisons: Sequence[Comparison], recorded_versions: dict[str, str]
) -> None:
    state, policy, installed = record.checkpoint or record.model, record.config.policy, find_library_versions()
    print(f"step {record.step} of {record.run_dir}: {len(record.trajectories)} sequences, from {state}")
    sizes = [f"{name} {size}" for name, size in asdict(policy.parallel).items() if size and size != 1]
    print(f"layout {', '.join([*(sizes or ['one rank']), policy.precision])}")
    for name, version in recorded_versions.items():
        present = installed.get(name, "not installed")
        if present != version:
            print(f"{name} was {version} when the step was recorded, and is {present} here")
    for comparison in comparisons:
        print(f"\n{comparison.first} against {comparison.second}")
        for difference in comparison.differences:
            verdict = "ok" if difference.agrees else "DIFFER"
            apart = f"{difference.difference:9.1e}  (at most {difference.tolerance:.0e})"
            token = "" if difference.token is None else f"token {difference.token} of sequence {difference.sequence}"
            position = ", ".join(part for part in (difference.tensor, token) if part)
            print(f"  {difference.quantity:17} {apart}  {verdict:6}  {position}")
        if comparison.first_difference is None:
            continue
        location: dict[str, Any] = comparison.first_difference
        layer = "" if location["layer"] is None else f"layer {location['layer']}, "
        text = f"{layer}{location['tensor'] or location['quantity']} ({location['quantity']})"
        if location["token"] is not None:
            point = f" at {location['point']}" if location["point"] else ""
            token = f"{location['token']} of sequence {location['sequence']}, id {location['token_id']}"
            text += f"; first token{point}: {token}"
        print(f"  first difference: {text}")


def read_request(arguments: Sequence[str]) -> ReplayRequest:
    """Read the request of a command line.

    Raises:
        ValueError: an argument is wrong or missing.
    """
    kinds = get_type_hints(ReplayRequest, include_extras=True)
    options = {name: kind for name, kind in kinds.items() if name not in ("run_dir", "overrides", "json")}
    options["step"] |= Literal["best", "newest", "latest"]
    parsed = parse_arguments(arguments, {**options, "--json": bool}, most_words=1, is_override=lambda name: "." in name)
    for override in parsed.overrides:
        if not override.startswith(_SECTIONS):
            text = "changes nothing in a replay: rollouts, rewards and advantages are the recorded ones"
            raise ConfigError([Problem(override, f"{text}; change keys of policy, reference or loss_fn")])
    if not parsed.words:
        raise ValueError("RUN_DIR is missing; --help shows the arguments")
    step, run_dir = parsed.require("step", "N"), Path(os.path.expanduser(parsed.words[0]))
    if isinstance(step, str):
        checkpoint = resolve_checkpoint(run_dir / CHECKPOINTS_FOLDER / step, "step")
        parsed.options["step"] = int(checkpoint.name.removeprefix("step_"))
    return ReplayRequest(run_dir=run_dir, overrides=parsed.overrides, **parsed.options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
