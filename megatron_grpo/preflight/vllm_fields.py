"""Checks of the arguments that users pass on to vLLM: names and types, and that the run leaves them free."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_grpo.config.errors import Problem, shown
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.passed_values import refusal, writable
from megatron_grpo.preflight.vllm_owned import OWNED
from megatron_grpo.preflight.vllm_source import settings_of, vllm_arguments

_PREFIX = "generation.engine_args"


def vllm_argument_problems(config: Config) -> Iterator[Problem]:
    """Arguments in generation.engine_args that the installed vLLM does not have, whose values are of another type, or
    which the run sets itself."""
    for name, value in config.generation.engine_args.items():
        text = _refusal(str(name), value)
        if text is not None:
            yield Problem(f"{_PREFIX}.{name}={shown(value)}", text)


def _refusal(name: str, value: Any) -> str | None:
    """Why an argument is not passed on; None: it is."""
    if name in OWNED:
        return f"is set by the run itself: {OWNED[name]}"
    try:
        arguments = vllm_arguments()
    except ModuleNotFoundError:
        return "cannot be checked: vLLM is not installed here"
    if name not in arguments:
        return f"is no argument of the installed vLLM{_meant(name, set(arguments) - set(OWNED), f'{_PREFIX}.')}"
    kind = arguments[name]
    if not writable(kind):
        return "takes an object of vLLM, which a configuration cannot hold"
    return refusal(kind, value) or _unknown_setting(name, value)


def _unknown_setting(argument: str, value: Any) -> str | None:
    """What is wrong with the names of a mapping; None: they are those of the argument."""
    known = settings_of(argument)
    if known is None or not isinstance(value, Mapping):
        return None
    wrong = next((name for name in value if name not in known), None)
    if wrong is None:
        return None
    return f"has {wrong}, which is no setting of it{_meant(str(wrong), set(known), '')}"


def _meant(name: str, known: set[str], prefix: str) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""
