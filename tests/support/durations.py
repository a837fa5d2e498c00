"""A pytest plugin: seconds and CPU seconds of every file of tests, as one line of JSON a session.

`-p tests.support.durations` with the environment variable TEST_DURATIONS, the file that gets the line.
"""

import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CPU_S = "cpu_s"
"""Attribute of a test's last report: CPU seconds since the report before, of this process and all below it."""


def read_durations() -> dict[str, float]:
    """Read the seconds of each file from the last result that is kept; empty where there is none."""
    seconds: dict[str, float] = {}
    for result in sorted(RESULTS.glob("*_suite_durations.json"))[-1:]:
        for session in json.loads(result.read_text())["sessions"]:
            seconds |= {file: figures["seconds"] for file, figures in session["files"].items()}
    return seconds


def measure_cpu() -> float:
    """CPU seconds of this process and all that it has started; one that ended unwaited is missing."""
    seconds = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            seconds += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return seconds


class Measurement:
    """Marks reports in the process that runs the tests, and adds them up where they arrive."""

    def __init__(self) -> None:
        self.began, self.first_report = time.monotonic(), None
        self.cpu_s = measure_cpu()
        self.files: dict[str, dict[str, float]] = defaultdict(lambda: {"tests": 0, "seconds": 0.0, CPU_S: 0.0})
        self.tests: dict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Mark a test's last report."""
        report = yield
        if call.when == "teardown":
            cpu_s = measure_cpu()
            setattr(report, CPU_S, max(0.0, cpu_s - self.cpu_s))
            self.cpu_s = cpu_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a report to its file and its test."""
        if self.first_report is None:
            self.first_report = time.monotonic()
        file = self.files[report.nodeid.split("::")[0]]
        file["tests"] += report.when == "call"
        file["seconds"] += report.duration
        file[CPU_S] += getattr(report, CPU_S, 0.0)
        self.tests[report.nodeid] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the line, in the process that has all reports."""
        is_of_a_test = session.config.rootpath != RESULTS.parents[1]  # pytest that a test has started elsewhere
        if hasattr(session.config, "workerinput") or self.first_report is None or is_of_a_test:
            return
        wall_s = time.monotonic() - self.began
        longest = sorted(self.tests, key=lambda test: -self.tests[test])[:20]
        line = {
            "arguments": list(session.config.invocation_params.args),
            "exit_status": int(session.exitstatus),
            "wall_s": round(wall_s, 1),
            "until_first_report_s": round(self.first_report - self.began, 1),
            "files": {
                name: {key: round(value, 1) for key, value in file.items()}
                for name, file in sorted(self.files.items(), key=lambda entry: -entry[1]["seconds"])
            },
            "longest_tests": {test: round(self.tests[test], 1) for test in longest},
        }
        with Path(os.environ["TEST_DURATIONS"]).open("a") as lines:
            lines.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to measure."""
    config.pluginmanager.register(Measurement(), "durations")
