"""The cases of scale.py in a process of their own: steps of GRPO on simulated clusters, and what they cost the driver.

The driver's code is that of a run (`algorithms`, the handles of ranks, engines and rollout workers, the refit's plan
and attempts), and so are rollout workers and environments. Ranks and engines are those of simulated_parts.py and
simulated_engine.py. All of them share a few processes (simulated_cluster.py).
"""

from __future__ import annotations

import cProfile
import gc
import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import psutil
import ray
import simulated_cluster
from data_plane_parts import MadeUpPrompts, Sizes
from driver_meter import Meter
from simulated_case import SLOW, Case
from simulated_cluster import LogicalRay, start_hosts
from simulated_engine import SimulatedEngine
from simulated_parts import SimulatedRank, Times

from megatron_grpo.algorithms.context import GRPORun, make_save_state
from megatron_grpo.algorithms.grpo import grpo_step
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.placement import Placement
from megatron_grpo.algorithms.records import RolloutDumps, describe_run
from megatron_grpo.algorithms.sample_buffer import OrderedBuffer, Oversampling
from megatron_grpo.algorithms.step_report import StepReport
from megatron_grpo.batch.generation_requests import SamplingSettings
from megatron_grpo.cluster.process_log import driver_log
from megatron_grpo.config.schema import Config
from megatron_grpo.data.loader import PromptLoader, Prompts, PromptSampler
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.environments import environment_processes as environment_pool
from megatron_grpo.environments.environment_worker import EnvironmentWorker
from megatron_grpo.generation import vllm_generation
from megatron_grpo.generation.engine import VllmEngine
from megatron_grpo.generation.engine_arguments import VllmSettings
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.rollouts import engine_replacer, pool
from megatron_grpo.rollouts.rollout_worker import RolloutWorker
from megatron_grpo.run.checkpoints import Checkpointer
from megatron_grpo.run.launch import start_rollouts
from megatron_grpo.trainer import model_ranks
from megatron_grpo.trainer.actor import RankActor
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.transport import WeightTransport, make_transport

OBJECT_STORE_BYTES = 4 * 2**30


@dataclass
class Usage:
    """CPU seconds of the driver's threads and of Ray's processes, at one moment."""

    threads: dict[str, float] = field(default_factory=dict)
    """Of the driver, by name of the thread; "main" includes what a mark spends."""
    processes: dict[str, float] = field(default_factory=dict)
    """Of other processes, by kind: raylet, gcs_server, hosts, and the others of Ray."""
    resident_bytes: dict[str, int] = field(default_factory=dict)
    """Resident memory, by kind of process."""

    @staticmethod
    def now() -> Usage:
        """What was used so far."""
        usage, driver = Usage(), psutil.Process()
        for thread in driver.threads():
            name = "main" if thread.id == driver.pid else _comm(thread.id)
            usage.threads[name] = usage.threads.get(name, 0.0) + thread.user_time + thread.system_time
        for process in driver.children(recursive=True):
            try:
                name, times, memory = process.name(), process.cpu_times(), process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            kind = "hosts" if "Host" in name else name if name in ("raylet", "gcs_server") else "others"
            usage.processes[kind] = usage.processes.get(kind, 0.0) + times.user + times.system
            usage.resident_bytes[kind] = usage.resident_bytes.get(kind, 0) + memory
        return usage


def _comm(thread: int) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except OSError:
        return "ended"


@dataclass
class Record:
    """What is noted while steps are made."""

    meter: Meter = field(default_factory=Meter)
    usages: list[Usage] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    """Calls of logical actors by the driver so far."""
    marking_s: list[float] = field(default_factory=list)
    """CPU seconds of each mark itself, which are left out of the step that it begins."""
    reports: list[StepReport] = field(default_factory=list)

    def mark(self) -> None:
        """A step begins, or the last one has ended."""
        self.meter.mark()
        began = time.thread_time()
        self.usages.append(Usage.now())
        self.marking_s.append(time.thread_time() - began)
        self.calls.append(simulated_cluster.calls_made())


def measure(cases: Sequence[Case], folder: Path) -> Iterator[dict[str, Any]]:
    """The figures of each case, one after the other on one Ray with the same hosts."""
    with ExitStack() as stack:
        stack.enter_context(driver_log(folder, "info"))
        _start_ray()
        stack.callback(ray.shutdown)
        hosts = start_hosts(max(case.hosts for case in cases))
        for number, case in enumerate(cases):
            yield _measure_run(case, hosts[: case.hosts], folder / f"case_{number}")


