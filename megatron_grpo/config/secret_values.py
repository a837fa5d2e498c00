"""Secrets of a run: named by their environment variables, refused in the configuration."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from typing import Any

from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.hiding import HIDDEN, hide_secrets, hide_values
from megatron_grpo.config.keys import flatten
from megatron_grpo.config.paths import TOKEN_VARIABLE
from megatron_grpo.config.schema import Config

_BY_NAME = "name its environment variable in {section}.api_key_variable"
# What to do with a secret instead, by the beginning of its key.
_ADVICE = {
    r"generation\.server\.urls": f"set {TOKEN_VARIABLE} in the environment",
    r"teachers?\.(.+\.)?server_url": _BY_NAME,
    r"logger\.mlflow\.tracking_uri": "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
    "MLFLOW_TRACKING_TOKEN, in the environment; a database has to be behind an MLflow server",
    r"checkpointing\.upload_to": "the storage's package reads its own variables, such as AWS_PROFILE",
    r"logger\.otlp_endpoint": "set OTEL_EXPORTER_OTLP_HEADERS in the environment",
    r"generation\.engine_args\.hf_token": "set HF_TOKEN in the environment",
    r"env\..+\.url": _BY_NAME,
    r"env\..+\.command": "name the environment variables that the program needs in {section}.variables",
    r"env\.": "let the environment read an environment variable, and give the name of that",
    r"": "keep it in the environment",
}
# Texts that the model reads or writes, which may speak of addresses.
_PROSE = re.compile(r".*\.system_prompt|generation\.(structured\..+|stop_strings|bad_words)")
# Sections whose keys a library or a class names.
_FREE = (".options.", ".engine_args.", ".megatron.", ".ddp.", ".megatron_optimizer.", ".chat_template_kwargs.")
_VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*")


def read_secret(variable: str, key: str) -> str:
    """Read a secret from the environment; ValueError: there is none."""
    secret = os.environ.get(variable, "").strip()
    if not secret:
        text = "the environment has no such variable; export it where the run is started"
        raise ValueError(f"{key}={variable}: {text}")
    return secret


def make_authorization(variable: str, key: str) -> dict[str, str]:
    """Make the header with an API key.

    ValueError: there is none, or a header cannot hold it.
    """
    secret = read_secret(variable, key)
    if not (secret.isascii() and secret.isprintable()):  # libraries would repeat it in their errors
        raise ValueError(f"{key}={variable}: its content cannot be sent: it has line breaks or other than ASCII signs")
    return {"Authorization": f"Bearer {secret}"}


def find_secret_problems(config: Config) -> Iterator[Problem]:
    """Report secrets in the configuration, which files and messages would show."""
    for key, value in flatten(dataclasses.asdict(config)):
        section, _, name = key.rpartition(".")
        texts = [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]
        if name.endswith("_variable") or (name == "variables" and ".options." in key):
            if not all(_VARIABLE_NAME.fullmatch(text) and hide_secrets(text) == text for text in texts):
                text = "must be the name of an environment variable that holds the secret, not the secret itself"
                yield Problem(f"{key}={HIDDEN}", text)
        elif _holds_secret(key, value, texts):
            advice = next(advice for pattern, advice in _ADVICE.items() if re.match(pattern, key))
            text = "holds a password or token, which the files of the run would show; leave it out, and "
            yield Problem(f"{key}={to_text(hide_values(value, name))}", text + advice.format(section=section))


def _holds_secret(key: str, value: Any, texts: list[str]) -> bool:
    if _PROSE.fullmatch(key):
        return False
    if any(part in key for part in _FREE):
        # A command is read as a whole, because `--api-key VALUE` is two words.
        command = " ".join(texts)
        return hide_values(value, key.rpartition(".")[2]) != value or hide_secrets(command) != command
    return any(hide_secrets(text) != text for text in texts)
