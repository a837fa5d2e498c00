"""Fixtures that several kinds of tests share."""

from __future__ import annotations

import pytest

from tests.support.tiny_models import BUILDERS, TinyModel, make_tiny_model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    """Every tiny model, by name."""
    folder = tmp_path_factory.mktemp("tiny_models")
    return {name: make_tiny_model(name, folder) for name in BUILDERS}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a run of tests in which every test was skipped: it has shown nothing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.exitstatus != pytest.ExitCode.OK:  # a worker of xdist has no reporter
        return
    ran = sum(len(reporter.stats.get(outcome, ())) for outcome in ("passed", "xfailed", "xpassed"))
    if reporter.stats.get("skipped") and not ran:
        reporter.write_line("every test was skipped, so this run has shown nothing", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
