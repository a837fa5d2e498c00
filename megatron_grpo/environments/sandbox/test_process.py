"""Process of the tests: runs them against proxies, distrusting replies.

When a test ends, the process writes a line of JSON to its standard output, a list: number of the test, whether it
passed, whether it sent the program a request, and the reason why its verdict cannot be trusted (empty if there is none,
or an earlier test had the same). The last line is an object with figures over all tests.
"""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from types import BuiltinFunctionType, FunctionType, GeneratorType, ModuleType
from typing import Any, NoReturn

from megatron_grpo.environments.sandbox import kernel
from megatron_grpo.environments.sandbox.peer import (
    COMPARISONS,
    FORWARDED,
    NUMBERS,
    OPERATORS,
    Fault,
    Peer,
    Proxy,
    ProxyClass,
    StopTest,
)
from megatron_grpo.environments.sandbox.program_process import detach
from megatron_grpo.environments.sandbox.values import Memo

_MAX_MESSAGES = 1_000_000  # from a program
# Methods of plain values that tests expect to be true; on a live object they return what the program chooses.
_VERDICT_NAMES = (
    "startswith endswith isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace "
    "istitle isupper is_integer isdisjoint issubset issuperset equals all any"
)
_VERDICTS = frozenset(_VERDICT_NAMES.split())
_PUBLIC = ("__name__", "__qualname__", "__doc__")  # attributes of the tests' functions that the program may read
_EQUAL_CALLS = 3  # fewest calls with different arguments whose equal replies are reported as `equal_outputs`


