"""Output of an environment's programs in the log: line by line, made safe, up to a limit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from megatron_grpo.config.outside_text import make_line

MAX_LINES = 1000  # of a program until it ends; a longer line counts as several
_LINE_BYTES = 4096

logger = logging.getLogger(__name__)


@contextmanager
def log_output(title: str) -> Iterator[TextIO]:
    """Open a file for a program's output, whose lines become records of the log.

    Lines beyond MAX_LINES are read and left out, so that the program never waits.
    """
    reading, writing = os.pipe()
    threading.Thread(target=_log_lines, args=(reading, title), name=f"output of {title}", daemon=True).start()
    with os.fdopen(writing, "w") as file:
        yield file


def _log_lines(descriptor: int, title: str) -> None:
    lines = 0
    with os.fdopen(descriptor, "rb") as output:
        while line := output.readline(_LINE_BYTES):
            lines += 1
            if lines <= MAX_LINES:
                logger.info("%s: %s", title, make_line(line.decode(errors="replace").rstrip("\r\n")))
            elif lines == MAX_LINES + 1:
                logger.warning("%s has written %d lines; the others are left out", title, MAX_LINES)
