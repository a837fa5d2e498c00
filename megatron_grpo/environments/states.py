"""States of rollouts on their way between processes: JSON where they are plain, else pickled."""

from __future__ import annotations

import json
import math
from typing import Any

from ray import cloudpickle

from megatron_grpo.batch.finished_samples import PICKLE


def pack_state(state: Any) -> bytes:
    """Convert a state to bytes, of JSON where possible."""
    try:
        if _is_plain(state):
            return json.dumps(state).encode()
    except RecursionError:
        pass
    return cloudpickle.dumps(state)


def unpack_state(content: bytes) -> Any:
    """Invert `pack_state`."""
    return cloudpickle.loads(content) if content.startswith(PICKLE) else json.loads(content)


def _is_plain(value: Any) -> bool:
    """True if a value comes back from JSON as it was."""
    kind = type(value)  # a subclass would come back as its base
    if kind is dict:
        return all(type(key) is str and _is_plain(part) for key, part in value.items())
    if kind is list:
        return all(map(_is_plain, value))
    return value is None or kind in (str, bool, int) or (kind is float and math.isfinite(value))
