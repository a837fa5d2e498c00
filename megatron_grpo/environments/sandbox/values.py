"""Plain Python values as JSON, rebuilt as exact built-in types; containers keep their identity and their changes.

The two processes of a Python test exchange these texts. The sender is not trusted: a text that describes no value
raises an ordinary exception, which the reader turns into the end of the test.
"""

from __future__ import annotations

import builtins
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

_EXACT = 1 << 53
"""Bound from which integers are sent in hexadecimal, which has no limit of digits and is parsed in linear time."""
_DICTS: dict[str, type] = {one.__name__: one for one in (dict, OrderedDict, Counter, defaultdict)}
_CONTAINERS = frozenset({list, set, bytearray, deque, *_DICTS.values()})
"""Mutable types: they may repeat in a message, contain themselves, and change in a call."""
_STANDARD: dict[str, tuple[Callable[[Any], tuple[Any, ...]], str]] = {
    "builtins.range": (lambda value: (value.start, value.stop, value.step), ""),
    "builtins.slice": (lambda value: (value.start, value.stop, value.step), ""),
    "decimal.Decimal": (lambda value: (str(value),), ""),
    "fractions.Fraction": (lambda value: (value.numerator, value.denominator), ""),
    "datetime.date": (lambda value: (value.isoformat(),), "fromisoformat"),
    "datetime.time": (lambda value: (value.isoformat(),), "fromisoformat"),
    "datetime.datetime": (lambda value: (value.isoformat(),), "fromisoformat"),
    "datetime.timedelta": (lambda value: (value.days, value.seconds, value.microseconds), ""),
}
"""Immutable types of the standard library: the arguments that rebuild a value, and the constructor if it has a name."""
_TYPES = {f"builtins.{one.__name__}": one for one in vars(builtins).values() if isinstance(one, type)}
_TYPES |= {f"collections.{one.__name__}": one for one in (OrderedDict, Counter, defaultdict, deque)}


