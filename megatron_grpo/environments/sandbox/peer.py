"""Live objects of another process: calls, attributes and special methods of a proxy are requests over two pipes.

Both processes of a Python test have one `Peer`. While a process waits for the reply to a request, it answers requests
of the other, so that functions can be passed in both directions. `Peer` trusts the other process; its subclass in the
process of the tests does not (`test_process.py`).
"""

from __future__ import annotations

import json
import os
from types import CoroutineType, FunctionType, GeneratorType

from megatron_grpo.environments.sandbox.values import Codec, Memo, standard_exception

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Any, NoReturn

LARGEST_MESSAGE = 4 << 20
"""Most bytes of a message."""

_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
_COMPARING = "eq ne lt le gt ge bool hash"
_NUMERIC = "neg pos abs invert int float complex index round trunc floor ceil"
_OTHERS = "len getitem setitem delitem iter next reversed enter exit call format bytes"
OPERATORS = frozenset(f"__{side}{name}__" for name in _BINARY.split() for side in ("", "r", "i")) | {"__contains__"}
"""Special methods with an operand, which in a test may be the expected value."""
COMPARISONS = frozenset(f"__{name}__" for name in _COMPARING.split())
NUMBERS = frozenset(f"__{name}__" for name in _NUMERIC.split())
FORWARDED = OPERATORS | COMPARISONS | NUMBERS | {f"__{name}__" for name in _OTHERS.split()}
"""Special methods that a proxy has if the class of its object has them."""


class Stopped(BaseException):
    """The end of a test: the other process is gone or sends nonsense, or its verdict cannot be trusted."""


class ProxyClass(type):
    """The type of proxies of classes."""

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], *, link: tuple[Peer, int] | None = None
    ) -> ProxyClass:
        if link is None and any(isinstance(one, ProxyClass) and "_link_" in one.__dict__ for one in bases):
            found = next(one for one in bases if isinstance(one, ProxyClass))
            found._link_[0].stop(f"class {name} inherits from {found.__name__}, which the program defines")
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


class Proxy(metaclass=ProxyClass):
    """Stands for an object of the other process. Every arrival of an object makes another proxy."""

    __slots__ = ("_age_", "_mark_", "_number_")
    _link_: tuple[Peer, int]

    def __getattr__(self, name: str) -> Any:
        return self._link_[0].request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link_[0].request("set", self, name, (value,))

    def __delattr__(self, name: str) -> None:
        self._link_[0].request("del", self, name)

    def __str__(self) -> str:
        return self._link_[0].special(self, "__str__")

    def __repr__(self) -> str:
        return self._link_[0].special(self, "__repr__")

    def __eq__(self, other: object) -> Any:
        """The identity of two live objects, which only the other process knows."""
        return self._link_[0].special(self, "__eq__", other) if isinstance(other, Proxy) else NotImplemented

    def __hash__(self) -> int:
        return self._link_[0].special(self, "__hash__")


class Fault(metaclass=ProxyClass):
    """Mixin of proxies of exceptions: attributes and text are the object's, and the proxy can be raised and caught."""

    _link_: tuple[Peer, int]
    __getattr__ = Proxy.__getattr__
    __str__ = Proxy.__str__


