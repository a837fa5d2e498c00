"""Functions over a step's tokens; a rollout worker imports this file, so it needs NumPy alone."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def shift(lengths: NDArray[np.int64], arrays: dict[str, NDArray[Any]], by: int) -> tuple[dict[str, NDArray[Any]], int]:
    """Something that needs the step's order: each token plus the number of its sequence, times `by`."""
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    return {"shifted": (arrays["token_ids"] + numbers * by).astype(np.int32)}, int(arrays["sampled"].sum())