class Memo:
    """The containers of one request and its reply. Both processes number them in the order of the message."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._before: list[list[Any]] = []

    def add(self, value: Any) -> int:
        """Give a container its number; the memo keeps it alive."""
        self._numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        return len(self.objects) - 1

    def number(self, value: Any) -> int | None:
        """The number of a container; None: it has none yet."""
        return self._numbers.get(id(value))

    def note_contents(self) -> None:
        """Remember what every container holds, for `changed`."""
        self._before = [_contents(value) for value in self.objects]

    def changed(self) -> list[int]:
        """Numbers of the containers that hold other objects than at `note_contents`, though they may be equal."""
        pairs = zip(self._before, map(_contents, self.objects), strict=False)
        return [
            number
            for number, (old, new) in enumerate(pairs)
            if len(old) != len(new) or any(one is not other for one, other in zip(old, new, strict=True))
        ]


def _contents(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    return list(value)


class Codec:
    """Converts plain values to and from JSON; for other values subclasses override `encode_other`, `decode_other`."""

    def encode(self, value: Any, memo: Memo) -> Any:
        """The JSON of a value; for a value that is not plain, the result or the exception of `encode_other`."""
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int:
            return value if -_EXACT < value < _EXACT else ["i", hex(value)]
        if kind is tuple or kind is frozenset:
            return [kind.__name__, [self.encode(one, memo) for one in value]]
        if kind in _CONTAINERS:
            known = memo.number(value)
            return ["@", known] if known is not None else self.contents(value, memo, memo.add(value))
        if kind is bytes:
            return ["b", value.decode("latin1")]
        if kind is complex:
            return ["c", value.real, value.imag]
        return self._encode_rare(value, kind, memo)

    def contents(self, value: Any, memo: Memo, number: int) -> list[Any]:
        """The JSON of a container with its contents, under its number in the memo."""
        kind = type(value)
        if kind is bytearray:
            return ["bytearray", number, value.decode("latin1")]
        if isinstance(value, dict):
            factory = getattr(value, "default_factory", None)
            default = self.encode(factory, memo) if isinstance(factory, type) else None
            return [kind.__name__, number, [self.encode(one, memo) for one in _contents(value)], default]
        limit = value.maxlen if kind is deque else None
        return [kind.__name__, number, [self.encode(one, memo) for one in value], limit]

    def _encode_rare(self, value: Any, kind: type, memo: Memo) -> Any:
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _STANDARD:
            return ["x", name, list(_STANDARD[name][0](value))]
        if kind is type and f"{value.__module__}.{value.__qualname__}" in _TYPES:
            return ["type", f"{value.__module__}.{value.__qualname__}"]
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return ["named", kind.__name__, list(kind._fields), [self.encode(one, memo) for one in value]]
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufc":
            if not value.shape:
                return self.encode(value.item(), memo)
            return [
                "array",
                value.dtype.str,
                list(value.shape),
                [self.encode(one, memo) for one in value.ravel().tolist()],
            ]
        return self.encode_other(value, memo)

    def encode_other(self, value: Any, memo: Memo) -> Any:
        """The JSON of a value that is not plain."""
        raise TypeError(f"{type(value).__name__} is not plain")

    def decode(self, given: Any, memo: Memo) -> Any:
        """The value that parsed JSON describes; raises an exception of any kind if it describes none."""
        if not isinstance(given, list):
            if isinstance(given, dict):
                raise ValueError("an object of JSON is not a value")
            return given
        tag = given[0]
        if tag == "@":
            return memo.objects[given[1]]
        if tag == "tuple":
            return tuple([self.decode(one, memo) for one in given[1]])
        if tag in _CONTAINER_NAMES:
            value = self._empty(given, memo)
            if memo.add(value) != given[1]:
                raise ValueError("a container out of order")
            self.fill(value, given, memo)
            return value
        if tag == "frozenset":
            return frozenset([self.decode(one, memo) for one in given[1]])
        if tag == "i":
            return int(given[1], 16)
        if tag == "b":
            return given[1].encode("latin1")
        return self._decode_rare(tag, given, memo)

    def _empty(self, given: list[Any], memo: Memo) -> Any:
        tag = given[0]
        if tag == "deque":
            return deque(maxlen=given[3])
        if tag == "defaultdict":
            return defaultdict(self.decode(given[3], memo))
        return _CONTAINER_NAMES[tag]()

    def fill(self, value: Any, given: list[Any], memo: Memo) -> None:
        """Give a container the contents of its JSON, in place."""
        if isinstance(value, bytearray):
            value[:] = given[2].encode("latin1")
            return
        parts = [self.decode(one, memo) for one in given[2]]
        value.clear()
        if isinstance(value, dict):
            for key, one in zip(parts[::2], parts[1::2], strict=True):  # `Counter.update` would add counts
                value[key] = one
        elif isinstance(value, set):
            value.update(parts)
        else:
            value.extend(parts)

    def _decode_rare(self, tag: str, given: list[Any], memo: Memo) -> Any:
        if tag == "c":
            return complex(float(given[1]), float(given[2]))
        if tag == "type":
            return _TYPES[given[1]]
        if tag == "named":
            return _named(str(given[1]), tuple(given[2]))(*[self.decode(one, memo) for one in given[3]])
        if tag == "array":
            if given[1][1] not in "biufc":
                raise ValueError("an array of something else than numbers")
            numbers = [self.decode(one, memo) for one in given[3]]
            return import_module("numpy").array(numbers, dtype=str(given[1])).reshape(given[2])
        if tag == "x":
            module, _, name = given[1].rpartition(".")
            special = _STANDARD[given[1]][1]  # KeyError: the class is not listed
            kind = getattr(import_module(module), name)
            return (getattr(kind, special) if special else kind)(*_scalars(given[2]))
        return self.decode_other(tag, given, memo)

    def decode_other(self, tag: str, given: list[Any], memo: Memo) -> Any:
        """The value of JSON with a tag that `encode_other` gave it."""
        raise ValueError(f"no value has the tag {tag!r}")


_CONTAINER_NAMES = {one.__name__: one for one in _CONTAINERS}
_named_types: dict[tuple[str, tuple[str, ...]], Any] = {}


def _named(name: str, fields: tuple[str, ...]) -> Any:
    """The type of a named tuple with this name and these fields; equal arguments give the same type."""
    if (name, fields) not in _named_types:
        _named_types[name, fields] = namedtuple(name, fields)
    return _named_types[name, fields]


def _scalars(values: Iterable[Any]) -> list[Any]:
    if any(type(one) not in (int, str, type(None)) for one in values):
        raise ValueError("a value of the standard library is made of numbers and texts")
    return list(values)


def standard_exception(module: str, name: str) -> type[BaseException] | None:
    """An exception class of an imported module of the standard library; None: there is none, or it is not allowed.

    Exceptions of test frameworks are not allowed, because a test runner would take them for its own and skip a test.
    """
    root = module.partition(".")[0]
    if root not in sys.stdlib_module_names or root in ("unittest", "doctest", "bdb", "test"):
        return None
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None
