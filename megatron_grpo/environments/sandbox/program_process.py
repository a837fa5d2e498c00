"""Process of a program: forks of it answer the tests' calls.

The model's program runs inside this process and may change anything in it. The process has neither tests nor expected
values, and the process of the tests decodes its messages as plain values.
"""

from __future__ import annotations

import builtins
import io
import os
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any, NoReturn

from megatron_grpo.environments.sandbox.peer import Peer
from megatron_grpo.environments.sandbox.values import Memo

_DONE = 83  # exit code of a test's fork that ends on request
_MAX_OUTPUT = 1 << 16  # characters that a program may print in one call
# Audit events of a program that inspects the interpreter which runs it.
_INSPECTION_EVENTS = (
    *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
    *("sys.settrace", "sys.setprofile", "sys.monitoring.register_callback"),  # the last since Python 3.12
    *("sys._current_frames", "sys.addaudithook"),
)


class _Output(io.StringIO):
    """The program's `sys.stdout`: collects text for the next reply."""

    # The process of the tests prints the text, because tests may have redirected their output.

    encoding, errors = "utf-8", "strict"  # of StringIO they are None, which programs do not expect

    def write(self, text: str) -> int:
        if self.tell() + len(text) > _MAX_OUTPUT:
            raise OSError("too much output")
        return super().write(text)

    def fileno(self) -> int:
        return 1

    def take(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


class ProgramPeer(Peer):
    """The program's end of the connection."""

    def __init__(self, reading: int, writing: int) -> None:
        super().__init__(reading, writing)
        self.output = _Output()
        self._names: dict[str, Any] = {}
        self._last_texts: dict[str, str] = {}  # of plain variables, as the process of the tests has them
        self._touched: set[str] = set()
        self._reported: set[str] = set()  # of `_touched`

    def on_lost(self, reason: str) -> NoReturn:
        os._exit(0)

    def run(self, source: str) -> None:
        """Run the program, then fork for every test."""
        sys.addaudithook(self._record_audit_event)
        module = ModuleType("__main__")
        sys.modules["__main__"] = module
        sys.argv = ["main.py"]
        sys.stdout = sys.stderr = self.output
        self._names = vars(module)
        failure = ""
        try:
            exec(compile(source, "main.py", "exec"), self._names)
        except BaseException as error:  # noqa: BLE001 - SystemExit too: the rest of the program has not run
            failure = f"{type(error).__name__}: {error}"
        self.output.take()
        while True:
            message = self.receive()  # other messages arrive late, for a test whose process has ended
            if message[0] == "names":
                self.send([failure, self._encode_values(message[2])])
            elif message[0] == "test":
                # The test has a fork of its own, so that it cannot change the program for later tests.
                self.send(["ready", message[1]])
                self._serve_in_fork()

    def _encode_values(self, names: list[str]) -> dict[str, Any]:
        values = {}
        for name in names:
            if name in self._names:
                value = self._names[name]
                values[name] = self.encode(value, Memo())
                if _is_watchable(value):
                    self._last_texts[name] = repr(values[name])
        return values

    def _serve_in_fork(self) -> None:
        child = os.fork()
        if child == 0:
            while True:
                self.serve(self.receive())
        _, status = os.waitpid(child, 0)
        if os.waitstatus_to_exitcode(status) != _DONE:
            self.send(["lost"])

    def serve(self, message: Any) -> None:
        if message[0] == "done":
            os._exit(_DONE)
        super().serve(message)

    def decode_other(self, tag: str, encoded: list[Any], memo: Memo) -> Any:
        return vars(builtins)[encoded[1]] if tag == "builtin" else super().decode_other(tag, encoded, memo)

    def perform(self, action: str, target: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if action == "await":
            from asyncio import run  # here: few programs are asynchronous, and the import takes milliseconds

            return run(target)
        return super().perform(action, target, name, args, kwargs)

    def collect_extras(self) -> Any:
        """Collect printed text, changed plain variables, and inspections."""
        changed = {}
        for name, last_text in self._last_texts.items():
            if _is_watchable(self._names.get(name)):
                encoded = self.encode(self._names[name], Memo())
                if repr(encoded) != last_text:
                    self._last_texts[name] = repr(encoded)
                    changed[name] = encoded
        new = self._touched - self._reported
        self._reported |= new
        output = self.output.take()
        return [output, changed, sorted(new)] if output or changed or new else None

    def make_function(self, proxy: Any, name: str, parameters: Any) -> Any:
        """Make a function with the name and parameters of the test's."""
        declared = "*args, **kwargs" if parameters is None else ", ".join(parameters)
        call_proxy = eval(f"lambda {declared}: _call_({declared})", {"_call_": proxy})
        call_proxy.__name__ = name
        return call_proxy

    def _record_audit_event(self, event: str, args: tuple[Any, ...]) -> None:
        if event in _INSPECTION_EVENTS:
            self._touched.add(event)
        elif event == "open" and str(args[0]).startswith("/proc"):
            self._touched.add("/proc")


def _is_watchable(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | list | dict | set | tuple)


def serve(spec: dict[str, Any]) -> NoReturn:
    """Run the program `source` of a description; `channel` are two pipes."""
    reading, writing = spec["channel"]
    detach({reading, writing})
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment] # as site defines them
    ProgramPeer(reading, writing).run(spec["source"])
    os._exit(0)


def detach(open_fds: set[int]) -> None:
    """Detach this process from its launcher: streams, files, import path.

    The standard streams become /dev/null, and all other file descriptors but `open_fds` are closed. Modules can be
    imported from the standard library and the interpreter's site-packages.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for low, high in pairwise([2, *sorted(open_fds), 1 << 30]):
        os.closerange(low + 1, high)
    import site  # a launcher's interpreter starts without it

    sys.path = [path for path in sys.path if path.startswith(sys.base_prefix)] + site.getsitepackages()
