"""Many small objects for another process, pickled in one go."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

IN_BAND_BYTES = 4096
"""Arrays up to this size are copied among the rest; larger ones travel as they lie in memory."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Arrives as `value` itself. Ray's own pickling calls back into Python for every object, pickle's does not.

    The value must not hold references of Ray's, which have to know who they are passed to.
    """

    value: Any

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        large: list[pickle.PickleBuffer] = []

        def is_small(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes > IN_BAND_BYTES:
                large.append(buffer)
                return False
            return True

        data = pickle.dumps(self.value, protocol=5, buffer_callback=is_small)
        return _unpacked, (data, *large)


def _unpacked(data: bytes, *large: Any) -> Any:
    return pickle.loads(data, buffers=large)
