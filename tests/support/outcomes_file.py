"""A pytest plugin: writes each test's start and outcome into a file at once, so that a killed run has told of both."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

OUTCOMES = "PYTEST_OUTCOMES_FILE"
"""Environment variable: the file, one JSON object a line."""


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid, outcome="started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        numbers = {"numbers": dict(report.user_properties)} if report.user_properties else {}
        _write(test=report.nodeid, outcome=report.outcome, seconds=report.duration, why=_reason(report), **numbers)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if not report.passed:
        _write(test=report.nodeid, outcome=report.outcome, seconds=0.0, why=_reason(report))


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped, or the message of its failure; "" if it passed."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(report.longrepr if crash is None else crash.message)[-2000:]


def _write(**values: Any) -> None:
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps(values) + "\n")
