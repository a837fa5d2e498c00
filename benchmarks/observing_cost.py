"""Measures what it costs a step to be observed; prints JSON.

    python benchmarks/observing_cost.py [--steps 400] [--step-s 0.35] [--spans 40]

Times by themselves what a step adds: alarms over the history of a long run, the spans of a process with their file, and
the figures for Ray's Prometheus exporters (`--prometheus`: starts Ray). `ratio` is their sum over the seconds of a step
of the quickstart on two cores (`--step-s`), which is as short as a step gets.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from header import header

from megatron_grpo.cluster.machines import prepare_ray_environment

prepare_ray_environment()  # before anything imports Ray

from megatron_grpo.cluster.phases import Phases  # noqa: E402
from megatron_grpo.cluster.spans import SpanRecorder  # noqa: E402
from megatron_grpo.observability.alarms import AlarmWatch  # noqa: E402

FIGURES = (
    *("reward", "approx_entropy", "kl_penalty", "gen_kl_error", "token_mult_prob_error_off", "grad_norm"),
    *("groups_without_signal", "groups_all_right", "truncation_rate", "failed_rollouts", "optimizer_steps"),
)
ALL_FIGURES = 80  # of a step, with those of the clock


def measure(call: Callable[[int], object], steps: int) -> float:
    """Median CPU seconds of call(step); other processes of the machine do not add to them."""
    seconds = []
    for step in range(1, steps + 1):
        began = time.process_time()
        call(step)
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


def measure_alarms(steps: int) -> float:
    watch = AlarmWatch(256)
    return measure(lambda step: watch.observe_step({"step": step} | dict.fromkeys(FIGURES, 0.3)), steps)


def measure_spans(steps: int, spans: int, folder: Path) -> float:
    """Seconds of `spans` phases of a process, and of writing them once."""
    phases = Phases()
    phases.spans = recorder = SpanRecorder(folder, "driver")

    def pass_phases(_: int) -> None:
        for number in range(spans):
            phases.leave(phases.enter(f"phase {number}"))
        recorder.write(ended=True)

    return measure(pass_phases, steps)


def measure_prometheus(steps: int, folder: Path) -> float:
    import ray

    from megatron_grpo.observability.prometheus import PrometheusTracker

    ray.init(include_dashboard=False, num_cpus=1, object_store_memory=100 * 2**20, log_to_driver=False)
    try:
        tracker = PrometheusTracker(folder)
        values = {f"train/figure_{number}": 0.5 for number in range(ALL_FIGURES)}
        return measure(lambda step: tracker.log(step, values), steps)
    finally:
        ray.shutdown()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-s", type=float, default=0.35, help="seconds of the step that is the reference")
    parser.add_argument("--spans", type=int, default=40, help="spans of a process in a step")
    parser.add_argument("--prometheus", action="store_true")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        seconds = {
            "alarms": measure_alarms(options.steps),
            "spans": measure_spans(options.steps, options.spans, Path(folder)),
        }
        if options.prometheus:
            seconds["prometheus"] = measure_prometheus(options.steps, Path(folder))
    result = header("observing_cost") | {"step_s": options.step_s, "seconds": seconds}
    print(json.dumps(result | {"ratio": sum(seconds.values()) / options.step_s}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
