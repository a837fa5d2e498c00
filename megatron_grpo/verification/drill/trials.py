"""Trials: one fault each in a run that goes on, and the verdict on what the run made of it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from megatron_grpo.cluster.cleanup import is_alive
from megatron_grpo.config.command_line import FAILED, TERMINATED
from megatron_grpo.config.errors import RunError
from megatron_grpo.verification.drill.cells import ACTIONS, Cell, choose_cells
from megatron_grpo.verification.drill.drilled_run import DrilledRun

RECOVERED, ENDED, SKIPPED = "recovered", "ended", "skipped"  # verdicts of a trial
LOOK_S = 0.005  # between two looks at the driver's phase
PAUSE_S = 10.0  # after which a stopped driver is continued: nothing else can notice it
SUMMARY_S = 60.0  # for the summary and the report of a killed driver
REMAINS_S = 40.0  # for the processes of a run to end after it
PATIENCE_STEPS = 12  # in which each phase comes, if the run has it
DELAY_SHARE = 0.5  # of the usual time of a phase, in which a fault happens at random


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a trial."""

    deadline_s: float  # of calls of processes, after which a stopped one is noticed
    recovery_s: float  # from when a fault can be noticed to the next step, or the end of the run
    startup_s: float  # of a start to its first step


@dataclass(slots=True)
class Trial:
    """The outcome of one cell.

    Example: Trial(Cell("policy", "kill", "training"), RECOVERED, victim="policy rank 1", step=12, seconds=28.4)
    """

    cell: Cell
    verdict: str = SKIPPED
    victim: str | None = None  # name of the process
    step: int | None = None  # the last step before the fault
    seconds: float | None = None  # from the fault to the next step, or to the end of the run
    exit_code: int | None = None  # of a run that has ended
    message: str | None = None  # of a run that has ended, or the reason why the cell was skipped
    resume_s: float | None = None  # from the next start to its first step
    problems: list[str] = field(default_factory=list)
    """What is wrong: waits beyond their bounds, processes that stay, checkpoints that are damaged."""

    @property
    def has_passed(self) -> bool:
        """True if the run has recovered or ended as it should."""
        return self.verdict != SKIPPED and not self.problems


def hold_drill(
    run: DrilledRun, cells: Sequence[Cell], count: int | None, limits: Limits, generator: random.Random
) -> Generator[Trial]:
    """Try the cells in a run, from its start to its end.

    `count` are chosen of those whose process the run has; None: all.

    RunError: the run does not start, or has none of the processes.
    """
    try:
        if start_and_step(run, limits) is None:
            raise RunError(f"no step within {limits.startup_s:g} s of the start: {_describe_failure(run)}")
        cells = [cell for cell in cells if run.find_processes(cell.process)]
        if not cells:
            raise RunError("the run has none of these processes on this machine")
        for cell in choose_cells(cells, count, generator):
            yield (trial := try_cell(run, cell, limits, generator))
            if trial.verdict == ENDED and trial.resume_s is None:
                return
        run.note_processes()
        run.ask_to_end()
        run.wait_for_end(limits.recovery_s)
    finally:
        run.end_by_force()
        run.list_remains(within_s=REMAINS_S)


def _describe_failure(run: DrilledRun) -> str:
    return (run.find_messages() or [run.read_output().strip()[-500:]])[-1]


def try_cell(run: DrilledRun, cell: Cell, limits: Limits, generator: random.Random) -> Trial:
    """Make a fault happen, and wait for what follows.

    A run that has ended is started again. With `resume_s` None after an end, it could not be.
    """
    trial = Trial(cell)
    if not run.find_processes(cell.process):
        trial.message = "there is no such process of the run on this machine"
        return trial
    if not _await_phase(run, cell.phase, limits, generator):
        if run.is_alive:
            trial.message = f"the phase did not come within {PATIENCE_STEPS} steps"
        else:
            trial.problems.append("the run ended before the fault")
            _conclude_end(run, trial, limits)
        return trial
    run.note_processes()
    trial.step, count = run.read_step(), run.count_processes(cell.process)
    name, victim = generator.choice(sorted(run.find_processes(cell.process).items()))
    trial.victim = name
    with suppress(psutil.NoSuchProcess):
        victim.send_signal(ACTIONS[cell.action])
    began = time.monotonic()
    _await_outcome(run, trial, victim, count, limits)
    trial.seconds = round(time.monotonic() - began, 1)
    if trial.verdict != RECOVERED:
        if run.is_alive:
            trial.problems.append(f"neither a step nor an end within {trial.seconds:.0f} s: {run.describe_phases()}")
            run.note_processes()
            run.end_by_force()
        _conclude_end(run, trial, limits)
    return trial


