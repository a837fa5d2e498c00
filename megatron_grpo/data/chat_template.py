"""Renders conversations by a model's chat template, within a deadline."""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import Any

from jinja2.sandbox import SandboxedEnvironment

from megatron_grpo.config.errors import ResponseError, RunError


class _Overdue(Exception):  # noqa: N818
    """The deadline has passed; raised in the thread that renders."""


class _DeadlineThread:
    """A thread that raises `_Overdue` in threads whose deadline has passed."""

    # Nothing else can stop a template: signals reach only the main thread, and starting a thread for each conversation
    # would take longer than rendering it.

    def __init__(self) -> None:
        self._ends: dict[int, float] = {}
        self._lock = threading.Lock()  # not a Condition, whose Python code an exception may leave with the lock held
        self._has_deadline = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def deadline(self, seconds: float) -> Iterator[None]:
        """Raise `_Overdue` in the body after this time; it may not catch it."""
        thread = threading.get_ident()
        with self._lock:
            if self._thread is None or not self._thread.is_alive():  # not yet started, or left behind by a fork
                self._thread = threading.Thread(target=self._run, name="chat-template-deadline", daemon=True)
                self._thread.start()
            self._ends[thread] = time.monotonic() + seconds
            if len(self._ends) == 1:
                self._has_deadline.set()
        try:
            yield
        finally:
            with self._lock:
                if self._ends.pop(thread, None) is None:  # raised, and perhaps not yet delivered
                    _raise_in(thread, None)

    def _run(self) -> None:
        while True:
            # Exceptions are sent under the lock, so that a body that ends at that moment can still withdraw its own.
            with self._lock:
                self._has_deadline.clear()
                now = time.monotonic()
                for thread in [thread for thread, end in self._ends.items() if end <= now]:
                    del self._ends[thread]
                    _raise_in(thread, _Overdue)
                nearest = min(self._ends.values(), default=None)
            self._has_deadline.wait(None if nearest is None else max(nearest - now, 0.01))


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    """Raise an exception in another thread; None: withdraw it."""
    # Python itself offers this only to C code.
    argument = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), argument)


_deadlines = _DeadlineThread()

LARGEST = 10**6  # most bits of a number, and characters of a text, that * or ** may make in a template


def _multiply(first: Any, second: Any) -> Any:
    bits = [factor.bit_length() for factor in (first, second) if isinstance(factor, int)]
    if len(bits) == 2 and sum(bits) > LARGEST:
        raise OverflowError(f"a number in the template has more than {LARGEST} bits")
    for repeated, times in ((first, second), (second, first)):
        if isinstance(repeated, Sized) and isinstance(times, int) and len(repeated) * times > LARGEST:
            raise OverflowError(f"a text in the template has more than {LARGEST} characters")
    return first * second


def _raise_to_power(first: Any, second: Any) -> Any:
    if isinstance(first, int) and isinstance(second, int) and first.bit_length() * second > LARGEST:
        raise OverflowError(f"a number in the template has more than {LARGEST} bits")
    return first**second


# A huge product or power takes forever in C code, which no exception interrupts. Set on the class, because transformers
# makes the environments of its templates itself.
SandboxedEnvironment.intercepted_binops = frozenset({"*", "**"})
SandboxedEnvironment.default_binop_table |= {"*": _multiply, "**": _raise_to_power}


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, seconds: float = 10.0, **options: Any) -> str:
    """Render a conversation by a chat template.

    `options` are arguments of the tokenizer's `apply_chat_template`.

    Raises:
        ResponseError: the template was not done after `seconds`; those of released models take milliseconds.
        Exception: the template's own error, of any class, about these messages.
    """
    try:
        with _deadlines.deadline(seconds):
            return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except _Overdue:
        raise ResponseError(
            f"the chat template was not done with one conversation after {seconds:g} s: a loop in it has no end; take "
            "the template of a model that you trust, or give one in data.chat_template"
        ) from None


def render_calls(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Render tool calls, with arguments as objects, in the form that the template reads.

    Raises as `render_chat`, about the messages with empty contents for null.
    """
    # Nearly all templates take the arguments of calls as an object. DeepSeek's take them as text, and show calls only
    # where the content of the message is null, which other templates write as "None" or "null". So an empty content is
    # null where the template then shows more calls, and is else as it stands unless the template writes null. Arguments
    # become text where the template refuses objects.
    forms = [messages, [_write_arguments(message) for message in messages]]
    for form in forms:
        with_null = _try_render(tokenizer, _write_null(form), options)
        if with_null is not None:
            filled = _try_render(tokenizer, _fill_null(form), options)
            if filled is None or _count_calls(with_null, messages) > _count_calls(filled, messages):
                return with_null
            text = _try_render(tokenizer, form, options)
            return filled if text is None or _count_nulls(text) != _count_nulls(filled) else text
    text = _try_render(tokenizer, _fill_null(forms[1]), options)
    try:
        return render_chat(tokenizer, _fill_null(messages), **options)
    except Exception:
        if text is None:
            raise
        return text


def _try_render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str | None:
    try:
        return render_chat(tokenizer, messages, **options)
    except RunError:
        raise
    except Exception:  # noqa: BLE001 - a template may raise anything
        return None


def _count_calls(text: str, messages: Sequence[Mapping[str, Any]]) -> int:
    """Count the names of called functions in a rendered conversation."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    functions = [call.get("function", call) for call in calls]
    names = {str(function["name"]) for function in functions if isinstance(function, Mapping) and "name" in function}
    return sum(text.count(name) for name in names)


def _count_nulls(text: str) -> int:
    return text.count("None") + text.count("null")


def _write_null(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        {**message, "content": None} if message.get("tool_calls") and not message["content"] else message
        for message in messages
    ]


def _fill_null(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": message["content"] or ""} for message in messages]


def _write_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": text}}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else dict(message)
