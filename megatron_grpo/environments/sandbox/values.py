"""Plain Python values as JSON; containers keep their identity and their changes.

The two processes of a Python test exchange these texts. Values are rebuilt as exact built-in types. The sender is not
trusted: a text that describes no value raises an ordinary exception, which the reader turns into the end of the test.
"""

from __future__ import annotations

import builtins
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

# Larger integers are sent in hexadecimal, which has no limit of digits and is parsed in linear time.
_LARGE_INTEGER = 1 << 53
# Mutable types: their values may repeat in a message, contain themselves, and change in a call.
_CONTAINERS = frozenset({list, set, bytearray, deque, dict, OrderedDict, Counter, defaultdict})
# Immutable types of the standard library: the arguments that rebuild a value, and the constructor if it has a name.
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
_TYPES = {f"builtins.{kind.__name__}": kind for kind in vars(builtins).values() if isinstance(kind, type)}
_TYPES |= {f"collections.{kind.__name__}": kind for kind in (OrderedDict, Counter, defaultdict, deque)}
_CONTAINER_NAMES = {kind.__name__: kind for kind in _CONTAINERS}


class Memo:
    """Containers of one request and its reply, numbered in order."""

    def __init__(self) -> None:
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}  # by id of the container
        self._before: list[list[Any]] = []

    def add(self, value: Any) -> int:
        """Number a container, and keep it alive."""
        self.numbers[id(value)] = len(self.objects)
        self.objects.append(value)
        return len(self.objects) - 1

    def note_contents(self) -> None:
        """Remember the objects in every container, for `list_changed`."""
        self._before = [_list_contents(value) for value in self.objects]

    def list_changed(self) -> list[int]:
        """List containers whose objects are not those at `note_contents`."""
        pairs = zip(self._before, map(_list_contents, self.objects), strict=False)
        return [
            number
            for number, (old, new) in enumerate(pairs)
            if len(old) != len(new) or any(before is not after for before, after in zip(old, new, strict=True))
        ]


def _list_contents(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [key_or_value for pair in value.items() for key_or_value in pair]
    return list(value)


class Codec:
    """Converts plain values to and from JSON.

    For other values subclasses override `encode_other` and `decode_other`.
    """

    def encode(self, value: Any, memo: Memo) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int:
            return value if -_LARGE_INTEGER < value < _LARGE_INTEGER else ["i", hex(value)]
        if kind is tuple or kind is frozenset:
            return [kind.__name__, [self.encode(element, memo) for element in value]]
        if kind in _CONTAINERS:
            number = memo.numbers.get(id(value))
            return ["@", number] if number is not None else self.encode_contents(value, memo, memo.add(value))
        if kind is bytes:
            return ["b", value.decode("latin1")]
        if kind is complex:
            return ["c", value.real, value.imag]
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _STANDARD:
            return ["x", name, list(_STANDARD[name][0](value))]
        if kind is type and f"{value.__module__}.{value.__qualname__}" in _TYPES:
            return ["type", f"{value.__module__}.{value.__qualname__}"]
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            return ["named", kind.__name__, list(kind._fields), [self.encode(element, memo) for element in value]]
        if kind.__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biufc":
            if not value.shape:
                return self.encode(value.item(), memo)
            numbers = [self.encode(number, memo) for number in value.ravel().tolist()]
            return ["array", value.dtype.str, list(value.shape), numbers]
        return self.encode_other(value, memo)

    def encode_contents(self, value: Any, memo: Memo, number: int) -> list[Any]:
        kind = type(value)
        if kind is bytearray:
            return ["bytearray", number, value.decode("latin1")]
        if isinstance(value, dict):
            factory = getattr(value, "default_factory", None)
            default = self.encode(factory, memo) if isinstance(factory, type) else None
            return [kind.__name__, number, [self.encode(content, memo) for content in _list_contents(value)], default]
        limit = value.maxlen if kind is deque else None
        return [kind.__name__, number, [self.encode(element, memo) for element in value], limit]

    def encode_other(self, value: Any, memo: Memo) -> Any:
        """Convert other values to JSON with a tag."""
        raise TypeError(f"{type(value).__name__} is not plain")

    def decode(self, encoded: Any, memo: Memo) -> Any:
        """Rebuild a value; raises any exception if JSON describes none."""
        if not isinstance(encoded, list):
            if isinstance(encoded, dict):
                raise ValueError("an object of JSON is not a value")
            return encoded
        tag = encoded[0]
        if tag == "@":
            return memo.objects[encoded[1]]
        if tag == "tuple":
            return tuple([self.decode(element, memo) for element in encoded[1]])
        if tag in _CONTAINER_NAMES:
            if tag == "defaultdict":
                value: Any = defaultdict(self.decode(encoded[3], memo))
            else:
                value = deque(maxlen=encoded[3]) if tag == "deque" else _CONTAINER_NAMES[tag]()
            if memo.add(value) != encoded[1]:
                raise ValueError("a container out of order")
            self.fill(value, encoded, memo)
            return value
        if tag == "frozenset":
            return frozenset([self.decode(element, memo) for element in encoded[1]])
        if tag == "i":
            return int(encoded[1], 16)
        if tag == "b":
            return encoded[1].encode("latin1")
        return self._decode_rare(tag, encoded, memo)

    def fill(self, value: Any, encoded: list[Any], memo: Memo) -> None:
        """Replace the contents of a container by those of its JSON."""
        if isinstance(value, bytearray):
            value[:] = encoded[2].encode("latin1")
            return
        contents = [self.decode(content, memo) for content in encoded[2]]
        value.clear()
        if isinstance(value, dict):
            for key, element in zip(contents[::2], contents[1::2], strict=True):  # `Counter.update` would add counts
                value[key] = element
        elif isinstance(value, set):
            value.update(contents)
        else:
            value.extend(contents)

    def _decode_rare(self, tag: str, encoded: list[Any], memo: Memo) -> Any:
        if tag == "c":
            return complex(float(encoded[1]), float(encoded[2]))
        if tag == "type":
            return _TYPES[encoded[1]]
        if tag == "named":
            kind = _make_named_tuple(str(encoded[1]), tuple(encoded[2]))
            return kind(*[self.decode(element, memo) for element in encoded[3]])
        if tag == "array":
            if encoded[1][1] not in "biufc":
                raise ValueError("an array of something else than numbers")
            numbers = [self.decode(number, memo) for number in encoded[3]]
            return import_module("numpy").array(numbers, dtype=str(encoded[1])).reshape(encoded[2])
        if tag == "x":
            module, _, name = encoded[1].rpartition(".")
            constructor = _STANDARD[encoded[1]][1]  # KeyError: the class is not listed
            kind = getattr(import_module(module), name)
            if any(type(argument) not in (int, str, type(None)) for argument in encoded[2]):
                raise ValueError("a value of the standard library is made of numbers and texts")
            return (getattr(kind, constructor) if constructor else kind)(*encoded[2])
        return self.decode_other(tag, encoded, memo)

    def decode_other(self, tag: str, encoded: list[Any], memo: Memo) -> Any:
        """Rebuild the value of JSON from `encode_other`."""
        raise ValueError(f"no value has the tag {tag!r}")


@cache
def _make_named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    return namedtuple(name, fields)


def find_standard_exception(module: str, name: str) -> type[BaseException] | None:
    """Find an allowed exception class of a standard module."""
    root = module.partition(".")[0]
    # A test runner would take exceptions of test frameworks for its own and skip a test.
    if root not in sys.stdlib_module_names or root in ("unittest", "doctest", "bdb", "test"):
        return None
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None
