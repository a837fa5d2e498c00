"""A pytest plugin: a run of tests in which every test was skipped fails, because it has shown nothing."""

import pytest


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Change the exit status of a run that skipped everything. Workers of xdist have no reporter and leave it alone."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or session.exitstatus != pytest.ExitCode.OK:
        return
    ran = sum(len(reporter.stats.get(outcome, ())) for outcome in ("passed", "xfailed", "xpassed"))
    if reporter.stats.get("skipped") and not ran:
        reporter.write_line("every test was skipped, so this run has shown nothing", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
