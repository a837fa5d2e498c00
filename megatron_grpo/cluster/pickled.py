"""Many small objects for another process, pickled in one go."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

IN_BAND_BYTES = 4096
"""Arrays up to this size are copied among the rest; larger ones travel as they lie in memory."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Arrives as `value` itself. Ray's own pickling calls back into Python for every object, pickle's does not.

    Arrays arrive read-only. The value must not hold references of Ray's, which have to know who they are passed to.
    """

    value: Any

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        large: list[pickle.PickleBuffer] = []
        file = io.BytesIO()
        pickler = pickle.Pickler(file, protocol=5, buffer_callback=large.append)
        pickler.dispatch_table = {np.ndarray: _reduced}  # for a step's many short arrays, half the time of NumPy's own
        pickler.dump(self.value)
        return _unpacked, (file.getvalue(), *large)


def _reduced(array: NDArray[Any]) -> Any:
    """How an array of any shape and dtype is pickled: a short one as its bytes, others beside the rest."""
    if array.nbytes > IN_BAND_BYTES or array.dtype.hasobject or array.dtype.names:
        return array.__reduce_ex__(5)
    return _array, (array.tobytes(), array.dtype.str, array.shape)


def _array(data: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array of this shape and dtype."""
    return np.frombuffer(data, dtype).reshape(shape)


def _unpacked(data: bytes, *large: Any) -> Any:
    return pickle.loads(data, buffers=large)