def _forwarding(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        peer: Peer = self._link_[0]
        if name == "__call__":
            return peer.request("call", self, "", args, kwargs)
        if name == "__exit__":
            args = (*args[:2], None)  # a traceback stays where it is
        return peer.special(self, name, *args)

    method.__name__ = name
    return method


_METHODS = {name: _forwarding(name) for name in FORWARDED}


class Peer(Codec):
    """One end of the connection."""

    def __init__(self, reading: int, writing: int) -> None:
        """`reading`, `writing`: file descriptors of the pipes from and to the other process."""
        self._reading, self._writing = reading, writing
        self._exports: list[Any] = []
        self._exported: dict[int, int] = {}
        self._class_numbers: dict[type, int] = {}
        self._own_classes: list[type] = []
        self.classes: dict[int, Any] = {}
        """Proxies of the other process's classes, by their number there."""
        self.age = 0
        """Number of the running test; 0 before the first. Proxies of an earlier test are invalid, except those of 0."""

    # Messages

    def send(self, message: Any) -> None:
        """Send a message. ValueError: it is too large."""
        data = json.dumps(message).encode()
        if len(data) > LARGEST_MESSAGE:
            raise ValueError(f"a value of {len(data)} bytes is too large for a test; it may have {LARGEST_MESSAGE}")
        rest = memoryview(len(data).to_bytes(4, "big") + data)
        try:
            while rest:
                rest = rest[os.write(self._writing, rest) :]
        except OSError:
            self.lost("it ended")

    def receive(self) -> Any:
        """The next message, any JSON."""
        size = int.from_bytes(self._read(4), "big")
        if size > LARGEST_MESSAGE:
            self.lost("it sent too large a message")
        data = self._read(size)
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            return self.lost("it sent no JSON")

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._reading, min(size, 1 << 16))
            if not part:
                self.lost("it ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def lost(self, reason: str) -> NoReturn:
        """Called when the other process has ended or sends nonsense; does not return."""
        raise Stopped(reason)

    def stop(self, reason: str) -> NoReturn:
        """Called for a use of an object that a proxy cannot support; does not return."""
        raise TypeError(reason)

    # Requests

    def request(self, action: str, target: Any, name: str, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Make the other process act on an object; returns the result of the action, or raises its exception.

        Args:
            action: "call", "get", "set", "del" (attributes), "special" (method of the type), "resume" (a generator or
                coroutine).
            target: proxy of the object.
            name: attribute or special method.
            args: arguments; those that the other process changes in place are changed here.
            kwargs: arguments by name.
        """
        memo = Memo()
        parts = [self.encode(target, memo), name, [self.encode(one, memo) for one in args]]
        message = [action, *parts, {key: self.encode(one, memo) for key, one in (kwargs or {}).items()}]
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
            self.lost(f"it sent no value: {type(error).__name__}: {error}")
        if kind == "raise":
            raise value
        return value

    def special(self, target: Any, name: str, *args: Any) -> Any:
        """Call a special method of the object behind a proxy."""
        return self.request("special", target, name, args)

    def serve(self, message: Any) -> None:
        """Answer a request of the other process."""
        memo = Memo()
        try:
            action, target, name, args, kwargs = message
            target = self.decode(target, memo)
            args = [self.decode(one, memo) for one in args]
            kwargs = {str(key): self.decode(one, memo) for key, one in kwargs.items()}
            memo.note_contents()
            kind, value = "return", self.perform(action, target, name, args, kwargs)
        except Stopped:
            raise
        except BaseException as error:  # noqa: BLE001 - the other process raises it again
            kind, value = "raise", error
        try:
            self.send(self._reply(kind, value, memo))
        except (TypeError, ValueError, RecursionError) as error:
            self.send(self._reply("raise", TypeError(str(error)), Memo()))

    def _reply(self, kind: str, value: Any, memo: Memo) -> list[Any]:
        changed = memo.changed()
        encoded = self.encode(value, memo)
        contents = [[number, self.contents(memo.objects[number], memo, number)] for number in changed]
        return [kind, encoded, contents, self.extras()]

    def perform(self, action: str, target: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Carry out a request; raises what the object raises."""
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

    def extras(self) -> Any:
        """Data that a reply carries besides its value; None: there are none."""
        return None

    def accept(self, message: list[Any], reply: list[Any]) -> None:
        """Process the data that a reply carries besides its value; `message` is the request."""

    # Objects

    def encode_other(self, value: Any, memo: Memo) -> Any:
        """The JSON of a proxy, with the object's number in the other process, or of an object of this process."""
        if isinstance(value, ProxyClass):
            return ["their class", value._link_[1]]
        if isinstance(value, Proxy | Fault):
            if object.__getattribute__(value, "_age_") not in (0, self.age):
                self.stop("it uses a live object of an earlier test")
            return ["theirs", object.__getattribute__(value, "_number_")]
        if value is NotImplemented:
            return ["NotImplemented"]
        if isinstance(value, type):
            return ["class", self._described(value)]
        number = self._export(value)
        if isinstance(value, BaseException):
            return ["exception", self._described(type(value)), [self._plain(one) for one in value.args], number]
        if isinstance(value, FunctionType):
            return ["function", self._described(FunctionType), number, value.__name__, _positional(value)]
        if isinstance(value, GeneratorType | CoroutineType):
            return [type(value).__name__, self._described(type(value)), number]
        return ["object", self._described(type(value)), number]

    def _plain(self, value: Any) -> Any:
        """An argument of an exception; its text if it is not plain."""
        try:
            return Codec().encode(value, Memo())
        except (TypeError, RecursionError):
            return repr(value)

    def _export(self, value: Any) -> int:
        if id(value) not in self._exported:
            self._exported[id(value)] = len(self._exports)
            self._exports.append(value)
        return self._exported[id(value)]

    def _described(self, kind: type) -> Any:
        """The number of a class, with a description the first time it is sent; of an imported exception its name."""
        if issubclass(kind, BaseException) and kind.__module__ != "__main__":
            return f"{kind.__module__}:{kind.__qualname__}"
        if kind in self._class_numbers:
            return self._class_numbers[kind]
        self._class_numbers[kind] = number = len(self._own_classes)
        self._own_classes.append(kind)
        kept = [one for one in kind.__bases__ if issubclass(one, BaseException) or one.__module__ == "__main__"]
        bases = [self._described(one) for one in kept]
        methods = [one for one in FORWARDED if getattr(kind, one, None) not in (None, getattr(object, one, None))]
        return [number, kind.__name__, bases, methods]

    def decode_other(self, tag: str, given: list[Any], memo: Memo) -> Any:
        """A proxy for an object of the other process; for a proxy that the other process has, its object here."""
        if tag == "theirs":
            return self._exports[given[1]]
        if tag == "their class":
            return self._own_classes[given[1]]
        if tag == "NotImplemented":
            return NotImplemented
        kind = self._class(given[1])
        if tag == "class":
            return kind
        if tag == "exception":
            return self._exception(kind, [self.decode(one, memo) for one in given[2]], given[3])
        proxy = object.__new__(kind)
        for name, value in (("_number_", int(given[2])), ("_age_", self.age), ("_mark_", "")):
            object.__setattr__(proxy, name, value)
        if tag == "function":
            return self.function(proxy, str(given[3]), given[4])
        if tag in ("generator", "coroutine"):
            return _generator(proxy) if tag == "generator" else _coroutine(proxy)
        return proxy

    def function(self, proxy: Any, name: str, parameters: Any) -> Any:
        """The object that stands for a function of the other process; by default its proxy."""
        return proxy

    def _exception(self, kind: Any, args: list[Any], number: int) -> BaseException:
        if not isinstance(kind, ProxyClass):
            try:
                return kind(*args)
            except (TypeError, ValueError, AttributeError):  # its constructor does not take `args`
                return kind.__new__(kind, *args)
        constructor: Any = kind.__new__
        made: BaseException = constructor(kind, *args)  # `kind` inherits from an exception class
        for name, value in (("args", tuple(args)), ("_number_", int(number)), ("_age_", self.age)):
            object.__setattr__(made, name, value)
        return made

    def _class(self, given: Any) -> Any:
        """The class that stands for one of the other process, made when its description arrives."""
        if isinstance(given, str):
            module, _, name = given.partition(":")
            return standard_exception(module, name) or Exception
        if not isinstance(given, list):
            return self.classes[given]
        number, name, bases, methods = given
        inherited = tuple(dict.fromkeys(self._class(one) for one in bases))
        faults = tuple(one for one in inherited if issubclass(one, BaseException))
        if faults and Fault not in {base for one in faults for base in one.__mro__}:
            faults = (Fault, *faults)
        namespace: dict[str, Any] = {one: _METHODS[one] for one in (() if faults else methods)}
        namespace |= {"__module__": "__main__"} if faults else {"__module__": "__main__", "__slots__": ()}
        if number in self.classes:
            raise ValueError("a class is described twice")
        self.classes[number] = ProxyClass(str(name), faults or inherited or (Proxy,), namespace, link=(self, number))
        return self.classes[number]


def _positional(function: FunctionType) -> list[str] | None:
    """Names of a function's parameters when all are positional and have no defaults."""
    code = function.__code__
    simple = not (code.co_flags & 0x0C or code.co_kwonlyargcount or function.__defaults__)
    return list(code.co_varnames[: code.co_argcount]) if simple else None


def _generator(proxy: Any) -> Generator[Any, Any, Any]:
    """A generator whose values the other process yields."""
    given = None
    while True:
        try:
            value = proxy._link_[0].request("resume", proxy, "", (given,))
        except StopIteration as end:
            return end.value
        given = yield value


async def _coroutine(proxy: Any) -> Any:
    """A coroutine that the other process runs to its end when it is awaited here."""
    return proxy._link_[0].request("await", proxy, "")
