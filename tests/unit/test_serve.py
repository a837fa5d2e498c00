"""The command that starts a server: what it becomes, and what it refuses."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo import serve
from megatron_grpo.config.paths import TOKEN_VARIABLE
from megatron_grpo.generation.http_access import NAMES_VARIABLE
from megatron_grpo.generation.vllm_plugin import SERVER_MARKER


class Became(Exception):  # noqa: N818 - what happened, no error
    """The process has become another."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {"model": tmp_path}
    (tmp_path / "config.json").write_text("{}")

    def execve(program: str, arguments: list[str], environment: dict[str, str]) -> None:
        values.update(program=program, arguments=arguments, environment=environment)
        raise Became

    monkeypatch.setattr("os.execve", execve)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    return values


def test_it_listens_on_loopback_and_can_be_refitted(became: dict[str, Any]) -> None:
    with pytest.raises(Became):
        serve.main([str(became["model"]), "--port=8123", "--max-model-len", "64"])
    arguments = became["arguments"]
    module = "vllm.entrypoints.launchers.api_server.entry"
    assert arguments[:5] == [sys.executable, "-P", "-m", module, f"--model={became['model']}"]
    assert {"--host=127.0.0.1", "--port=8123", "--logprobs-mode=processed_logprobs"} <= set(arguments)
    assert arguments[arguments.index("--max-model-len") + 1] == "64"
    assert became["environment"][SERVER_MARKER] == became["environment"]["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize("option", ["--enable-return-routed-experts", "--enable_return_routed_experts"])
def test_on_a_cpu_our_worker_records_the_experts_that_it_returns(option: str, became: dict[str, Any]) -> None:
    for options, is_ours in (([option], True), ([], False)):
        with pytest.raises(Became):
            serve.main([str(became["model"]), "--port=8123", *options])
        worker = "--worker-cls=megatron_grpo.generation.cpu_worker.RecordingCPUWorker"
        assert ({worker, "--no-enable-prefix-caching", "--enforce-eager"} <= set(became["arguments"])) == is_ours


def test_it_makes_a_token_and_prints_it(became: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    tokens = set()
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(Became):
            serve.main([str(became["model"]), f"--host={host}"])
        token = became["environment"][TOKEN_VARIABLE]
        assert f"export {TOKEN_VARIABLE}={token} " in capsys.readouterr().out
        assert token not in " ".join(became["arguments"]), "others see the command line"
        tokens.add(token)
    assert min(map(len, tokens)) >= 32
    assert len(tokens) == 2


def test_a_token_that_is_given_is_kept(
    became: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with pytest.raises(Became):
        serve.main([str(became["model"]), "--host=0.0.0.0", "--name=vllm-0.svc", "--name=gpu"])
    assert became["environment"][TOKEN_VARIABLE] == "secret"
    assert became["environment"][NAMES_VARIABLE].split() == ["0.0.0.0", "vllm-0.svc", "gpu"]
    assert "secret" not in " ".join(became["arguments"]) + capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--logprobs-mode=raw_logprobs"], "--logprobs-mode=raw_logprobs: is set by this command"),
        (["--worker_extension_cls=x.Y"], "is set by this command"),
        (["--api-key", "x"], "is set by this command"),
        (["--trust_remote_code", "True"], "--trust-remote-code: code that comes with a model is never run"),
    ],
)
def test_what_is_its_own_is_refused(
    became: dict[str, Any], capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert serve.main([str(became["model"]), *arguments]) == 2
    assert text in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(
    became: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert serve.main([str(tmp_path / "nowhere")]) == 2
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "passed"),
    [
        (["--model", "{}", "--tensor_parallel_size", "8"], [], ["--tensor-parallel-size", "8"]),
        (["--model={}", "-tp", "2", "--allowed-origins", "a", "b"], [], ["-tp", "2", "--allowed-origins", "a", "b"]),
        (["--tensor-parallel-size=8", "{}"], [], ["--tensor-parallel-size=8"]),
        (["{}", "--model", "{}"], [], []),
        (["--host", "0.0.0.0", "{}"], ["--dtype", "bfloat16"], ["--dtype", "bfloat16"]),
        (["--model", "{}", "--enable_prefix_caching", "True"], ["--enforce_eager=False"], None),
        (["--model", "{}", "--vllm_model_impl", "vllm"], ["--log_level", "info"], None),
    ],
)
def test_the_model_is_a_word_or_an_option(
    became: dict[str, Any], before: list[str], after: list[str], passed: list[str] | None
) -> None:
    with pytest.raises(Became):
        serve.main([word.format(became["model"]) for word in before] + after)
    arguments = became["arguments"]
    assert [word for word in arguments if word.startswith("--model=")] == [f"--model={became['model']}"]
    words = [word for word in arguments[arguments.index("--port=8000") + 1 :] if word not in serve._RUN_OPTIONS]
    words = [word for word in words if "chunked-prefill" not in word and "batched-tokens" not in word]
    if passed is None:
        passed = {
            "--enforce_eager=False": ["--enable-prefix-caching", "--no-enforce-eager"],
            "--log_level": ["--model-impl", "vllm", "--uvicorn-log-level", "info"],
        }[after[0]]
    assert words == passed


def test_every_option_of_trls_server_is_one_of_vllm(became: dict[str, Any]) -> None:
    """TRL declares the options of its server; each reaches vLLM's parser under a name that it has."""
    from trl.scripts.vllm_serve import ScriptArguments
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    names = {option for action in parser._actions for option in action.option_strings}
    for field in dataclasses.fields(ScriptArguments):
        if field.name in ("model", "host", "port", "trust_remote_code"):
            continue
        value = "True" if "bool" in str(field.type) else "1"
        with pytest.raises(Became):
            serve.main(["--model", str(became["model"]), f"--{field.name}", value])
        arguments = became["arguments"]
        passed = arguments[arguments.index("--port=8000") + 1 :]
        options = [word.partition("=")[0] for word in passed if word.startswith("--")]
        assert set(options) <= names, field.name
        assert ("True" in passed) is False, f"--{field.name} is a switch of vLLM"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "the model is missing: write it first (python -m megatron_grpo.serve MODEL) or as --model=MODEL"),
        (["--tensor-parallel-size", "8"], "the model is missing"),
        (["--enforce-eager", "some/model"], "the model is missing"),
        (["a/b", "--model", "c/d"], "a server has one model, and these are 2: a/b, c/d; keep one"),
        (["--model=a/b", "--model=c/d"], "a server has one model, and these are 2: a/b, c/d; keep one"),
    ],
)
def test_a_server_has_one_model(
    became: dict[str, Any], capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert serve.main(arguments) == 2
    assert text in capsys.readouterr().err
