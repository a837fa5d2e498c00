"""Secrets: refused in every key that takes a text, hidden wherever one is shown, read from the environment."""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from megatron_grpo import command, doctor, evaluate, export, replay
from megatron_grpo.cluster.process_log import RecordFormatter
from megatron_grpo.config.conversion import convert_values
from megatron_grpo.config.errors import ConfigError, Problem, RunError
from megatron_grpo.config.hiding import hide_secrets
from megatron_grpo.config.keys import build_values, read_keys
from megatron_grpo.config.schema import Config
from megatron_grpo.config.secret_values import find_secret_problems, read_secret
from megatron_grpo.observability.page.write import render_report
from megatron_grpo.observability.trackers import MlflowTracker, SwanlabTracker, TensorBoardTracker, WandbTracker
from megatron_grpo.preflight import load
from megatron_grpo.run.directory import override_values
from tests.support.text_keys import can_hold_text, fit_text, name_key, names_code

SECRET = "s3cr3tvalue"
ADDRESSES = [
    *(f"http://me:{SECRET}@host:1", f"https://{SECRET}@host/v1", f"https://host/v1?api_key={SECRET}&x=1"),
]
OTHER_ADDRESSES = [
    *(f"wss://me:{SECRET}@[::1]:8000/ws", f"HTTP://:{SECRET}@host", f"me:{SECRET}@host:8000/v1", f"//me:{SECRET}@host"),
    f"s3://key:{SECRET}/+x@bucket/rows.jsonl",
]
TOKENS = [f"hf_{SECRET * 3}", f"sk-{SECRET * 3}", f"a name with api_key={SECRET}"]
PROSE = {
    *("data.system_prompt", "data.tasks.<name>.system_prompt", "generation.bad_words", "generation.stop_strings"),
    *("generation.structured.choice", "generation.structured.regex", "generation.structured.json_schema"),
}
"""Keys with texts that the model reads or writes, which may speak of addresses."""
TEXTS = {key: read_keys()[key].type for key in filter(can_hold_text, read_keys()) if not names_code(key)}
OPTIONS = {
    "env.judge.options.url": "{}",
    "env.openenv.options.url": "{}",
    "env.tools.options.servers": "{{x: {{url: {}}}}}",
    "env.tools.options.servers.y.command": "[server, --address, {}]",
    "env.mine.options.clients": "[{{address: {}}}]",
    "env.verifiers.options.arguments": "{{client: {}}}",
    "teachers.math.server_url": "{}",
}


def list_settings(text: str) -> Iterator[tuple[str, str]]:
    """Settings that put a text into every key that can hold one."""
    for key, kind in TEXTS.items():
        yield name_key(key), json.dumps(fit_text(kind, text))
    for key, form in OPTIONS.items():
        yield key, form.format(json.dumps(text))


@pytest.mark.parametrize("text", [*ADDRESSES, *TOKENS])
def test_every_text_with_a_secret_is_refused_and_hidden(text: str) -> None:
    assert {"logger.mlflow.tracking_uri", "teacher.server_url", "cluster.ray_address", "run_dir"} < TEXTS.keys()
    missed = []
    for name, value in list_settings(text):
        config = Config()
        with suppress(ConfigError):  # it is no value of such a key
            config = override_values(build_values(Config()), [f"{name}={value}"], "file", is_trusted=True)
        problems = list(find_secret_problems(config))
        for problem in problems:
            assert problem.key.startswith(name)
            assert "holds a password or token" in problem.text or "not the secret itself" in problem.text
            assert SECRET not in problem.subject + problem.text
        missed += [] if problems else [name]
    assert set(missed) == {name_key(key) for key in PROSE} | {"checkpointing.push_to_hub"}  # the name of a repository


