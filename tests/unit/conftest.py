"""Coroutines as tests, one thread of torch, a model and rows of a run, and recipes that are composed once."""

import asyncio
import inspect
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How fast a machine is beside other work says nothing about what a property test looks at.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A call of Ray would otherwise start a cluster, or join one that another test left and wait for it.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

COMPOSED_WHOLE = ("test_composed_once.py", "test_job.py", "test_overrides.py")
"""Files whose command lines go through Hydra whole, as a user's do."""


def pytest_collection_finish() -> None:
    """Compute tests in one thread, which is faster on small tensors."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from tests.support.config_problems import SMALL, write_weights

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMALL))
    write_weights(folder / "model.safetensors", SMALL)
    (folder / "tokenizer.json").touch()
    return folder


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i)}) + "\n" for i in range(40)))
    return file


@pytest.fixture
def base_overrides(model: Path, rows: Path, tmp_path: Path) -> list[str]:
    """The least that a run needs."""
    return [f"policy.model.path={model}", f"data.train_path={rows}", f"run_dir={tmp_path / 'run'}"]


@pytest.fixture(autouse=True)
def as_if_torchvision_were_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes of models that need it for vLLM are valid on machines whose index lacks it, too."""
    from megatron_grpo.preflight import engine_checks

    monkeypatch.setattr(engine_checks, "find_spec", lambda name: object())


@pytest.fixture(autouse=True)
def composed_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose a choice of recipe and options once a process, in the other files."""
    from omegaconf import base

    from megatron_grpo.config import compose
    from tests.support.composed_once import compose_with_settings, parse_once

    if request.path.name not in COMPOSED_WHOLE:
        monkeypatch.setattr(compose, "compose", compose_with_settings)
        monkeypatch.setattr(base, "parse", parse_once)
