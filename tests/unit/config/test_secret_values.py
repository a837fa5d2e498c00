"""Secrets: refused in every key that takes an address, hidden in messages, read from the environment."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from megatron_grpo import command
from megatron_grpo.config.errors import Problem, RunError
from megatron_grpo.config.hiding import hide_secrets
from megatron_grpo.config.schema import Config
from megatron_grpo.config.secret_values import find_secret_problems, read_secret
from megatron_grpo.run.directory import override_values

SECRET = "s3cr3tvalue"
ADDRESSES = [f"http://me:{SECRET}@host:1", f"https://{SECRET}@host/v1", f"https://host/v1?api_key={SECRET}&x=1"]
KEYS = {
    "generation.server.urls": "[{}]",
    "teacher.server_url": "{}",
    "teachers.math.server_url": "{}",
    "logger.mlflow.tracking_uri": "{}",
    "cluster.ray_address": "{}",
    "policy.model.path": "{}",
    "data.train_path": "{}",
    "env.math.options.url": "{}",
    "env.math.options.servers": "{{x: {{url: {}}}}}",
    "env.math.options.servers.y.command": "[server, --address, {}]",
    "generation.engine_args.otlp_traces_endpoint": "{}",
}


@pytest.mark.parametrize("address", [json.dumps(address) for address in ADDRESSES])
@pytest.mark.parametrize("key", KEYS)
def test_every_address_with_a_secret_is_refused_and_hidden(key: str, address: str) -> None:
    config = override_values(asdict(Config()), [f"{key}={KEYS[key].format(address)}"], "file", is_trusted=True)
    (problem,) = find_secret_problems(config)
    assert problem.key.startswith(key)
    assert "holds a password or token" in problem.text
    assert SECRET not in problem.subject + problem.text


@pytest.mark.parametrize(
    "text",
    [
        *ADDRESSES,
        f"me:{SECRET}@host:6379",
        f"['server', '--api-key', '{SECRET}']",
        f"env API_KEY={SECRET} server",
        f"Authorization: Bearer {SECRET}",
        f"{{'api_key': '{SECRET}'}}",
        f"postgresql+psycopg://me:{SECRET}@db/mlflow",
    ],
)
def test_secrets_are_hidden_in_texts_problems_and_errors(text: str) -> None:
    assert SECRET not in hide_secrets(text)
    assert SECRET not in str(RunError(text)) + Problem(text, text).subject + Problem(text, text).text


@pytest.mark.parametrize(
    "text", ["http://host:8000/@me", "max_tokens=5", "sqlite:///a@b/x.db", "data.prompt_key=x", "package.module:Class"]
)
def test_other_texts_stay(text: str) -> None:
    assert hide_secrets(text) == text


def test_the_printed_configuration_and_its_problems_have_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["+exp=quickstart", f"generation.server.urls=['http://me:{SECRET}@host:1']", "--cfg", "job"]
    assert command.main(arguments) == 2
    printed = capsys.readouterr()
    assert SECRET not in printed.out + printed.err
    assert "set MEGATRON_GRPO_TOKEN in the environment" in printed.err


def test_a_secret_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    assert read_secret("JUDGE_KEY", "key") == SECRET
    with pytest.raises(ValueError, match="key=NO_SUCH: the environment has no such variable"):
        read_secret("NO_SUCH", "key")
