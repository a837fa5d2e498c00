"""Console output whose errors end no run."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from megatron_grpo.config.outside_text import replace_controls

NOBODY_READS = (errno.EPIPE, errno.EIO)  # errors of a pipe whose reader has ended, and of a terminal that was closed


class TolerantStream:
    """A text stream that escapes unknown characters (\\u2192) and outlives its reader.

    After the errors in `ignores` the text is lost, and nothing is raised. With `is_plain` control characters become
    escapes, too: files of a run from elsewhere have any text.
    """

    def __init__(self, stream: TextIO, *, ignores: tuple[type[Exception], ...], is_plain: bool = False) -> None:
        self._stream, self._ignores, self._is_plain = stream, ignores, is_plain

    def write(self, text: str) -> int:
        """Write a text; return its length."""
        plain = replace_controls(text) if self._is_plain else text
        try:
            try:
                self._stream.write(plain)
            except UnicodeEncodeError:
                # The terminal of a job is often ASCII, and responses have any characters.
                encoding = self._stream.encoding or "ascii"
                self._stream.write(plain.encode(encoding, "backslashreplace").decode(encoding))
        except self._ignores as error:
            self._discard_rest(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write the buffered text."""
        try:
            self._stream.flush()
        except self._ignores as error:
            self._discard_rest(error)

    def _discard_rest(self, error: Exception) -> None:
        if getattr(error, "errno", None) not in NOBODY_READS:
            return
        # The buffered text would fail again when Python ends, which flushes its streams: it goes to the null device.
        with suppress(OSError, ValueError):  # the stream may have no file
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def tolerant_output(*, of_run: bool = False) -> Iterator[None]:
    """Make sys.stdout and sys.stderr `TolerantStream`s while the body runs.

    With `of_run` the output only accompanies a run, which no error of the console may end; else it is the result of the
    command, which a full disk then fails, and standard output steers no terminal.
    """
    ignores = (OSError, ValueError) if of_run else (BrokenPipeError,)
    before = sys.stdout, sys.stderr
    # A stream is None where its descriptor was closed before Python started.
    streams = [
        None if stream is None else cast(TextIO, TolerantStream(stream, ignores=ignores, is_plain=is_plain))
        for stream, is_plain in zip(before, (not of_run, False), strict=True)
    ]
    sys.stdout, sys.stderr = cast(tuple[TextIO, TextIO], tuple(streams))
    try:
        yield
    finally:
        for stream in streams:
            if stream is not None:
                stream.flush()
        # The body may have put streams of its own in their place, as a test or a notebook does.
        if sys.stdout is streams[0]:
            sys.stdout = before[0]
        if sys.stderr is streams[1]:
            sys.stderr = before[1]
