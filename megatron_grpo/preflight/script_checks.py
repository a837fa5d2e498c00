"""Checks of the arguments of `megatron_grpo.train`, with advice for those of TRL."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_grpo.config.errors import Problem, to_text
from megatron_grpo.config.keys import load_tables
from megatron_grpo.config.suggestions import describe_counterpart
from megatron_grpo.run.user_objects import Callback

# Parts of messages.
_REWARDS = "a function, its import path (package.module.name) or the folder of a reward model"
_CALLBACKS = "an object of a class that extends megatron_grpo.Callback, such as MyCallback()"
_CONFIG = "give overrides as on the command line (['+exp=quickstart', 'grpo.max_num_steps=3']), a mapping, or a Config"
_SAVED = "write it and its tokenizer into a folder with save_pretrained, and give the folder"
_ARGUMENTS = (
    *("config", "train_dataset", "val_dataset", "rewards", "environments"),
    *("tokenizer", "processor", "callbacks"),
)
_INTERFACE = "megatron_grpo.environments.interface.Environment"

# Advice for arguments of TRL's GRPOTrainer that are no settings, by name.
_ADVICE = load_tables("script_arguments.yaml")["arguments"]


def find_argument_problems(
    config: Any, rewards: Any, environments: Any, tokenizer: Any, callbacks: Any, *, unknown: Mapping[str, Any]
) -> list[Problem]:
    """Check arguments of `train`, and report those that it lacks (`unknown`)."""
    problems = [Problem(name, f"no such argument; {_advise(name, value)}") for name, value in unknown.items()]
    if config is None and "args" not in unknown:
        problems.append(Problem("config", f"is missing; {_CONFIG}"))
    # A TRL configuration may be passed under either name; its changed fields have counterparts among our keys.
    for name, value in (("config", config), ("args", unknown.get("args"))):
        problems += _find_foreign_settings(name, value)
    problems += _find_list_problems("rewards", rewards, _find_reward_problem, _REWARDS)
    problems += _find_environment_problems(environments)
    problems += _find_tokenizer_problems(tokenizer)
    problems += _find_list_problems("callbacks", callbacks, _find_callback_problem, _CALLBACKS)
    return problems


def _advise(name: str, value: Any) -> str:
    if name == "model" and _is_pretrained(value):
        return f"TRL's model is policy.model.path in config; {_SAVED}"
    if name in _ADVICE:
        return _ADVICE[name]
    setting = describe_counterpart(name, "grpo")
    if setting is not None:
        return f"settings are in config; {setting}"
    close = difflib.get_close_matches(name, _ARGUMENTS, n=1)
    return f"did you mean {close[0]}?" if close else f"there is {', '.join(_ARGUMENTS)}; settings are in config"


def _find_foreign_settings(name: str, arguments: Any) -> Iterator[Problem]:
    """Report changed fields of a TRL or transformers configuration, with our keys."""
    kind = type(arguments)
    if not dataclasses.is_dataclass(arguments) or kind.__module__.partition(".")[0] not in ("trl", "transformers"):
        return
    if name == "config":
        yield Problem(name, f"is {kind.__name__}; {_CONFIG}")
    device = {field: getattr(arguments, field) for field in ("use_cpu", "bf16") if hasattr(arguments, field)}
    try:
        # Without these fields transformers raises on a machine without GPUs.
        defaults = kind(**device)
    except Exception:  # noqa: BLE001 - another library's class may refuse its own defaults on this machine
        return
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name, None)
        if isinstance(value, bool | int | float | str) and value != getattr(defaults, field.name, None):
            advice = describe_counterpart(field.name, "grpo")
            if advice is not None:
                yield Problem(f"{name}.{field.name}={to_text(value)}", advice)


def _is_pretrained(value: Any) -> bool:
    """True for models and tokenizers of transformers and PEFT, and their classes."""
    return hasattr(value, "save_pretrained") or hasattr(value, "from_pretrained")


def _find_reward_problem(reward: Any) -> str | None:
    if _is_pretrained(reward):
        text = f"is {_describe_kind(reward)}, and reward models are given by their folder; {_SAVED}:"
        text += " rewards=['./FOLDER']"
        return text
    return None if isinstance(reward, str) or callable(reward) else f"is {_describe_kind(reward)}; give {_REWARDS}"


def _find_callback_problem(callback: Any) -> str | None:
    return None if isinstance(callback, Callback) else f"is {_describe_kind(callback)}; give {_CALLBACKS}"


def _find_list_problems(name: str, members: Any, check: Callable[[Any], str | None], kinds: str) -> Iterator[Problem]:
    """Check an argument that is one object or a list."""
    if isinstance(members, Sequence) and not isinstance(members, str):
        for number, member in enumerate(members):
            text = check(member)
            if text is not None:
                yield Problem(f"{name}[{number}]", text)
    elif members is not None and (text := check(members)) is not None:
        list_text = f"is {_describe_kind(members)}; give a list, each {kinds}"
        yield Problem(name, text if _is_pretrained(members) else list_text)


def _find_environment_problems(environments: Any) -> Iterator[Problem]:
    if environments is None:
        return
    if not isinstance(environments, Mapping):
        text = "give a mapping of task names to classes or types: {'my_task': MyClass}"
        yield Problem("environments", f"is {_describe_kind(environments)}; {text}")
        return
    for task, kind in environments.items():
        subject = f"environments[{task!r}]"
        # Ray's actor classes and handles are known by their module, since Ray is not imported here.
        if any(base.__module__.partition(".")[0] == "ray" for base in type(kind).__mro__):
            text = f"is a Ray actor, and the run starts the processes of environments itself (env.{task}.num_workers);"
            text += f" give a class of {_INTERFACE} without ray.remote (docs/python.md)"
            yield Problem(subject, text)
        elif not isinstance(kind, str | type):
            text = f"give the class, and what it is made with in env.{task}.options"
            yield Problem(subject, f"is an object of {type(kind).__name__}; {text}")
        elif isinstance(kind, type) and (kind.__module__ == "__main__" or not kind.__qualname__.isidentifier()):
            text = f"{kind.__qualname__} cannot be imported by the processes of the run; write it into a module"
            yield Problem(subject, text)


def _find_tokenizer_problems(tokenizer: Any) -> Iterator[Problem]:
    members = ("__call__", "apply_chat_template", "decode", "eos_token_id")
    is_loaded = not inspect.isclass(tokenizer) and all(hasattr(tokenizer, name) for name in members)
    if tokenizer is None or is_loaded:
        return
    text = "give a loaded tokenizer: transformers.AutoTokenizer.from_pretrained(...)"
    if hasattr(tokenizer, "tokenizer"):
        text = "give it as processor"
    yield Problem("tokenizer", f"is {_describe_kind(tokenizer)}; {text}")


def find_processor_problems(processor: Any) -> Iterator[Problem]:
    """Check the argument `processor` of `train` and `setup`."""
    has_parts = all(hasattr(processor, name) for name in ("tokenizer", "image_processor"))
    if processor is not None and (inspect.isclass(processor) or not has_parts):
        text = "give a loaded processor of images and text: transformers.AutoProcessor.from_pretrained(...)"
        yield Problem("processor", f"is {_describe_kind(processor)}; {text}")


def _describe_kind(value: Any) -> str:
    return f"the class {value.__name__}" if inspect.isclass(value) else type(value).__name__
