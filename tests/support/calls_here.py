"""Limited calls in the calling process: a process for each environment of a test would import vLLM each time."""

from collections.abc import Callable
from typing import Any


class CallsHere:
    """`LimitedCalls` without processes and limits."""

    def __init__(self, make_state: Callable[[], Any], *, cpu_s: float) -> None:
        self._state = make_state()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self._state, *arguments)
