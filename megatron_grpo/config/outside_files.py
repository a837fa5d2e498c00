"""Files from outside the run, such as those of somebody else's run or model, read without harm.

A file may be a pipe that never ends, a link to a file of the reader's, gigabytes of nothing, or YAML and JSON that
unfold to more than memory or the interpreter's stack holds. All are refused before work is done.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Hashable
from pathlib import Path
from typing import Any, TextIO

import yaml

from megatron_grpo.config.outside_text import NESTING, make_line

MOST_BYTES = 2**26  # of a file that is read as a whole
LINES_BYTES = 2**31  # of a file of JSON lines
YAML_BYTES = 2**20  # the reader takes up to a second
_DIGITS = 100  # of a number in YAML: to read a number in base 60 takes time that grows with the square of its length
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where PyYAML has it, is ten times as fast


def require_regular(file: Path, *, links: bool = True) -> None:
    """Require a regular file, perhaps behind a link.

    ValueError: it is a pipe or device, which may never end, or without `links` a link, which may lead to a file of the
    reader's. OSError: there is none.
    """
    mode = (os.stat if links else os.lstat)(file).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(file))
    if stat.S_ISLNK(mode):
        raise ValueError(f"{file} is a link, which may lead to any file; put the file itself there")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{file} is a pipe or device, not a file")


def require_regular_files(folder: Path) -> None:
    """Require that a folder has no pipe or device; missing folders pass."""
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if not entry.is_dir() and Path(entry).exists():  # a link that leads nowhere has no end to wait for
            require_regular(Path(entry))


def read_bytes(file: Path, most_bytes: int = MOST_BYTES, *, links: bool = False) -> bytes:
    """Read a file as a whole.

    ValueError: it is no regular file, has more bytes, or is a link and `links` are not followed. OSError: as by `open`.
    """
    require_regular(file, links=links)
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"{file} has {size / 2**20:.0f} MiB, and at most {most_bytes / 2**20:.0f} are read")
        return stream.read(most_bytes)


def read_text(file: Path, most_bytes: int = MOST_BYTES) -> str:
    """Read a text in UTF-8; errors as of `read_bytes`."""
    try:
        return read_bytes(file, most_bytes).decode()
    except UnicodeDecodeError:
        raise ValueError(f"{file} is damaged: it is not UTF-8 text") from None


def read_json(file: Path, *, links: bool = False) -> Any:
    """Read a file of JSON; errors as of `read_bytes`, and ValueError: it is none."""
    content = read_bytes(file, links=links)
    try:
        return parse_file_json(content)
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def read_yaml(file: Path) -> Any:
    """Read a file of YAML; errors as of `read_bytes` and `parse_yaml`."""
    text = read_text(file, YAML_BYTES)
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{file} {error}") from None


def parse_file_json(text: str | bytes) -> Any:
    """Parse the JSON of a file.

    NaN may stand in it, unlike in the JSON of a call. ValueError: it is no JSON, or has more than NESTING levels.
    """
    try:
        value = json.loads(text)  # bytes: it then knows byte-order marks and UTF-16
    except RecursionError:
        value = None
    else:
        # Nearly all texts have too few brackets to be deep; the others are looked through.
        content = text.encode(errors="surrogatepass") if isinstance(text, str) else text
        if content.count(b"[") + content.count(b"{") <= NESTING or not _is_deeper(value, NESTING):
            return value
    raise ValueError(f"more than {NESTING} levels of lists and objects")


def parse_yaml(text: str, nesting: int = NESTING) -> Any:
    """Parse plain YAML.

    ValueError: it is none, or has anchors, deep nesting, repeated fields or endless numbers; its text has no subject.
    """
    try:
        _require_plain(text, nesting)
        return yaml.load(text, Loader=_PlainLoader)
    # PyYAML lets errors of its own pass for tags that do not fit their values, and for impossible dates.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise ValueError(f"is not valid YAML: {make_line(' '.join(str(error).split()))}") from None


def open_to_append(file: Path) -> TextIO:
    """Open a file of a run's folder to append lines.

    OSError: it is a link, pipe or device.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a pipe or device, not a file", str(file))
    # Line-buffered: the line of a step is written before the next step begins.
    return os.fdopen(descriptor, "a", buffering=1, encoding="utf-8", errors="backslashreplace")


class _PlainLoader(_Loader):
    """Loads YAML without repeated fields and endless numbers."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag in _NUMBER_TAGS and len(node.value) > _DIGITS:
            text = f"has a number of {len(node.value)} characters"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in names:
                raise yaml.constructor.ConstructorError(None, None, f"has {key.value} twice", node.start_mark)
            names.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return dict(super().construct_mapping(node, deep))


def _require_plain(text: str, nesting: int) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        refusal = None
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            refusal = "has anchors or aliases (&, *); write it out"
        elif isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            refusal = f"is nested more than {nesting} deep" if depth > nesting else None
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if refusal is not None:
            assert event.start_mark is not None, "a text has lines"
            raise ValueError(f"line {event.start_mark.line + 1} {refusal}")


def _is_deeper(value: Any, levels: int) -> bool:
    """True if a JSON value has more levels of lists and objects."""
    members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if members is None:
        return False
    return levels == 0 or any(_is_deeper(member, levels - 1) for member in members)
