"""A tracker without a login is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo.config.schema import Config
from megatron_grpo.preflight import machine_checks
from megatron_grpo.preflight.machine_checks import find_login_problems

VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL", "NETRC")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(machine_checks, "_is_installed", lambda package: True)
    config = Config()
    config.logger.wandb.enabled = True
    return config


def test_wandb_without_a_login(config: Config) -> None:
    (problem,) = find_login_problems(config)
    assert problem.subject == "logger.wandb.enabled=True"
    assert "needs a login of api.wandb.ai" in problem.text
    config.logger.wandb.mode = "offline"
    assert not list(find_login_problems(config))


@pytest.mark.parametrize("setting", ["WANDB_API_KEY=abc", "WANDB_MODE=offline", "WANDB_MODE=disabled"])
def test_the_environment_has_a_login_or_needs_none(
    setting: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*setting.split("="))
    assert not list(find_login_problems(config))


def test_a_login_is_that_of_the_server(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password abc\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert not list(find_login_problems(config))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    (problem,) = find_login_problems(config)
    assert "wandb.example.org" in problem.text
