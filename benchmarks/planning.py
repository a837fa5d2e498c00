"""Times the planning of microbatches against the quadratic algorithm that came before; prints JSON.

    python benchmarks/planning.py [--data-parallel 8] [--microbatch-tokens 32768]

The lengths are log-normal: half of the sequences have more than `--median` tokens, none more than `--longest`. The
former algorithm is read from git and runs in the same process on the same lengths, up to `--former-up-to` sequences;
without the commit (a shallow clone, say) its columns are left out and a note on standard error says so.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from header import header

from megatron_grpo.batch.packing import SequencePadder

FORMER = "19e7a4f:megatron_grpo/data/padded_batches.py"
"""The last commit whose planning takes quadratic time."""
Plan = list[list[list[int]]]


def main() -> None:
    options = _options()
    former = _former()
    result = {
        **header("planning"),
        "data_parallel": options.data_parallel,
        "microbatch_tokens": options.microbatch_tokens,
        "pad_to_multiple": options.pad_to_multiple,
        "lengths": {"median": options.median, "sigma": options.sigma, "longest": options.longest, "seed": options.seed},
        "sizes": [_measure(options, sequences, former) for sequences in options.sequences],
    }
    print(json.dumps(result, indent=2))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {
        "data-parallel": 8,
        "microbatch-tokens": 32_768,
        "pad-to-multiple": 1,
        "median": 2048,
        "longest": 32_768,
        "seed": 0,
        "former-up-to": 16_384,
        "repeats": 3,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of the lengths")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 16_384, 131_072, 1_000_000])
    return parser.parse_args()


def _former() -> Callable[..., Plan] | None:
    """`plan_microbatches` as it was at the quadratic algorithm's commit, or None where git cannot show it."""
    command = ["git", "show", FORMER]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"without the former algorithm: {error}", file=sys.stderr)
        return None
    module = ModuleType("former_packing")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(found.stdout, FORMER, "exec"), module.__dict__)
    plan: Callable[..., Plan] = module.plan_microbatches
    return plan


def _planned(lengths: list[int], *, data_parallel: int, microbatch_tokens: int, pad_to_multiple: int) -> Plan:
    return SequencePadder(microbatch_tokens, pad_to_multiple).assign_microbatches(lengths, data_parallel)


def _measure(options: argparse.Namespace, sequences: int, former: Callable[..., Plan] | None) -> dict[str, Any]:
    rng = random.Random(options.seed)
    drawn = (round(rng.lognormvariate(math.log(options.median), options.sigma)) for _ in range(sequences))
    lengths = [min(max(length, 1), options.longest) for length in drawn]
    seconds, plan = _fastest(_planned, options, lengths)
    figures = {
        "sequences": sequences,
        "microbatches": sum(len(rank) for rank in plan),
        "seconds": round(seconds, 6),
        "padding_fraction": round(_padding(plan, lengths, options.pad_to_multiple), 6),
    }
    if former is None or sequences > options.former_up_to:
        return figures
    former_seconds, former_plan = _fastest(former, options, lengths)
    return figures | {
        "former_seconds": round(former_seconds, 6),
        "ratio": round(former_seconds / seconds, 1),
        "identical": plan == former_plan,
    }


def _fastest(planner: Callable[..., Plan], options: argparse.Namespace, lengths: list[int]) -> tuple[float, Plan]:
    """Wall-clock seconds of the fastest call, and its plan: other processes on the machine only ever add to them."""
    timed = []
    for _ in range(options.repeats):
        began = time.perf_counter()
        plan = planner(
            lengths,
            data_parallel=options.data_parallel,
            microbatch_tokens=options.microbatch_tokens,
            pad_to_multiple=options.pad_to_multiple,
        )
        timed.append(time.perf_counter() - began)
    return min(timed), plan


def _padding(plan: Plan, lengths: list[int], multiple: int) -> float:
    """Fraction of the tokens of all rectangles that is padding."""
    rectangles = [(max(lengths[i] for i in one), len(one)) for rank in plan for one in rank]
    area = sum(math.ceil(width / multiple) * multiple * count for width, count in rectangles)
    return 1 - sum(lengths) / area


if __name__ == "__main__":
    main()
