"""What a user's own processor returns, in the form that the processors here give."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from megatron_grpo.data.interfaces import REFERENCE, DatumSpec, Message, TaskDataSpec
from megatron_grpo.data.rows import is_conversation

_REQUIRED = ("message_log", "extra_env_info", "loss_multiplier")
"""Keys of a DatumSpec that only the processor knows."""


def in_our_form(
    given: Any, row: dict[str, Any], spec: TaskDataSpec, *, task: str, tasks: Container[str], idx: int
) -> DatumSpec:
    """The prompt that a processor returned: this project's DatumSpec, or NeMo RL's, which has no `prompt`.

    Args:
        given: what it returned; tokens may be tensors or arrays.
        row: the row it was made of.
        spec: names of the row's columns.
        task: the row's task, for a prompt that names none.
        tasks: those that there are.
        idx: the number that the prompt is known by.

    Returns:
        The prompt. Without a `prompt` it has the row's, or the text of the messages; without a reference answer it has
        NeMo RL's extra_env_info.ground_truth, or the row's.

    Raises:
        ValueError: a key is missing or holds something else; the reason begins with what the processor did.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"returned {type(given).__name__}, not a DatumSpec")
    for key in _REQUIRED:
        if key not in given:
            raise ValueError(f"returned no {key}, only {', '.join(map(str, given)) or 'an empty DatumSpec'}")
    messages = _messages(given["message_log"])
    length, counts = sum(len(message["token_ids"]) for message in messages), _multiplier(given["loss_multiplier"])
    if counts and not length:
        raise ValueError("returned a message_log without tokens")
    name = task if given.get("task_name") is None else given["task_name"]
    if not isinstance(name, str) or name not in tasks:
        raise ValueError(f"returned task_name={name!r}, which is no environment")
    return DatumSpec(
        message_log=messages,
        length=length,
        extra_env_info=_for_environment(given["extra_env_info"], row, spec),
        loss_multiplier=counts,
        idx=idx,
        task_name=name,
        prompt=_prompt(given.get("prompt"), row.get(spec.prompt_key), messages),
    )


def _multiplier(given: Any) -> float:
    """A loss_multiplier: 0 or 1."""
    try:
        multiplier = float(given)
    except (TypeError, ValueError, RuntimeError):  # the last of a tensor of several numbers
        multiplier = -1.0
    if multiplier not in (0.0, 1.0):
        raise ValueError(f"returned loss_multiplier={given!r}: a prompt is left out (0) or counts like others (1)")
    return multiplier


def _messages(log: Any) -> list[Message]:
    """The messages, their tokens as lists."""
    if not isinstance(log, list | tuple):
        raise ValueError(f"returned {type(log).__name__} as message_log, not a list of messages")
    messages: list[Message] = []
    for number, message in enumerate(log):
        place = f"message_log[{number}]"
        if not isinstance(message, Mapping) or "token_ids" not in message:
            raise ValueError(f"returned no token_ids in {place}")
        tokens = message["token_ids"]
        tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        if not isinstance(tokens, list | tuple) or not all(type(token) is int for token in tokens):
            raise ValueError(f"returned {place}.token_ids that are no flat list of token numbers")
        role, content = str(message.get("role", "user")), str(message.get("content", ""))
        messages.append(Message(role=role, content=content, token_ids=list(tokens)))
    return messages


def _for_environment(given: Any, row: dict[str, Any], spec: TaskDataSpec) -> dict[str, Any]:
    """What the environment is told, with the reference answer where there is one."""
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"returned {type(given).__name__} as extra_env_info, not a dict")
    extra = dict(given or {})
    column = None if spec.answer_key is None else row.get(spec.answer_key)
    answer = extra["ground_truth"] if extra.get("ground_truth") is not None else column
    if REFERENCE in extra or spec.answer_key is None or answer is None:
        return extra
    return {"answer": answer, **extra, REFERENCE: str(answer)}


def _prompt(given: Any, column: Any, messages: list[Message]) -> str | list[dict[str, str]]:
    """The prompt as people and reward functions see it."""
    if given is not None and not isinstance(given, str) and not is_conversation(given):
        raise ValueError(f"returned {type(given).__name__} as prompt, neither a text nor a list of {{role, content}}")
    for one in (given, column):
        if one is not None and (isinstance(one, str) or is_conversation(one)):
            found: str | list[dict[str, str]] = one
            return found
    return "".join(message["content"] for message in messages)
