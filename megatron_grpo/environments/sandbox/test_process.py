"""The process of the tests: runs them against proxies of the names that the program defines, and trusts no reply.

When a test ends, the process writes a line of JSON to its standard output: a list of the test's number, whether it
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
    Stopped,
)
from megatron_grpo.environments.sandbox.program_process import detach
from megatron_grpo.environments.sandbox.values import Memo

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

_MOST_MESSAGES = 1_000_000
"""Most messages that are accepted from a program."""
_CLAIMS = (
    "startswith endswith isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable isspace "
    "istitle isupper is_integer isdisjoint issubset issuperset equals all any"
)
_VERDICTS = frozenset(_CLAIMS.split())
"""Methods of plain values that tests expect to be true; those of a live object return what the program chooses."""
_PUBLIC = ("__name__", "__qualname__", "__doc__")
"""Attributes of the tests' functions that the program may read."""
_EQUAL_CALLS = 3
"""Fewest calls with different arguments whose equal replies are reported as `equal_outputs`."""


class Tests(Peer):
    """The tests' end of the connection. Unless allowed, no test compares live objects: the program would decide it.

    A test fails for good with the first answer that cannot be trusted, even if its text catches every exception.
    """

    def __init__(self, reading: int, writing: int, allow: bool) -> None:
        """`allow`: whether tests may compare live objects of the program, which decides the result."""
        super().__init__(reading, writing)
        self._allow = allow
        self._messages = 0
        self.names: dict[str, Any] = {"__name__": "__main__", "__same__": self.same}
        """Names that the tests see."""
        self.stopped = ""
        """Reason why the test fails even if its text raises nothing; empty: its text decides."""
        self.untrusted = ""
        """Reason why the verdict of the test cannot be trusted; empty: there is none."""
        self.requests = 0
        """Requests to the program in this test."""
        self.asked: frozenset[str] = frozenset()
        """Names whose values come from the program."""
        self.replies: dict[int, dict[int, int]] = {}
        """By number of the called object and hash of the arguments: the hash of the reply."""
        self.touched: set[str] = set()
        """Ways in which the program inspected its process: audit events, and "/proc"."""

    def lost(self, reason: str) -> NoReturn:
        self.stopped = self.stopped or f"the program: {reason}"
        raise Stopped(self.stopped)

    def stop(self, reason: str) -> NoReturn:
        self.stopped = self.untrusted = self.untrusted or reason
        raise Stopped(reason)

    def begin(self, number: int, values: dict[str, Any]) -> None:
        """Start a test in a new fork of the program, in which names have their initial values again."""
        self.age = 0  # proxies of these names live in every test
        self.classes, self._class_numbers, self._own_classes = {}, {}, []
        for name, value in values.items():
            if name in self.asked:
                self.names[name] = self.decode(value, Memo())
        self.send(["test", number, []])
        while self.receive() != ["ready", number]:
            pass
        self.age = number

    def end(self) -> None:
        """End the program's fork, if it is still there."""
        try:
            self.send(["done", 0, []])
        except Stopped:
            return

    def receive(self) -> Any:
        self._messages += 1
        if self._messages > _MOST_MESSAGES:
            self.lost("it sent too many messages")
        message = super().receive()
        if not isinstance(message, list) or not message:
            self.lost("it sent no message")
        if message == ["lost"]:
            self.lost("its process ended")
        return message

    def request(self, action: str, target: Any, name: str, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Send a request as `Peer.request` does, and count it; a verdict of a live object is distrusted."""
        if self.stopped:
            raise Stopped(self.stopped)
        self.requests += 1
        if action == "get" and name in _VERDICTS and not self._expected(target):
            self._distrust(f".{name} of a live object")
        result = super().request(action, target, name, args, kwargs)
        if action == "call" and isinstance(target, ProxyClass) and isinstance(result, Proxy):
            object.__setattr__(result, "_mark_", "made")
        return result

    def special(self, target: Any, name: str, *args: Any) -> Any:
        """Call a special method as `Peer.special` does, and distrust answers with which the program decides a test."""
        if isinstance(target, Fault):
            return super().special(target, name, *args)
        if name in COMPARISONS:
            self._distrust(f"{name} of a live object")
        marks = {target._mark_, *(one._mark_ for one in args if isinstance(one, Proxy))}
        told = name in OPERATORS and not all(isinstance(one, Proxy) for one in args)
        if told and not target._mark_:
            self._distrust(f"{name} with a plain value of a live object that the test did not make")
        if name in NUMBERS and "told" in marks:
            self._distrust(f"{name} of a live object that was combined with a plain value")
        result = super().special(target, name, *args)
        if told and name != "__contains__" and isinstance(result, int | float | complex):
            self._distrust(f"{name} of a live object and a plain value, which gives a number")
        if name in OPERATORS and isinstance(result, Proxy):
            mark = "told" if told or "told" in marks else "made" if marks == {"made"} else ""
            object.__setattr__(result, "_mark_", mark)
        return result

    def _expected(self, target: Any) -> bool:
        """Whether an object is an instance that the test made, or a class that it named."""
        if isinstance(target, ProxyClass):
            return any(target is one for one in self.names.values())
        return isinstance(target, Proxy) and target._mark_ != ""

    def _distrust(self, what: str) -> None:
        if not self._allow:
            self.stop(what)
        self.untrusted = self.untrusted or what

    def same(self, one: Any, other: Any) -> bool:
        """Whether two objects are the same one; of two live objects only the program knows."""
        if not (isinstance(one, Proxy) and isinstance(other, Proxy)):
            return one is other
        self._distrust("the identity of live objects")
        return bool(one._number_ == other._number_)

    def encode_other(self, value: Any, memo: Memo) -> Any:
        """Functions and iterators of the tests, and instances of their classes; nothing else leaves this process."""
        kind = type(value)
        if isinstance(value, ProxyClass | Proxy | Fault | BaseException | FunctionType) or value is NotImplemented:
            return super().encode_other(value, memo)
        name = getattr(value, "__name__", "")
        if kind is BuiltinFunctionType and vars(builtins).get(name) is value:  # math.pow has the name of another
            return ["builtin", name]
        if kind.__module__ == "__main__" or hasattr(value, "__next__"):
            return super().encode_other(value, memo)
        if callable(value):
            return ["object", self._described(FunctionType), self._export(value)]
        raise TypeError(f"a {kind.__name__} of the tests cannot be given to a program")

    def perform(self, action: str, target: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Carry out a program's request: calls, iteration, or public attributes of instances of the tests' classes."""
        own = type(target).__module__ == "__main__"
        allowed = {
            "call": callable(target),
            "get": name in _PUBLIC or (own and not name.startswith("_")),
            "set": own and not name.startswith("_"),
            "special": name in FORWARDED and (own or name in ("__next__", "__iter__")),
            "resume": isinstance(target, GeneratorType),
        }
        if not allowed.get(action):
            raise AttributeError(f"a program may not use {name or action} of this object")
        try:
            return super().perform(action, target, name, args, kwargs)
        except AssertionError:
            self.stopped = self.stopped or "an assertion in a function that the program called"
            raise

    def accept(self, message: list[Any], reply: list[Any]) -> None:
        """Process a reply's extras: printed text, changed plain variables, ways in which the program was inspected."""
        if message[0] == "call" and message[1][0] == "theirs":
            said = self.replies.setdefault(message[1][1], {})
            said[hash(json.dumps(message[3:]))] = hash(json.dumps(reply[1]))
        if reply[3] is None:
            return
        output, changed, touched = reply[3]
        self.names |= {name: self.decode(one, Memo()) for name, one in changed.items() if name in self.asked}
        self.touched |= {str(one) for one in touched}
        sys.stdout.write(str(output))


def serve(spec: dict[str, Any]) -> NoReturn:
    """Run the tests of a description: `tests` (of `data.code_tests.PreparedTests`), `every`, `allow`, and `channel`."""
    kernel.set_dumpable(False)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    reading, writing = spec["channel"]
    report = os.dup(1)
    detach({reading, writing, report})
    with suppress(Stopped):
        _run_all(spec, Tests(reading, writing, spec["allow"]), report)
    os._exit(0)


def _tell(report: int, line: Any) -> None:
    os.write(report, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def _run_all(spec: dict[str, Any], peer: Tests, report: int) -> None:
    """Run the tests one after the other and report each; with `every` also those after the first that fails."""
    plan = spec["tests"]
    module = ModuleType("__main__")
    vars(module).update(peer.names)
    peer.names = vars(module)
    sys.modules["__main__"] = module
    if plan["uses_unittest"]:
        _prepare_unittest(peer)
    for name, origin in plan["own"].items():
        owner, _, attribute = origin.partition(":")
        peer.names[name] = getattr(import_module(owner), attribute) if attribute else import_module(owner)
    peer.asked = frozenset(plan["names"])
    peer.send(["names", 0, plan["names"]])
    failed, values = peer.receive()
    told: set[str] = set()
    for number, test in enumerate(() if failed else plan["tests"]):
        peer.stopped = peer.untrusted = ""
        peer.requests = 0
        passed = _passes(plan, number, test, peer, values)
        _tell(report, [number, passed, peer.requests > 0, "" if peer.untrusted in told else peer.untrusted])
        told.add(peer.untrusted)
        if not passed and test["counted"] and not spec["every"]:
            break
    equal = any(len(one) >= _EQUAL_CALLS and len(set(one.values())) == 1 for one in peer.replies.values())
    _tell(report, {"touched": bool(peer.touched), "equal_outputs": equal})


def _passes(plan: dict[str, Any], number: int, test: dict[str, Any], peer: Tests, values: dict[str, Any]) -> bool:
    """Whether a test passes: its text raises nothing, nor do the test functions and classes that it defines."""
    try:
        if number == 0 or not plan["shared"]:
            peer.begin(number + 1, values)
        exec(compile(test["text"], "test.py", "exec"), peer.names)
        for name in test["collected"]:
            _call(peer.names[name])
    except BaseException:  # noqa: BLE001 - any exception fails a test
        return False
    finally:
        if not plan["shared"]:
            peer.end()
    return not peer.stopped


def _call(found: Any) -> None:
    """Run a test function, a unittest.TestCase, or the test methods of another class."""
    if isinstance(found, type):
        unittest = sys.modules.get("unittest")
        if unittest is not None and issubclass(found, unittest.TestCase):
            result = unittest.TestResult()
            unittest.defaultTestLoader.loadTestsFromTestCase(found).run(result)
            assert result.wasSuccessful()
            assert result.testsRun > len(result.skipped)
            return
        for name in [name for name in dir(found) if name.startswith("test")]:
            _call(getattr(found(), name))
        return
    result = found()
    if hasattr(result, "__await__"):
        import_module("asyncio").run(result)


def _prepare_unittest(peer: Tests) -> None:
    """Import unittest; `main` does nothing, since the tests run anyway, and identity is compared by the peer."""
    unittest: Any = import_module("unittest")
    unittest.main = lambda *args, **kwargs: None

    def assert_is(self: Any, first: Any, second: Any, msg: Any = None) -> None:
        assert peer.same(first, second), msg

    def assert_is_not(self: Any, first: Any, second: Any, msg: Any = None) -> None:
        assert not peer.same(first, second), msg

    unittest.TestCase.assertIs, unittest.TestCase.assertIsNot = assert_is, assert_is_not
