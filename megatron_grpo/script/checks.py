"""What is wrong with the objects that a script gives, said before anything is started."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.run.callbacks import Callback

_OF_A_TOKENIZER = ("__call__", "apply_chat_template", "decode", "eos_token_id")


def check_objects(rewards: Any, environments: Any, tokenizer: Any, callbacks: Any) -> None:
    """Look at what `train` was given, one reward function or callback already in a list of its own.

    Raises:
        ConfigError: some of it is of another kind than `train` takes.
    """
    problems = [
        *_reward_problems(rewards),
        *_environment_problems(environments),
        *_tokenizer_problems(tokenizer),
        *_callback_problems(callbacks),
    ]
    if problems:
        raise ConfigError(problems)


def _reward_problems(rewards: Any) -> Iterator[Problem]:
    kinds = "a function, its import path (package.module.name) or the folder of a reward model"
    if not isinstance(rewards, Sequence):
        yield Problem("rewards", f"is {_kind(rewards)}; give a list, each {kinds}")
        return
    for number, reward in enumerate(rewards):
        if not (isinstance(reward, str) or callable(reward)):
            yield Problem(f"rewards[{number}]", f"is {_kind(reward)}; give {kinds}")


def _environment_problems(environments: Any) -> Iterator[Problem]:
    if not isinstance(environments, Mapping):
        text = f"is {_kind(environments)}; give a mapping of task names to classes or types: {{'my_task': MyClass}}"
        yield Problem("environments", text)
        return
    for task, kind in environments.items():
        subject = f"environments[{task!r}]"
        if not isinstance(kind, str | type):
            name = type(kind).__name__
            text = f"is an object of {name}; give the class, and what it is made with in env.{task}.options"
            yield Problem(subject, text)
        elif isinstance(kind, type) and (kind.__module__ == "__main__" or not kind.__qualname__.isidentifier()):
            text = f"{kind.__qualname__} cannot be imported by the processes of the run; write it into a module"
            yield Problem(subject, text)


def _tokenizer_problems(tokenizer: Any) -> Iterator[Problem]:
    if tokenizer is None:
        return
    lacking = [name for name in _OF_A_TOKENIZER if not hasattr(tokenizer, name)]
    if lacking or inspect.isclass(tokenizer):
        text = (
            f"is {_kind(tokenizer)}; give a tokenizer that is loaded: transformers.AutoTokenizer.from_pretrained(...)"
        )
        yield Problem("tokenizer", text)


def _callback_problems(callbacks: Any) -> Iterator[Problem]:
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        text = f"is {_kind(callbacks)}; give a list of objects of classes that extend megatron_grpo.Callback"
        yield Problem("callbacks", text)
        return
    for number, callback in enumerate(callbacks):
        if isinstance(callback, type) and issubclass(callback, Callback):
            text = f"is the class {callback.__name__}; give an object of it: {callback.__name__}()"
            yield Problem(f"callbacks[{number}]", text)
        elif not isinstance(callback, Callback):
            text = f"is {_kind(callback)}; give an object of a class that extends megatron_grpo.Callback"
            yield Problem(f"callbacks[{number}]", text)


def _kind(value: Any) -> str:
    """What a message calls a value."""
    return f"the class {value.__name__}" if inspect.isclass(value) else type(value).__name__
