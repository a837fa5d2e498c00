"""Times the checks that follow a refit, in steps of the quickstart; prints JSON.

    python benchmarks/canary.py [--pairs 20] [--paced 20] [override ...]

Pairs of neighbouring steps, one with the canary and one without, alternately first: `refit_difference_s` is the
difference of their refits, the whole delay. Then steps as a run does them, in which the canary keeps to its share. The
comparison of all weights is timed in every tenth step; its share is that at the default period.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from statistics import median, quantiles
from typing import Any

from header import header

from megatron_grpo.cluster.machines import prepare_ray_environment

prepare_ray_environment()  # before anything imports Ray

from megatron_grpo.algorithms.grpo import grpo_step, setup  # noqa: E402
from megatron_grpo.algorithms.step_report import StepReport  # noqa: E402
from megatron_grpo.config.generation_schema import RefitConfig  # noqa: E402
from megatron_grpo.preflight.load import load_config  # noqa: E402

WARM_UP_STEPS = 3
CHECK_PERIOD = 10


def measure(pairs: int, paced: int, overrides: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        every_tenth = f"refit.weight_check_period={CHECK_PERIOD}"
        options = [
            "+exp=quickstart",
            f"run_dir={folder}/run",
            "logger.progress=false",
            "checkpointing=none",
            every_tenth,
        ]
        config = load_config([*options, *overrides])
        with setup(config) as run:
            canary = run.transport._checks.canary

            def step(with_canary: bool | None) -> StepReport:
                """One step; None: the canary is paced."""
                if with_canary is not None:
                    canary._next = -math.inf if with_canary else math.inf
                number = run.state["total_steps"] + 1
                report = grpo_step(run, iter([next(iter(run.loader))]))
                assert report is not None
                run.state["total_steps"] += 1
                run.dumps.finish(number)
                return report

            warm = [step(True) for _ in range(WARM_UP_STEPS)]
            order = [(True, False) if number % 2 else (False, True) for number in range(pairs)]
            paired = [{has_canary: step(has_canary) for has_canary in both} for both in order]
            canary._next = -math.inf
            free = [step(None) for _ in range(paced)]
    everything = [*warm, *(figures for pair in paired for figures in pair.values()), *free]
    checks = [figures.throughput["weight_check_s"] for figures in everything if "weight_check_s" in figures.throughput]
    # A step with a comparison of weights is not a pair with one without.
    alike = [pair for pair in paired if not any("weight_check_s" in figures.throughput for figures in pair.values())]
    delays = [pair[True].timing["refit"] - pair[False].timing["refit"] for pair in alike]
    total = median(figures.timing["total"] for figures in everything)
    followed = [figures for figures in free if "canary_s" in figures.throughput]
    return {
        **header("canary"),
        "overrides": list(overrides),
        "pairs": len(alike),
        "step_s": total,
        "refit_s": median(pair[False].timing["refit"] for pair in alike),
        "refit_difference_s": {"median": median(delays), "quartiles": quantiles(delays, n=4)},
        "canary_s": median(pair[True].throughput["canary_s"] for pair in paired),
        "share_if_every_refit": median(delays) / total,
        "paced_steps": {"all": len(free), "with_canary": len(followed)},
        "share_paced": sum(figures.throughput["canary_s"] for figures in followed)
        / sum(figures.timing["total"] for figures in free),
        "weight_check_s": {"median": median(checks), "all": checks},
        "share_of_weight_checks": median(checks) / total / (RefitConfig().weight_check_period or math.inf),
        "canary_logprob_error": max(pair[True].throughput["canary_logprob_error"] for pair in paired),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--paced", type=int, default=20)
    options, overrides = parser.parse_known_args()
    with redirect_stdout(sys.stderr):
        result = measure(options.pairs, options.paced, overrides)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
