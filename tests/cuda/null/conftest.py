"""Every test here runs in a fork of a process that has imported everything, on the device whose kernels do nothing.

Process groups, Megatron-Core's state and CUDA's allocator belong to a process, so each test needs a new one, and
imports take longer than a test.
"""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_grpo.models.families import FAMILIES
from tests.cuda.null import kernels
from tests.cuda.null.trial import make_model

LIMIT_S = 500
"""Seconds of a test. On an idle machine it takes a few, or half a minute where vLLM looks at a model's class."""


@pytest.fixture(scope="session", autouse=True)
def _device() -> None:
    """The stand-in device, and what a test would otherwise import."""
    assert torch.cuda.is_available(), "run by: python -m tests.cuda"
    torch.cuda._is_in_bad_fork = lambda: False  # a fork of this process has as good a device as this process
    kernels.replace()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool:
    """Run a test in a fork; its failure is reported by the text of its traceback."""
    report = Path(pyfuncitem.config.cache.mkdir("cuda-check")) / f"failure-{os.getpid()}.txt"
    report.unlink(missing_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if not child:
        _run(pyfuncitem, report)
    _, status = os.waitpid(child, 0)
    if report.exists():
        pytest.fail(report.read_text(), pytrace=False)
    if status:
        pytest.fail(f"the test's process ended with status {status}", pytrace=False)
    return True


def _run(item: pytest.Function, report: Path) -> None:
    """Run a test in this process, which ends with it."""
    faulthandler.dump_traceback_later(LIMIT_S - 5)
    signal.alarm(LIMIT_S)
    status = 0
    try:
        item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
    except BaseException:  # noqa: BLE001 - the parent reports it
        text = str(pytest.ExceptionInfo.from_current().getrepr(style="short"))
        report.write_text(text)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a small random model, by family; each is made once."""
    folder = tmp_path_factory.mktemp("models")

    @cache
    def make_family(family: str) -> Path:
        return make_model(family, folder / family)

    for family in FAMILIES:  # before any test forks
        make_family(family)
    return make_family