class TestPeer(Peer):
    """The tests' end of the connection.

    A test that compares live objects fails, unless `allow_untrusted` is set: the program would decide its verdict. It
    fails for good at the first answer that cannot be trusted, even if its text catches every exception.
    """

    def __init__(self, reading: int, writing: int, allow_untrusted: bool) -> None:
        super().__init__(reading, writing)
        self._allow_untrusted = allow_untrusted
        self._messages = 0
        self.names: dict[str, Any] = {"__name__": "__main__", "__same__": self.are_same}  # names that the tests see
        self.stopped = ""  # reason why the test fails even if its text raises nothing; empty: its text decides
        self.untrusted = ""  # reason why the verdict of the test cannot be trusted; empty: there is none
        self.requests = 0  # requests to the program in this test
        self.program_names: frozenset[str] = frozenset()  # names whose values come from the program
        # Hashes of replies, by number of the called object and hash of the arguments.
        self.replies: dict[int, dict[int, int]] = {}
        self.touched: set[str] = set()  # inspections of the program's process: audit events, and "/proc"

    def on_lost(self, reason: str) -> NoReturn:
        self.stopped = self.stopped or f"the program: {reason}"
        raise StopTest(self.stopped)

    def stop(self, reason: str) -> NoReturn:
        self.stopped = self.untrusted = self.untrusted or reason
        raise StopTest(reason)

    def begin(self, number: int, values: dict[str, Any]) -> None:
        """Start a test in a new fork of the program."""
        self.age = 0  # proxies of these names are valid in every test
        self.classes, self._class_numbers, self._sent_classes = {}, {}, []
        for name, value in values.items():
            if name in self.program_names:
                self.names[name] = self.decode(value, Memo())
        self.send(["test", number, []])
        while self.receive() != ["ready", number]:
            pass
        self.age = number

    def end(self) -> None:
        with suppress(StopTest):
            self.send(["done", 0, []])

    def receive(self) -> Any:
        self._messages += 1
        if self._messages > _MAX_MESSAGES:
            self.on_lost("it sent too many messages")
        message = super().receive()
        if not isinstance(message, list) or not message:
            self.on_lost("it sent no message")
        if message == ["lost"]:
            self.on_lost("its process ended")
        return message

    def request(self, action: str, target: Any, name: str, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Send and count a request, and distrust verdicts of live objects."""
        if self.stopped:
            raise StopTest(self.stopped)
        self.requests += 1
        if action == "get" and name in _VERDICTS and not self._is_expected(target):
            self._mark_untrusted(f".{name} of a live object")
        result = super().request(action, target, name, args, kwargs)
        if action == "call" and isinstance(target, ProxyClass) and isinstance(result, Proxy):
            object.__setattr__(result, "_mark_", "made")
        return result

    def call_special(self, target: Any, name: str, *args: Any) -> Any:
        """Call a special method, and distrust answers that decide a test."""
        # A plain operand may be the expected value, which the program then learns. So only an object that the test made
        # (mark "made") may be combined with one, and no number may come of it: neither directly, nor later from the
        # result (mark "told").
        if isinstance(target, Fault):
            return super().call_special(target, name, *args)
        if name in COMPARISONS:
            self._mark_untrusted(f"{name} of a live object")
        marks = {target._mark_, *(argument._mark_ for argument in args if isinstance(argument, Proxy))}
        has_plain_operand = name in OPERATORS and not all(isinstance(argument, Proxy) for argument in args)
        if has_plain_operand and not target._mark_:
            self._mark_untrusted(f"{name} with a plain value of a live object that the test did not make")
        if name in NUMBERS and "told" in marks:
            self._mark_untrusted(f"{name} of a live object that was combined with a plain value")
        result = super().call_special(target, name, *args)
        if has_plain_operand and name != "__contains__" and isinstance(result, int | float | complex):
            self._mark_untrusted(f"{name} of a live object and a plain value, which gives a number")
        if name in OPERATORS and isinstance(result, Proxy):
            mark = "told" if has_plain_operand or "told" in marks else "made" if marks == {"made"} else ""
            object.__setattr__(result, "_mark_", mark)
        return result

    def _is_expected(self, target: Any) -> bool:
        """True for an object that the test made, or a named class."""
        if isinstance(target, ProxyClass):
            return any(target is value for value in self.names.values())
        return isinstance(target, Proxy) and target._mark_ != ""

    def _mark_untrusted(self, reason: str) -> None:
        if not self._allow_untrusted:
            self.stop(reason)
        self.untrusted = self.untrusted or reason

    def are_same(self, first: Any, second: Any) -> bool:
        if not (isinstance(first, Proxy) and isinstance(second, Proxy)):
            return first is second
        self._mark_untrusted("the identity of live objects")
        return bool(first._number_ == second._number_)

    def encode_other(self, value: Any, memo: Memo) -> Any:
        """Convert functions, iterators and instances of the tests; nothing else may leave."""
        kind = type(value)
        if isinstance(value, ProxyClass | Proxy | Fault | BaseException | FunctionType) or value is NotImplemented:
            return super().encode_other(value, memo)
        name = getattr(value, "__name__", "")
        if kind is BuiltinFunctionType and vars(builtins).get(name) is value:  # math.pow has the name of another
            return ["builtin", name]
        if kind.__module__ == "__main__" or hasattr(value, "__next__"):
            return super().encode_other(value, memo)
        if callable(value):
            return ["object", self._encode_class(FunctionType), self._export(value)]
        raise TypeError(f"a {kind.__name__} of the tests cannot be given to a program")

    def perform(self, action: str, target: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Carry out a program's request, if it is allowed."""
        is_of_tests = type(target).__module__ == "__main__"
        is_allowed = {
            "call": callable(target),
            "get": name in _PUBLIC or (is_of_tests and not name.startswith("_")),
            "set": is_of_tests and not name.startswith("_"),
            "special": name in FORWARDED and (is_of_tests or name in ("__next__", "__iter__")),
            "resume": isinstance(target, GeneratorType),
        }
        if not is_allowed.get(action):
            raise AttributeError(f"a program may not use {name or action} of this object")
        try:
            return super().perform(action, target, name, args, kwargs)
        except AssertionError:
            self.stopped = self.stopped or "an assertion in a function that the program called"
            raise

    def accept(self, message: list[Any], reply: list[Any]) -> None:
        """Process a reply's extras: printed text, changed plain variables, inspections."""
        if message[0] == "call" and message[1][0] == "theirs":
            replies = self.replies.setdefault(message[1][1], {})
            replies[hash(json.dumps(message[3:]))] = hash(json.dumps(reply[1]))
        if reply[3] is None:
            return
        output, changed, touched = reply[3]
        self.names |= {key: self.decode(value, Memo()) for key, value in changed.items() if key in self.program_names}
        self.touched |= {str(inspection) for inspection in touched}
        sys.stdout.write(str(output))


def serve(spec: dict[str, Any]) -> NoReturn:
    """Run the tests of a description: `tests` (`PreparedTests`), `run_all`, `allow_untrusted`, `channel`."""
    kernel.set_dumpable(False)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    reading, writing = spec["channel"]
    report = os.dup(1)
    detach({reading, writing, report})
    with suppress(StopTest):
        _run_all(spec, TestPeer(reading, writing, spec["allow_untrusted"]), report)
    os._exit(0)


def _write_line(report: int, line: Any) -> None:
    os.write(report, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def _run_all(spec: dict[str, Any], peer: TestPeer, report: int) -> None:
    prepared = spec["tests"]
    module = ModuleType("__main__")
    vars(module).update(peer.names)
    peer.names = vars(module)
    sys.modules["__main__"] = module
    if any("unittest" in test["text"] for test in prepared["tests"]):  # its import takes a while
        _prepare_unittest(peer)
    for name, origin in prepared["modules"].items():
        owner, _, attribute = origin.partition(":")
        peer.names[name] = getattr(import_module(owner), attribute) if attribute else import_module(owner)
    peer.program_names = frozenset(prepared["names"])
    peer.send(["names", 0, prepared["names"]])
    failure, values = peer.receive()
    reported: set[str] = set()
    for number, test in enumerate(() if failure else prepared["tests"]):
        peer.stopped = peer.untrusted = ""
        peer.requests = 0
        passed = _run_test(prepared["needs_one_fork"], number, test, peer, values)
        _write_line(report, [number, passed, peer.requests > 0, "" if peer.untrusted in reported else peer.untrusted])
        reported.add(peer.untrusted)
        if not passed and test["is_test"] and not spec["run_all"]:
            break
    equal = any(len(replies) >= _EQUAL_CALLS and len(set(replies.values())) == 1 for replies in peer.replies.values())
    _write_line(report, {"touched": bool(peer.touched), "equal_outputs": equal})


def _run_test(shared: bool, number: int, test: dict[str, Any], peer: TestPeer, values: dict[str, Any]) -> bool:
    """Run a test; True if it raises nothing."""
    try:
        if number == 0 or not shared:
            peer.begin(number + 1, values)
        exec(compile(test["text"], "test.py", "exec"), peer.names)
        for name in test["test_names"]:
            _call(peer.names[name])
    except BaseException:  # noqa: BLE001 - any exception fails a test
        return False
    finally:
        if not shared:
            peer.end()
    return not peer.stopped


def _call(test: Any) -> None:
    """Run a test function, a unittest.TestCase, or another class's test methods."""
    if isinstance(test, type):
        unittest = sys.modules.get("unittest")
        if unittest is not None and issubclass(test, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(test).run(result)
            assert result.wasSuccessful()
            assert result.testsRun > len(result.skipped)
            return
        for name in [name for name in dir(test) if name.startswith("test")]:
            _call(getattr(test(), name))
        return
    result = test()
    if hasattr(result, "__await__"):
        import_module("asyncio").run(result)


def _prepare_unittest(peer: TestPeer) -> None:
    # `main` does nothing, since the tests run anyway.
    unittest: Any = import_module("unittest")
    unittest.main = lambda *args, **kwargs: None

    def assert_is(self: Any, first: Any, second: Any, msg: Any = None) -> None:
        assert peer.are_same(first, second), msg

    def assert_is_not(self: Any, first: Any, second: Any, msg: Any = None) -> None:
        assert not peer.are_same(first, second), msg

    unittest.TestCase.assertIs, unittest.TestCase.assertIsNot = assert_is, assert_is_not