@pytest.mark.parametrize("key", filter(names_code, read_keys()))
@pytest.mark.parametrize("text", [*ADDRESSES, *TOKENS])
def test_an_import_path_holds_no_secret(key: str, text: str) -> None:
    values: dict[str, Any] = build_values(Config())
    *sections, last = name_key(key).split(".")
    functools.reduce(lambda node, name: node.setdefault(name, {}), sections, values)[last] = text
    _, (problem,) = convert_values(values, "grpo")
    assert problem.key == name_key(key)
    assert SECRET not in str(problem)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A run of an earlier version, which recorded secrets wherever a text can be."""
    values: dict[str, Any] = build_values(Config())
    for number, (name, value) in enumerate(list_settings(ADDRESSES[0].replace(SECRET, "SECRET"))):
        *sections, last = name.split(".")
        node = values
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = yaml.safe_load(value.replace("SECRET", f"{SECRET}{number}"))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "starts.jsonl").write_text("")
    (tmp_path / "metrics.jsonl").write_text("")
    assert (tmp_path / "config.yaml").read_text().count(SECRET) >= len(TEXTS)
    return tmp_path


def test_neither_page_nor_printed_configuration_nor_errors_show_a_recorded_secret(
    planted: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(planted)
    monkeypatch.setattr(load, "_check_machine", lambda checked, rewards, reach: None)
    page = render_report([planted])
    assert "tracking_uri" in page
    checkpoint = planted / "checkpoints" / "step_1"
    (checkpoint / "megatron").mkdir(parents=True)
    for main, arguments in (
        (command.main, [f"run_dir={planted}", "trust_run=true", "--cfg", "job"]),
        (command.main, [f"run_dir={planted}", "--check"]),
        (doctor.main, [str(planted)]),
        (replay.main, [str(planted), "step=1"]),
        (evaluate.main, [f"checkpoint={checkpoint}", "output=out"]),
        (export.main, [f"checkpoint={checkpoint}", "output=out"]),
    ):
        assert main(arguments) == 2
    printed = capsys.readouterr()
    assert "***" in printed.err
    changes = hide_secrets(ADDRESSES[0])
    assert SECRET not in page + printed.out + printed.err + changes


def test_trackers_get_no_secret(planted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects that are given to their packages; SwanLab's is not among the packages of the tests."""
    config = Config()
    for name, value in list_settings(ADDRESSES[0]):
        if not name.startswith(("run_dir", "logger.")):
            with suppress(ConfigError):
                config = override_values(build_values(config), [f"{name}={value}"], "file", is_trusted=True)
    assert str(build_values(config)).count(SECRET) > len(TEXTS) / 2
    settings: list[Any] = []

    class Package(ModuleType):
        """A package that keeps whatever it is called with."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self

        def __call__(self, *values: Any, **named: Any) -> Any:
            settings.append((values, named))
            return self

        def __getitem__(self, index: object) -> Any:
            return self

        def __contains__(self, name: object) -> bool:
            return False

    class FailureError(Exception):
        pass

    for name in ("wandb", "mlflow", "mlflow.exceptions", "swanlab", "swanlab.exceptions", "torch.utils.tensorboard"):
        package = Package(name)
        for failure in ("ApiError", "AuthenticationError", "MlflowException", "Error"):
            setattr(package, failure, FailureError)
        package.errors = SimpleNamespace(Error=FailureError)  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, package)
    WandbTracker(planted, config)
    MlflowTracker(planted, config)
    SwanlabTracker(planted, config)
    TensorBoardTracker(planted, None)
    assert "tracking_uri" in str(settings)
    assert SECRET not in str(settings)


def test_a_log_shows_no_secret() -> None:
    try:
        raise OSError(f"cannot connect to {ADDRESSES[0]}")
    except OSError:
        record = logging.LogRecord("a", logging.INFO, __file__, 1, f"at {ADDRESSES[2]}", None, sys.exc_info())
    text = RecordFormatter("%(message)s").format(record)
    assert "cannot connect to http://***@host:1" in text
    assert SECRET not in text


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "_",
        "a_",
        "-",
        "--a-",
        "a.",
        "://",
        "://a",
        "://a:",
        "://a:b@",
        "?a.",
        "A_",
        "api_key",
        "bearer ",
        "x.x-",
        ":",
    ],
)
def test_a_text_of_a_hundred_thousand_characters_is_looked_through_in_time(piece: str) -> None:
    began = time.process_time()
    hide_secrets(piece * (100_000 // len(piece)))
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    "text",
    [
        *ADDRESSES,
        *OTHER_ADDRESSES,
        f"me:{SECRET}@host:6379",
        f"['server', '--api-key', '{SECRET}']",
        f"env API_KEY={SECRET} server",
        f"Authorization: Bearer {SECRET}",
        f"{{'api_key': '{SECRET}'}}",
        f"postgresql+psycopg://me:{SECRET}@db/mlflow",
        str(Path(ADDRESSES[0])),
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
