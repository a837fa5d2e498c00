"""Trains with two revisions of this repository and compares their metrics to the last digit; prints JSON.

    python benchmarks/same_numbers.py BEFORE [AFTER] [--steps 20] [--only NAME ...] [--ignore KEY ...] [--keep DIR]

BEFORE and AFTER are git revisions, folders with a checkout, or folders with the recorded metrics of an earlier run:
--keep DIR leaves them in DIR/before and DIR/after. AFTER is this checkout unless it is given. Numbers repeat on one
machine with one set of packages, so both sides belong there, records included.

Every value of BEFORE, those of the clock aside, has to be in AFTER; a difference, or a run that fails, makes the exit
code 1. What BEFORE's configuration does not know is skipped, and the result says why.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import Any

from header import header
from sides import FILES, ROOT, FailedError, NotKnownError, Side, opened

RECIPES = ROOT / "conf" / "exp"
LOOPS = {"ppo": "ppo", "sft": "sft", "dpo": "dpo", "reward_model": "reward_model", "distillation": "grpo"}
"""Section of the loop, by the end of the recipe's name; that of the others is grpo."""
VARIANTS = sorted(file.stem for file in (ROOT / "conf" / "variant").glob("*.yaml"))
CASES: Mapping[str, tuple[str, ...]] = {
    "defaults": (),
    **{name: (f"+exp=quickstart_{name}",) for name in LOOPS if (RECIPES / f"quickstart_{name}.yaml").exists()},
    "moe": ("+exp=quickstart_moe",),
    "tools": ("+exp=quickstart_tools",),
    "two_tasks": ("+exp=quickstart_two_tasks",),
    "minibatches": ("policy.train_global_batch_samples=64", "grpo.num_iterations=2"),
    "kl_in_reward": (
        "loss_fn.reference_policy_kl_penalty=0.01",
        "loss_fn.use_kl_in_reward=true",
        "grpo.normalize_rewards_over=batch",
        "grpo.seq_logprob_error_threshold=1.5",
    ),
    "kl_in_loss": ("loss_fn.reference_policy_kl_penalty=0.01",),
    "policy_data_parallel": ("policy.parallel.pipeline=1", "policy.parallel.data=2"),
    "generation_data_parallel": ("generation.parallel.pipeline=1", "generation.parallel.data=2"),
    **{name: (f"+variant={name}",) for name in VARIANTS},
}
"""What each case adds to the quickstart."""
QUIET = ("checkpointing=none", "logger.progress=false", "logger.tensorboard=false")
CLOCK = ("timing", "throughput")
DEADLINE_S = 600.0
MISSING = "(missing)"

Rows = list[dict[str, Any]]


def overrides_of(name: str, steps: int) -> list[str]:
    """The command line of a case, without run_dir."""
    case = CASES[name]
    recipe = () if any(override.startswith("+exp=") for override in case) else ("+exp=quickstart",)
    loop = next((loop for name, loop in LOOPS.items() if f"+exp=quickstart_{name}" in case), "grpo")
    return [*recipe, *case, f"{loop}.max_num_steps={steps}", f"{loop}.val_period=10", *QUIET]


def compare_case(name: str, steps: int, before: Side, after: Side, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """Run both sides as far as needed, and say how a case came out."""
    overrides = overrides_of(name, steps)
    case: dict[str, Any] = {"name": name, "overrides": overrides}
    try:
        old = before.metrics_of(name, overrides)
    except NotKnownError as error:
        return case | {"skipped": f"before: {error}"}
    except FailedError as error:
        return case | {"identical": False, "failed": f"before: {error}"}
    try:
        new = after.metrics_of(name, overrides)
    except (NotKnownError, FailedError) as error:
        return case | {"identical": False, "failed": f"after: {error}"}
    return case | compare_folders(old, new, ignore)


def compare_folders(before: Path, after: Path, ignore: Sequence[str] = ()) -> dict[str, Any]:
    """The metrics of two runs, those of the steps first."""
    difference, new_keys, steps = None, set(), 0
    for file in FILES:
        old, new = read_rows(before / file, ignore), read_rows(after / file, ignore)
        steps = steps or len(old)
        new_keys |= {key for row in new for key in row} - {key for row in old for key in row}
        first = first_difference(old, new)
        difference = difference or (first and {"file": file, **first})
    if not steps:
        difference = {"file": FILES[0], "step": None, "key": "step", "before": MISSING, "after": MISSING}
    return {
        "steps": steps,
        "identical": difference is None,
        "first_difference": difference,
        "new_keys": sorted(new_keys),
    }


def read_rows(path: Path, ignore: Sequence[str] = ()) -> Rows:
    """The lines of a file, none if there is no such file, with the keys of nested values as `outer.inner`."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [dict(_flat(json.loads(line), {*CLOCK, *ignore})) for line in lines]


def _flat(row: Mapping[str, Any], ignored: set[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        name = f"{prefix}{key}"
        if name in ignored:
            continue
        if isinstance(value, dict):
            yield from _flat(value, ignored, f"{name}.")
        else:
            yield name, value


def first_difference(before: Rows, after: Rows) -> dict[str, Any] | None:
    """Step, key and both values of the first difference; what is only new is none."""
    for old, new in zip_longest(before, after):
        if old is None:
            return {"step": new.get("step"), "key": "step", "before": MISSING, "after": new.get("step")}
        for key, value in old.items():
            other_value = (new or {}).get(key, MISSING)
            if repr(value) != repr(other_value):
                return {"step": old.get("step"), "key": key, "before": value, "after": other_value}
    return None


def main(arguments: Sequence[str]) -> int:
    """Compare; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="revision, checkout or records")
    parser.add_argument("after", nargs="?", default=str(ROOT), help="the same; this checkout by default")
    parser.add_argument("--steps", type=int, default=20, help="length of each run (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=CASES, default=list(CASES), help="some cases")
    parser.add_argument("--ignore", nargs="+", metavar="KEY", default=[], help="metrics that may differ")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where records and output of the runs stay")
    parser.add_argument("--deadline", type=float, default=DEADLINE_S, help="seconds of each run (%(default)s)")
    options = parser.parse_args(arguments)
    with ExitStack() as stack:
        keep = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="same_numbers_")))
        before, old_commit = stack.enter_context(opened(options.before, keep / "before", options.deadline))
        after, new_commit = stack.enter_context(opened(options.after, keep / "after", options.deadline))
        cases = []
        for name in options.only:
            began = time.monotonic()
            cases.append(compare_case(name, options.steps, before, after, options.ignore))
            print(f"{name}: {_outcome(cases[-1])} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
    result = {
        **header("same_numbers"),
        "before": {"source": options.before, "commit": old_commit},
        "after": {"source": options.after, "commit": new_commit},
        "ignored": options.ignore,
        "cases": cases,
    }
    print(json.dumps(result, indent=2))
    compared = [case["identical"] for case in cases if "skipped" not in case]
    return 0 if compared and all(compared) else 1


def _outcome(case: Mapping[str, Any]) -> str:
    for key in ("skipped", "failed"):
        if key in case:
            return f"{key}, {case[key]}"
    return "identical" if case["identical"] else f"differs, {case['first_difference']}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
