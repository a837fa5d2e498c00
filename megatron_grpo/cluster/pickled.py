"""Pickling of many small objects in one go, for messages between processes."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IN_BAND_BYTES = 4096
"""Arrays up to this size are copied into the pickle; larger ones travel beside it without a copy."""


def pickled(value: Any) -> Any:
    """A stand-in for `value` in a message of Ray's, that arrives as `value` itself with read-only arrays.

    Ray's own pickling calls back into Python for every object; pickle's does not. The value must not hold object
    references: Ray has to see to whom they are passed.
    """
    return _Pickled(value)


@dataclass(frozen=True, slots=True)
class _Pickled:
    value: Any

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        large: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        pickler = pickle.Pickler(file, protocol=5, buffer_callback=large.append)
        pickler.dispatch_table = {np.ndarray: _reduced}  # for many short arrays half the time of NumPy's own
        pickler.dump(self.value)
        return _unpickled, (file.getvalue(), *large)


def _reduced(array: NDArray[Any]) -> Any:
    """How an array of any shape and dtype is pickled: a short one as its bytes, a large one beside the pickle."""
    if array.nbytes > IN_BAND_BYTES or array.dtype.hasobject or array.dtype.names:
        return array.__reduce_ex__(5)
    return _array, (array.tobytes(), array.dtype.str, array.shape)


def _array(data: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of this shape and dtype."""
    return np.frombuffer(data, dtype).reshape(shape)


def _unpickled(data: bytes, *large: Any) -> Any:
    return pickle.loads(data, buffers=large)