def _measure_run(case: Case, hosts: Sequence[Any], folder: Path) -> dict[str, Any]:
    config = compose_config(case.overrides(folder))
    kinds: dict[type, Any] = {
        RankActor: partial(SimulatedRank, case.times),
        VllmEngine: partial(SimulatedEngine, case.times),
        RolloutWorker: RolloutWorker,
        EnvironmentWorker: EnvironmentWorker,
    }
    cluster: Any = LogicalRay(hosts, kinds, callers=[RolloutWorker])
    with ExitStack() as stack:
        modules = (model_ranks, vllm_generation, pool, engine_replacer, environment_pool)
        stack.enter_context(cluster.in_place_of_ray(modules))
        began = time.perf_counter(), time.process_time()
        run = _bring_up(config, case, stack)
        startup = {"wall_s": time.perf_counter() - began[0], "driver_cpu_s": time.process_time() - began[1]}
        record = Record()
        gc.collect()
        gc.freeze()  # as a run does when it is up
        stack.callback(gc.unfreeze)
        with record.meter.watching():
            _train(run, case, record)
            record.mark()
        return {**_figures(case, run, record), "startup": _round_numbers(startup)}


def _start_ray() -> None:
    ray.init(
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
    )


def _train(run: GRPORun, case: Case, record: Record) -> None:
    profiler = cProfile.Profile() if case.profile else None

    def step(run: GRPORun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
        record.mark()
        if len(record.usages) == 2:
            _break(run, case)
            if profiler is not None:
                profiler.enable()
        report = grpo_step(run, batches)
        assert report is not None, "prompts are used up"
        record.reports.append(report)
        return report

    train_steps(run, step)
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(str(case.profile))


def _break(run: GRPORun, case: Case) -> None:
    """Bring the case's fault about, at the beginning of the second step."""
    engines, ranks = run.rollouts.engines, run.policy.actors
    if case.fault == "slow_engine":
        engines[len(engines) // 2].set_speed.remote(SLOW)
    elif case.fault == "slow_rank":
        ranks[len(ranks) // 2].set_speed.remote(SLOW)
    elif case.fault == "lost_engine":
        engines[len(engines) // 2].die_after.remote(case.lost_after_s)


def _bring_up(config: Config, case: Case, stack: ExitStack) -> GRPORun:
    """Bring up a run like `algorithms.setup`, without placing processes on GPUs."""
    run_dir, folder = Path(config.run_dir), Path(config.policy.model.path)
    generation = _generation(config, folder, stack)
    policy = _policy(config, folder, stack)
    transport = make_transport(policy, generation, config.refit, run_dir)
    stack.callback(transport.close)
    rollouts = start_rollouts(config, folder, generation, stack, restore=transport.restore)
    for part in (generation, policy, rollouts):
        part.wait_ready()
    placement = Placement()
    if config.generation.is_colocated:
        generation.sleep()
        placement = Placement(generation, [policy])
    loader = _loader(case)
    settings = SamplingSettings(max_new_tokens=config.generation.max_new_tokens)
    buffer = None
    if config.async_sampling.enabled:
        kind = OrderedBuffer if config.async_sampling.oversampling_factor is None else Oversampling
        buffer = kind(rollouts, loader, config.sampled_loop, settings, 0)
    _publish_first(transport, placement)
    logger = RunLogger(run_dir, config)
    stack.callback(logger.close)
    return GRPORun(
        config=config,
        run_dir=run_dir,
        policy=policy,
        transport=transport,
        placement=placement,
        rollouts=rollouts,
        settings=settings,
        dumps=RolloutDumps(rollouts, config.logger, run_dir, describe_run(config, folder)),
        loader=loader,
        val_prompts=[],
        loss_fn=ClippedPGLossFn(config.loss_fn),
        logger=logger,
        checkpointer=Checkpointer(run_dir, config.checkpointing),
        state=make_save_state(),
        batch_cache=[],
        buffer=buffer,
    )


def _publish_first(transport: WeightTransport, placement: Placement) -> None:
    began = time.perf_counter(), time.process_time()
    transport.connect()
    wall_s, cpu_s = time.perf_counter() - began[0], time.process_time() - began[1]
    print(f"links are made: {wall_s:.1f} s, {cpu_s:.1f} s of the driver's CPU time", file=sys.stderr)
    with placement.refit(StepTimer()):
        transport.publish(0)


def _generation(config: Config, folder: Path, stack: ExitStack) -> VllmGeneration:
    settings = VllmSettings(
        model_path=str(folder),
        config=config.generation,
        precision=config.policy.precision,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        in_flight=config.async_sampling if config.async_sampling.enabled else None,
    )
    timeout_s = config.cluster.startup_timeout_s
    generation = VllmGeneration(settings, actor_options=lambda engine: {}, startup_timeout_s=timeout_s)
    stack.callback(generation.shutdown)
    generation.start()
    return generation


def _policy(config: Config, folder: Path, stack: ExitStack) -> MegatronPolicy:
    settings = RankSettings(
        config=config.policy,
        shape=read_model_shape(folder),
        folder=str(folder),
        temperature=config.generation.temperature,
        decay_steps=config.decay_steps,
        seed=config.loop.seed,
    )
    policy = MegatronPolicy(settings, lambda rank: {}, config.cluster.startup_timeout_s)
    stack.callback(policy.shutdown)
    policy.start()
    return policy


def _loader(case: Case) -> PromptLoader:
    prompts = case.samples // case.group
    made_up = MadeUpPrompts(
        Sizes(
            samples=case.samples,
            tokens=case.longest,
            replicas=1,
            group=case.group,
            minibatches=case.minibatches,
            steps=case.steps + 3,  # those that are sampled ahead
        )
    )
    order = PromptSampler([len(made_up)], [1.0], shuffle=True, seed=0)
    return PromptLoader(cast(Prompts, made_up), prompts_per_batch=prompts, order=order)


def _figures(case: Case, run: GRPORun, record: Record) -> dict[str, Any]:
    """Medians over the measured steps, and the simulated seconds of each."""
    marks, reports = record.meter.marks, record.reports[1:]
    columns = [*zip(*marks, strict=True), record.calls]
    wall, cpu, moved, calls = ([end - begin for begin, end in pairwise(column[1:])] for column in columns)
    marking = record.marking_s[1:-1]
    cpu = [seconds - spent for seconds, spent in zip(cpu, marking, strict=True)]
    steps = list(pairwise(record.usages[1:]))
    outcomes = [report.sampled for report in reports]
    return {
        "gpus": case.gpus,
        "mode": case.mode,
        "fault": case.fault,
        "ranks": len(run.policy.actors),
        "engines": case.engines,
        "rollout_workers": len(run.rollouts.actors),
        "samples": case.samples,
        "mean_tokens": round(statistics.fmean(outcome.response_tokens for step in outcomes for outcome in step), 1),
        "calls": statistics.median(calls),
        "driver_cpu_s": round(statistics.median(cpu), 3),
        "driver_cpu_s_by_step": _round_numbers(cpu),
        "driver_threads_cpu_s": _between(steps, "threads"),
        "marking_cpu_s": _round_numbers(marking),
        "driver_peak_gib": round(record.meter.peak_bytes / 2**30, 3),
        "driver_bytes": int(statistics.median(moved)),
        "other_processes_cpu_s": _between(steps, "processes"),
        "other_processes_gib": _round_numbers({k: v / 2**30 for k, v in record.usages[-1].resident_bytes.items()}),
        "wall_s": round(statistics.median(wall), 3),
        "simulated_step_s": _round_numbers([case.times.speed_up * seconds for seconds in wall]),
        "simulated_phases_s": _phases(case, reports),
        "metrics": {
            name: round(statistics.median(report.metrics[name] for report in reports), 3)
            for name in ("exposed_generation_s", "trajectory_age", "oversampling_left_over", "engine_restarts")
            if all(name in report.metrics for report in reports)
        },
        "load_average": os.getloadavg()[0],
    }


def _phases(case: Case, reports: list[StepReport]) -> dict[str, float]:
    names = dict.fromkeys(name for report in reports for name in report.timing)
    medians = {n: statistics.median(report.timing.get(n, 0.0) for report in reports) for n in names}
    return {name: round(case.times.speed_up * seconds, 2) for name, seconds in medians.items()}


def _between(steps: list[tuple[Usage, Usage]], figure: str) -> dict[str, float]:
    """Median over steps of the CPU seconds by name."""
    differences: dict[str, float] = {}
    for name in getattr(steps[-1][1], figure):
        differences[name] = statistics.median(
            max(getattr(end, figure).get(name, 0.0) - getattr(begin, figure).get(name, 0.0), 0.0)
            for begin, end in steps
        )
    return _round_numbers({name: seconds for name, seconds in sorted(differences.items()) if seconds >= 0.005})


def _round_numbers(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: round(value, 3) for name, value in values.items()}
    return [round(value, 3) for value in values]


def main() -> None:
    """Measure the cases of the first argument, and append a line for each to the second's file."""
    settings, file, folder = sys.argv[1:]
    cases = [Case(**{**fields, "times": Times(**fields["times"])}) for fields in json.loads(settings)]
    for figures in measure(cases, Path(folder)):
        with Path(file).open("a") as lines:
            lines.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
