"""A queue of one process's results in a file: for a writer that was forked, and may be killed at any moment."""

from __future__ import annotations

import os
import pickle
import queue
import tempfile
from pathlib import Path
from typing import Any


class ResultsFile:
    """Takes one result, from this process or from one that it forked; the file is gone once the result was taken.

    Pipes hold a limited amount that somebody has to read meanwhile; a manager, which Megatron-Core starts, is a process
    that imports everything anew, and outlives a rank that is killed.
    """

    def __init__(self) -> None:
        self._file = Path(tempfile.gettempdir()) / f"megatron_grpo_{os.getpid()}_{id(self)}.results"

    def put(self, result: Any) -> None:
        """Leave the result, in one piece."""
        partial = self._file.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(result))
        partial.replace(self._file)

    def get_nowait(self) -> Any:
        """The result.

        Raises:
            queue.Empty: nobody has left one.
        """
        try:
            content = self._file.read_bytes()
        except FileNotFoundError:
            raise queue.Empty from None
        self._file.unlink()
        return pickle.loads(content)  # of a process that this one forked
