"""Our calls into Megatron-Core fit its installed version; `make cuda-check` does the same for all libraries."""

from __future__ import annotations

import pkgutil

import pytest

from megatron_grpo import models, planning, trainer
from tests.cuda import contracts


def test_calls_and_overridden_methods_fit_the_installed_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts, "LIBRARIES", ("megatron",))
    monkeypatch.setattr(contracts, "NCCL", "(none)")
    findings = contracts.Findings()
    for package in (models, planning, trainer):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            contracts.check_module(module.name, findings)
    assert findings.problems == []
    assert findings.checked > 60
