"""Proxies of another process's objects: their use becomes requests over pipes.

Both processes of a Python test have one `Peer`. While a process waits for the reply to a request, it answers requests
of the other process, so that functions can be passed in both directions. `Peer` trusts the other process; its subclass
in the process of the tests does not (`test_process.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator
from types import CoroutineType, FunctionType, GeneratorType
from typing import Any, NoReturn

from megatron_grpo.environments.sandbox.values import Codec, Memo, find_standard_exception

MAX_MESSAGE_BYTES = 4 << 20

_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
_COMPARING = "eq ne lt le gt ge bool hash"
_NUMERIC = "neg pos abs invert int float complex index round trunc floor ceil"
_CONTAINER = "len getitem setitem delitem iter next reversed enter exit call format bytes"
OPERATORS = frozenset(f"__{side}{name}__" for name in _BINARY.split() for side in ("", "r", "i")) | {"__contains__"}
"""Special methods with an operand, which in a test may be the expected value."""
COMPARISONS = frozenset(f"__{name}__" for name in _COMPARING.split())
NUMBERS = frozenset(f"__{name}__" for name in _NUMERIC.split())
FORWARDED = OPERATORS | COMPARISONS | NUMBERS | {f"__{name}__" for name in _CONTAINER.split()}  # if the class has them


class StopTest(BaseException):
    """Ends a test that fails or cannot be trusted."""


class ProxyClass(type):
    """Metaclass of proxies; with a `_link_`, stands for the other process's class."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, link: tuple[Peer, int] | None = None
    ) -> ProxyClass:
        if link is None and any(isinstance(base, ProxyClass) and "_link_" in base.__dict__ for base in bases):
            proxy = next(base for base in bases if isinstance(base, ProxyClass))
            proxy._link_[0].stop(f"class {name} inherits from {proxy.__name__}, which the program defines")
        return super().__new__(mcs, name, bases, {**namespace, **({} if link is None else {"_link_": link})})

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._link_[0].request("call", cls, "", args, kwargs)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__abstract") or "_link_" not in cls.__dict__:
            raise AttributeError(name)
        return cls._link_[0].request("get", cls, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        cls._link_[0].request("set", cls, name, (value,))

    def __iter__(cls) -> Any:
        return iter(cls._link_[0].request("special", cls, "__iter__"))

    def __len__(cls) -> Any:
        return cls._link_[0].request("special", cls, "__len__")

    def __getitem__(cls, key: Any) -> Any:
        return cls._link_[0].request("special", cls, "__getitem__", (key,))

    def __bool__(cls) -> bool:
        return True


def _make_method(name: str) -> Callable[..., Any]:
    def call_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        peer: Peer = self._link_[0]
        if name == "__call__":
            return peer.request("call", self, "", args, kwargs)
        if name == "__exit__":
            args = (*args[:2], None)  # a traceback cannot be sent
        return peer.call_special(self, name, *args)

    call_method.__name__ = name
    return call_method


_METHODS = {name: _make_method(name) for name in FORWARDED}


class Proxy(metaclass=ProxyClass):
    """Stands for an object of the other process."""

    # An object that arrives twice has two proxies. `_age_` is the number of the test in which the proxy was made,
    # `_number_` the object's number in the other process; for `_mark_` see `test_process.TestPeer.call_special`.
    __slots__ = ("_age_", "_mark_", "_number_")
    _link_: tuple[Peer, int]

    def __getattr__(self, name: str) -> Any:
        return self._link_[0].request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link_[0].request("set", self, name, (value,))

    def __delattr__(self, name: str) -> None:
        self._link_[0].request("del", self, name)

    __str__, __repr__, __hash__ = map(_make_method, ("__str__", "__repr__", "__hash__"))

    def __eq__(self, value: object) -> Any:
        # A class with an `__eq__` of its own has it forwarded, so here the object is compared by identity, and only the
        # other process knows whether two proxies stand for the same object.
        return self._link_[0].call_special(self, "__eq__", value) if isinstance(value, Proxy) else NotImplemented


class Fault(metaclass=ProxyClass):
    """Mixin for proxies of exceptions, which can be raised here."""

    _link_: tuple[Peer, int]
    __getattr__ = Proxy.__getattr__
    __str__ = Proxy.__str__


class Peer(Codec):
    """One end of the connection between the two processes."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._exports: list[Any] = []  # objects that the other process has proxies of
        self._export_numbers: dict[int, int] = {}  # by id of the object
        self._sent_classes: list[type] = []
        self._class_numbers: dict[type, int] = {}
        self.classes: dict[int, Any] = {}  # proxies of classes, by the number of the class in the other process
        # Number of the running test; 0 before the first. Proxies with another age are invalid, except age 0.
        self.age = 0

    def send(self, message: Any) -> None:
        """Send a message; ValueError if it is too large."""
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of {len(data)} bytes is too large for a test; it may have {MAX_MESSAGE_BYTES}")
        remaining = memoryview(len(data).to_bytes(4, "big") + data)
        try:
            while remaining:
                remaining = remaining[os.write(self._writing, remaining) :]
        except OSError:
            self.on_lost("it ended")

    def receive(self) -> Any:
        """Receive the next message, any JSON."""
        size = int.from_bytes(self._read(4), "big")
        if size > MAX_MESSAGE_BYTES:
            self.on_lost("it sent too large a message")
        data = self._read(size)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return self.on_lost("it sent no JSON")

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._reading, min(size, 1 << 16))
            if not part:
                self.on_lost("it ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def on_lost(self, reason: str) -> NoReturn:
        """End the test, because the other process is lost."""
        raise StopTest(reason)

    def stop(self, reason: str) -> NoReturn:
        """Refuse a use of an object that a proxy cannot support."""
        raise TypeError(reason)

    def request(self, action: str, target: Any, name: str, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Make the other process act on a proxy's object.

        Actions: "call", "get", "set", "del" (attributes), "special" (method of the type), "resume" (a generator),
        "await" (a coroutine). Arguments that the other process changes in place are changed here.
        """
        memo = Memo()
        parts = [self.encode(target, memo), name, [self.encode(argument, memo) for argument in args]]
        message = [action, *parts, {key: self.encode(argument, memo) for key, argument in (kwargs or {}).items()}]
        self.send(message)
        while (reply := self.receive())[0] not in ("return", "raise"):
            self.serve(reply)
        try:
            kind, encoded, changed, _ = reply
            value = self.decode(encoded, memo)
            if kind == "raise" and not isinstance(value, BaseException):
                raise ValueError("an exception was expected")
            for number, contents in changed:
                self.fill(memo.objects[number], contents, memo)
            self.accept(message, reply)
        except Exception as error:  # noqa: BLE001 - decoding an untrusted message may raise anything
            self.on_lost(f"it sent no value: {type(error).__name__}: {error}")
        if kind == "raise":
            raise value
        return value

    def call_special(self, target: Any, name: str, *args: Any) -> Any:
        return self.request("special", target, name, args)

    def serve(self, message: Any) -> None:
        """Answer a request of the other process."""
        memo = Memo()
        try:
            action, target, name, args, kwargs = message
            target = self.decode(target, memo)
            args = [self.decode(argument, memo) for argument in args]
            kwargs = {str(key): self.decode(argument, memo) for key, argument in kwargs.items()}
            memo.note_contents()
            kind, value = "return", self.perform(action, target, name, args, kwargs)
        except StopTest:
            raise
        except BaseException as error:  # noqa: BLE001 - the other process raises it again
            kind, value = "raise", error
        try:
            self.send(self._make_reply(kind, value, memo))
        except (TypeError, ValueError, RecursionError) as error:
            self.send(self._make_reply("raise", TypeError(str(error)), Memo()))

    def _make_reply(self, kind: str, value: Any, memo: Memo) -> list[Any]:
        changed = memo.list_changed()
        encoded = self.encode(value, memo)
        contents = [[number, self.encode_contents(memo.objects[number], memo, number)] for number in changed]
        return [kind, encoded, contents, self.collect_extras()]

    def perform(self, action: str, target: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Carry out a request; exceptions of the object pass through."""
        if action == "call":
            return target(*args, **kwargs)
        if action == "special":
            return getattr(type(target), name)(target, *args)
        if action == "set":
            return setattr(target, name, args[0])
        if action == "del":
            return delattr(target, name)
        if action == "resume":
            return target.send(args[0])
        return getattr(target, name)

    def collect_extras(self) -> Any:
        """Collect data that a reply carries besides its value, or None."""
        return None

    def accept(self, message: list[Any], reply: list[Any]) -> None:
        """Process the extras of a reply to the request `message`."""

    def encode_other(self, value: Any, memo: Memo) -> Any:
        """Convert a proxy or an object to a number."""
        if isinstance(value, ProxyClass):
            return ["their class", value._link_[1]]
        if isinstance(value, Proxy | Fault):
            if object.__getattribute__(value, "_age_") not in (0, self.age):
                self.stop("it uses a live object of an earlier test")
            return ["theirs", object.__getattribute__(value, "_number_")]
        if value is NotImplemented:
            return ["NotImplemented"]
        if isinstance(value, type):
            return ["class", self._encode_class(value)]
        number, encoded_class = self._export(value), self._encode_class(type(value))
        if isinstance(value, BaseException):
            return ["exception", encoded_class, [_encode_plainly(argument) for argument in value.args], number]
        if isinstance(value, FunctionType):
            code = value.__code__
            is_simple = not (code.co_flags & 0x0C or code.co_kwonlyargcount or value.__defaults__)
            positional = list(code.co_varnames[: code.co_argcount]) if is_simple else None
            return ["function", encoded_class, number, value.__name__, positional]
        tag = type(value).__name__ if isinstance(value, GeneratorType | CoroutineType) else "object"
        return [tag, encoded_class, number]

    def _export(self, value: Any) -> int:
        if id(value) not in self._export_numbers:
            self._export_numbers[id(value)] = len(self._exports)
            self._exports.append(value)
        return self._export_numbers[id(value)]

    def _encode_class(self, kind: type) -> Any:
        """Convert a class to its number, at first with a description."""
        if issubclass(kind, BaseException) and kind.__module__ != "__main__":
            return f"{kind.__module__}:{kind.__qualname__}"
        if kind in self._class_numbers:
            return self._class_numbers[kind]
        self._class_numbers[kind] = number = len(self._sent_classes)
        self._sent_classes.append(kind)
        bases = [base for base in kind.__bases__ if issubclass(base, BaseException) or base.__module__ == "__main__"]
        encoded_bases = [self._encode_class(base) for base in bases]
        methods = [name for name in FORWARDED if getattr(kind, name, None) not in (None, getattr(object, name, None))]
        return [number, kind.__name__, encoded_bases, methods]

    def decode_other(self, tag: str, encoded: list[Any], memo: Memo) -> Any:
        """Make a proxy, or return the object behind the other process's proxy."""
        if tag == "theirs":
            return self._exports[encoded[1]]
        if tag == "their class":
            return self._sent_classes[encoded[1]]
        if tag == "NotImplemented":
            return NotImplemented
        kind = self._decode_class(encoded[1])
        if tag == "class":
            return kind
        if tag == "exception":
            return self._make_exception(kind, [self.decode(argument, memo) for argument in encoded[2]], encoded[3])
        proxy = object.__new__(kind)
        for name, value in (("_number_", int(encoded[2])), ("_age_", self.age), ("_mark_", "")):
            object.__setattr__(proxy, name, value)
        if tag == "function":
            return self.make_function(proxy, str(encoded[3]), encoded[4])
        if tag == "generator":
            return _resume_generator(proxy)
        return _await_coroutine(proxy) if tag == "coroutine" else proxy

    def make_function(self, proxy: Any, name: str, parameters: Any) -> Any:
        """Make the stand-in for the other process's function."""
        return proxy

    def _make_exception(self, kind: Any, args: list[Any], number: int) -> BaseException:
        if not isinstance(kind, ProxyClass):
            try:
                return kind(*args)
            except (TypeError, ValueError, AttributeError):  # its constructor does not take `args`
                return kind.__new__(kind, *args)
        constructor: Any = kind.__new__
        exception: BaseException = constructor(kind, *args)  # `kind` inherits from an exception class
        for name, value in (("args", tuple(args)), ("_number_", int(number)), ("_age_", self.age)):
            object.__setattr__(exception, name, value)
        return exception

    def _decode_class(self, encoded: Any) -> Any:
        if isinstance(encoded, str):
            module, _, name = encoded.partition(":")
            return find_standard_exception(module, name) or Exception
        if not isinstance(encoded, list):
            return self.classes[encoded]
        number, name, encoded_bases, methods = encoded
        bases = tuple(dict.fromkeys(self._decode_class(encoded_base) for encoded_base in encoded_bases))
        faults = tuple(base for base in bases if issubclass(base, BaseException))
        if faults and Fault not in {ancestor for fault in faults for ancestor in fault.__mro__}:
            faults = (Fault, *faults)
        namespace: dict[str, Any] = {method: _METHODS[method] for method in (() if faults else methods)}
        namespace |= {"__module__": "__main__"} if faults else {"__module__": "__main__", "__slots__": ()}
        if number in self.classes:
            raise ValueError("a class is described twice")
        self.classes[number] = ProxyClass(str(name), faults or bases or (Proxy,), namespace, link=(self, number))
        return self.classes[number]


def _encode_plainly(value: Any) -> Any:
    try:
        return Codec().encode(value, Memo())
    except (TypeError, RecursionError):
        return repr(value)


def _resume_generator(proxy: Any) -> Generator[Any, Any, Any]:
    sent_value = None
    while True:
        try:
            value = proxy._link_[0].request("resume", proxy, "", (sent_value,))
        except StopIteration as end:
            return end.value
        sent_value = yield value


async def _await_coroutine(proxy: Any) -> Any:
    return proxy._link_[0].request("await", proxy, "")