def _await_phase(run: DrilledRun, phase: str, limits: Limits, generator: random.Random) -> bool:
    """Wait for a random moment of a phase."""
    delay = generator.random() * DELAY_SHARE * run.measure_phase(phase)
    began, first = time.time(), run.read_step()
    while run.is_alive and run.read_step() <= first + PATIENCE_STEPS:
        current, since = run.read_phase()
        if current == phase and since > began:
            time.sleep(max(since + delay - time.time(), 0.0))
            if run.read_phase() == (current, since):
                return True
            delay = 0.0  # the phase was shorter than usual
        if time.time() > began + limits.recovery_s * PATIENCE_STEPS:
            return False
        time.sleep(LOOK_S)
    return False


def _await_outcome(run: DrilledRun, trial: Trial, victim: psutil.Process, count: int, limits: Limits) -> None:
    """Wait until the run has ended, or has recovered."""
    cell = trial.cell
    is_pause = cell.process == "driver" and cell.action == "stop"
    bound_s = limits.recovery_s + (limits.deadline_s if cell.action == "stop" else 0.0)
    began, is_continued = time.monotonic(), False
    step_when_whole: int | None = None

    def has_outcome() -> bool:
        nonlocal step_when_whole, is_continued
        if is_pause and not is_continued and time.monotonic() > began + PAUSE_S:
            victim.send_signal(signal.SIGCONT)
            is_continued = True
        step = run.read_step()
        is_whole = is_continued if is_pause else _is_whole(run, trial, victim, count)
        if step_when_whole is None:
            step_when_whole = step if is_whole else None
            return False
        is_done = step > step_when_whole
        step_when_whole = min(step, step_when_whole)  # restarted ranks go back to a checkpoint
        return is_done

    if run.wait_for(has_outcome, bound_s) and run.is_alive:
        trial.verdict = RECOVERED


def _is_whole(run: DrilledRun, trial: Trial, victim: psutil.Process, count: int) -> bool:
    return not is_alive(victim) and run.count_processes(trial.cell.process) >= count


def _conclude_end(run: DrilledRun, trial: Trial, limits: Limits) -> None:
    """Judge the end of the run, and go on with it."""
    trial.verdict, trial.exit_code = ENDED, run.driver.returncode
    is_killed = trial.exit_code < 0
    messages = run.find_messages()
    if is_killed and not messages:  # the process that cleans up after a killed driver writes the summary
        messages = [text for text in [run.read_reason(SUMMARY_S)] if text is not None]
    trial.message = messages[-1] if messages else None
    if len(messages) != 1:
        trial.problems.append(f"the run has ended with {len(messages)} messages")
    if "Traceback" in run.read_output():
        trial.problems.append("the run has printed a traceback")
    if trial.exit_code not in _list_exit_codes(trial.cell):
        trial.problems.append(f"exit code {trial.exit_code}")
    trial.problems += [f"left behind: {process}" for process in run.list_remains(REMAINS_S)]
    resume(run, trial, limits)


def _list_exit_codes(cell: Cell) -> tuple[int, ...]:
    if cell.process == "driver":
        return (TERMINATED,) if cell.action == "end" else (-ACTIONS[cell.action],)
    return (FAILED,)


def resume(run: DrilledRun, trial: Trial, limits: Limits) -> None:
    """Start the run again, and wait for a step."""
    damaged = run.list_damaged()
    seconds = start_and_step(run, limits)
    trial.problems += [f"checkpoint set aside as {name}" for name in sorted(run.list_damaged() - damaged)]
    if seconds is None:
        trial.problems.append(f"the run does not go on within {limits.startup_s:.0f} s: {_describe_failure(run)}")
    else:
        trial.resume_s = round(seconds, 1)


def start_and_step(run: DrilledRun, limits: Limits) -> float | None:
    """Start a run and wait for a step; returns the seconds."""
    starts, began = len(run.list_starts()), time.monotonic()
    run.start()

    def has_stepped() -> bool:
        current = run.list_starts()
        return len(current) > starts and run.read_step() > current[-1]

    if run.wait_for(has_stepped, limits.startup_s) and run.is_alive:
        return time.monotonic() - began
    return None
