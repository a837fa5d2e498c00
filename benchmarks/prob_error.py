"""Times what watching the probability error adds to a step of the quickstart; prints JSON.

    python benchmarks/prob_error.py [--steps 40] [override ...]

Two parts are timed by themselves, since both are far below the scatter of steps: the judgement on the driver in
each step (`assess_agreement`), and the decision of the ranks (`ModelRank.is_beyond_limit`), which is repeated on
all ranks of the run while nothing else is computed. `ratio` is (step + both) / step. Pairs of neighbouring steps,
with and without both and alternately first, show that nothing else is added. The canary keeps to its share of the
time; a pack of sequences is timed beside its first sequence alone.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from statistics import median, quantiles
from typing import Any

from header import header

from megatron_grpo.cluster.machines import prepare_ray_environment

prepare_ray_environment()  # before anything imports Ray

import ray  # noqa: E402

from megatron_grpo.algorithms import grpo, stages  # noqa: E402
from megatron_grpo.algorithms.prob_error import Assessment  # noqa: E402
from megatron_grpo.preflight.load import load_config  # noqa: E402

WARM_UP_STEPS = 3
DECISIONS = 200


def time_decisions(rank: Any, repeats: int) -> float:
    """Seconds of one decision of the ranks, with a microbatch's metrics on those that have the loss."""
    import torch

    metrics = {"token_mult_prob_error": torch.tensor(1.0), "token_mult_prob_error_max": torch.tensor(1.0)}
    began = time.perf_counter()
    for _ in range(repeats):
        assert not rank.is_beyond_limit([metrics], 2.0, 1000.0)
    return (time.perf_counter() - began) / repeats


def measure(steps: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Run the quickstart in this process and time its steps."""
    assess_agreement, judged = stages.assess_agreement, []

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        assessment = assess_agreement(*arguments)
        judged.append(time.perf_counter() - began)
        return assessment

    with tempfile.TemporaryDirectory() as folder:
        options = ["+exp=quickstart", f"run_dir={folder}/run", "logger.progress=false", "checkpointing=none"]
        config = load_config([*options, "refit.canary_share=1", *overrides])
        limit = config.refit.prob_error_limit
        with grpo.setup(config) as run:
            canary = run.transport._checks.canary
            pack = canary.sequences

            def step(*, watched: bool, packed: bool = True) -> Any:
                vars(stages)["assess_agreement"] = timed if watched else lambda *_: Assessment({})
                config.refit.prob_error_limit = limit if watched else None
                canary.sequences = pack if packed else pack[:1]
                number = run.state["total_steps"] + 1
                report = grpo.grpo_step(run, iter([next(iter(run.loader))]))
                assert report is not None
                run.state["total_steps"] += 1
                run.dumps.finish(number)
                return report

            for _ in range(WARM_UP_STEPS):
                step(watched=True)
            order = [(True, False) if number % 2 else (False, True) for number in range(steps // 2)]
            watched = [{is_watched: step(watched=is_watched) for is_watched in both} for both in order]
            packed = [{is_watched: step(watched=True, packed=is_watched) for is_watched in both} for both in order[:10]]
            decisions = ray.get(run.policy.submit(time_decisions, DECISIONS))
    total = median(pair[False].timing["total"] for pair in watched)
    differences = [pair[True].timing["total"] - pair[False].timing["total"] for pair in watched]
    cost = median(judged) + max(decisions)
    assert all(math.isfinite(difference) for difference in differences)
    return {
        **header("prob_error"),
        "overrides": list(overrides),
        "ratio": (total + cost) / total,
        "step_s": total,
        "judgement_s": median(judged),
        "decision_s": max(decisions),
        "pairs": len(watched),
        "difference_of_pairs_s": {"median": median(differences), "quartiles": quantiles(differences, n=4)},
        "canary_s": {
            "pack": median(pair[True].throughput["canary_s"] for pair in packed),
            "first sequence alone": median(pair[False].throughput["canary_s"] for pair in packed),
        },
        "canary_logprob_error": max(pair[True].throughput["canary_logprob_error"] for pair in packed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    options, overrides = parser.parse_known_args()
    with redirect_stdout(sys.stderr):
        figures = measure(options.steps, overrides)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
