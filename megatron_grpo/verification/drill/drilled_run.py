"""A run in a process of its own, watched through the files that it writes."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_grpo.cluster import heartbeat as beats
from megatron_grpo.cluster.cleanup import is_alive
from megatron_grpo.cluster.phases import SERVE
from megatron_grpo.cluster.process_log import DRIVER, LOGS_FOLDER
from megatron_grpo.config.outside_files import read_json
from megatron_grpo.observability.live.lanes import RUNNING_S, read_spans
from megatron_grpo.observability.run_files import METRICS_FILE, STARTS_FILE, SUMMARY_FILE, read_lines
from megatron_grpo.run.checkpoints import CHECKPOINTS_FOLDER
from megatron_grpo.run.directory import STOP_FILE
from megatron_grpo.verification.drill.cells import RAYLET, identify_phase, is_of_kind, list_driver_phases

MARK = "MEGATRON_GRPO_DRILL"  # environment variable that processes of a run inherit
POLL_S = 0.05
TAIL_BYTES = 2**18  # of the metrics, whose last line is read
END_S = 60.0  # for a run to end after SIGTERM
_MESSAGES = ("run failed: ", "interrupted")  # beginnings of the line with which a run ends early


class DrilledRun:
    """`python -m megatron_grpo.train`, started as often as it ends; `arguments` without run_dir."""

    def __init__(self, run_dir: Path, arguments: Sequence[str]) -> None:
        self.run_dir = run_dir
        self.output = run_dir.with_name(f"{run_dir.name}.log")
        self._command = [sys.executable, "-m", "megatron_grpo.train", *arguments, f"run_dir={run_dir}"]
        self._heartbeats = run_dir / LOGS_FOLDER / beats.HEARTBEATS_FOLDER
        self._mark = uuid.uuid4().hex
        self._seen: set[psutil.Process] = set()  # of the current start
        self._output_begin = 0  # bytes of the output of earlier starts

    def start(self) -> None:
        """Start the run, or go on with it."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._seen.clear()
        with self.output.open("ab") as output:
            self._output_begin = output.tell()
            self.driver = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, MARK: self._mark},
                start_new_session=True,
            )

    @property
    def is_alive(self) -> bool:
        """True until the driver has ended."""
        return self.driver.poll() is None

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for a condition while the run lives; False: in vain."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.is_alive:
            if condition():
                return True
            time.sleep(POLL_S)
        return condition()

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait for the end of the driver; False: it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self.driver.wait(timeout_s)
        return not self.is_alive

    def read_step(self) -> int:
        """Read the number of the last finished step."""
        try:
            with (self.run_dir / METRICS_FILE).open("rb") as file:
                file.seek(-min(TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
                lines = file.read().split(b"\n")[:-1]
            return int(json.loads(lines[-1])["step"]) if lines else 0
        except FileNotFoundError:
            return 0

    def list_starts(self) -> list[int]:
        """List the steps after which the run started, restarts of ranks included."""
        return [int(row["resumed_after"] or 0) for row in read_lines(self.run_dir / STARTS_FILE)]

    def list_damaged(self) -> set[str]:
        """List the checkpoints that starts have set aside as damaged."""
        return {path.name for path in (self.run_dir / CHECKPOINTS_FOLDER).glob("damaged_*")}

    def read_phase(self) -> tuple[str | None, float]:
        """Read the phase of the run, and since when (epoch seconds)."""
        driver = beats.read_heartbeat(self._heartbeats, DRIVER)
        if driver is None or not driver.phases:
            return None, 0.0
        return identify_phase([phase.name for phase in driver.phases]), driver.phases[-1].since

    def describe_phases(self) -> str:
        """Describe what each process does, to say where a run hangs."""
        now = time.time()
        return "; ".join(
            f"{name} is {phase.name} for {now - phase.since:.0f} s"
            for name, beat in beats.read_heartbeats(self._heartbeats).items()
            for phase in beat.phases[-1:]
            if phase.name != SERVE
        )

    def measure_phase(self, phase: str) -> float:
        """Measure the median seconds of a phase in the last minute."""
        now, names = time.time(), list_driver_phases(phase)
        spans = read_spans(self.run_dir, now - 60.0, now).get(DRIVER, [])
        return statistics.median([span.seconds for span in spans if span.phase in names] or [0.0])

    def find_processes(self, process: str) -> dict[str, psutil.Process]:
        """Find the living processes of a kind on this machine, by name."""
        if process == RAYLET:
            children = psutil.Process(self.driver.pid).children() if self.is_alive else []
            return {f"{RAYLET} {child.pid}": child for child in children if child.name() == RAYLET and is_alive(child)}
        machine = beats.identify_machine()
        local = {
            name: self._find_process(beat)
            for name, beat in beats.read_heartbeats(self._heartbeats).items()
            if is_of_kind(name, process) and beat.machine == machine
        }
        return {name: living for name, living in local.items() if living is not None}

    def count_processes(self, process: str) -> int:
        """Count the living processes of a kind on all machines."""
        machine, now = beats.identify_machine(), time.time()
        elsewhere = [
            beat
            for name, beat in beats.read_heartbeats(self._heartbeats).items()
            if is_of_kind(name, process) and beat.machine != machine and now - beat.beat < RUNNING_S
        ]
        return len(self.find_processes(process)) + len(elsewhere)

    def note_processes(self) -> None:
        """Remember the run's processes on this machine, for `list_remains`."""
        self._seen |= {
            living for beat in beats.read_heartbeats(self._heartbeats).values() if (living := self._find_process(beat))
        }
        with suppress(psutil.NoSuchProcess):
            self._seen |= {*psutil.Process(self.driver.pid).children(recursive=True)}

    def list_remains(self, within_s: float) -> list[str]:
        """Kill and describe the processes that stay `within_s` after the end."""
        end = time.monotonic() + within_s
        while (remains := self._list_living()) and time.monotonic() < end:
            time.sleep(0.2)
        described = []
        for process in remains:
            with suppress(psutil.NoSuchProcess):
                described.append(" ".join(process.cmdline())[:100] or process.name())
                process.kill()
        return described

    def read_output(self) -> str:
        """Read what the current start has printed."""
        with self.output.open("rb") as file:
            file.seek(self._output_begin)
            return file.read().decode(errors="replace")

    def find_messages(self) -> list[str]:
        """Find the lines that say why the run has ended."""
        return [line for line in self.read_output().splitlines() if line.startswith(_MESSAGES)]

    def read_reason(self, within_s: float) -> str | None:
        """Read the reason in the summary, which may come late."""
        file, end = self.run_dir / SUMMARY_FILE, time.monotonic() + within_s
        while not file.exists() and time.monotonic() < end:
            time.sleep(POLL_S)
        return read_json(file).get("reason") if file.exists() else None

    def ask_to_end(self) -> None:
        """Let the run end after its step, as a person does."""
        (self.run_dir / STOP_FILE).touch()

    def end_by_force(self) -> None:
        """End a run that hangs."""
        if self.is_alive:
            self.driver.send_signal(signal.SIGCONT)
            self.driver.terminate()
            if not self.wait_for_end(END_S):
                self.driver.kill()
                self.driver.wait()

    def _find_process(self, beat: beats.Heartbeat) -> psutil.Process | None:
        """Find the living process of a heartbeat on this machine."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(beat.pid)
            # A process that was created after the last beat is another one with the same pid.
            is_same = beat.machine == beats.identify_machine() and process.create_time() <= beat.beat + 1.0
            return process if is_same and is_alive(process) else None
        return None

    def _list_living(self) -> set[psutil.Process]:
        """List the living processes of this start; processes may overwrite their environment."""
        living = {process for process in self._seen if is_alive(process)}
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                if process.environ().get(MARK) == self._mark and is_alive(process):
                    living.add(process)
        return living
