"""Reads a job's YAML within limits: a job is a few dozen lines, and YAML can say little that grows without end."""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 2**20
_DEEPEST = 20


def read_job_file(path: str) -> dict[Hashable, Any]:
    """The fields of a job.

    Raises:
        ValueError: the file cannot be read, or is no YAML mapping of fields; the text says why, without its name.
    """
    file = Path(os.path.expanduser(path))
    try:
        if not file.is_file():
            raise ValueError("no such file; give a YAML file of fields such as ratio_clip_max")
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"has {file.stat().st_size / 2**20:.0f} MiB; a job is a few fields in YAML")
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    try:
        content = yaml.load(text, Loader=_JobLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that there is not
        raise ValueError(f"is not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"must be a mapping of fields, not {type(content).__name__}")
    return content


class _JobLoader(yaml.SafeLoader):
    """Plain YAML: no aliases, with which a few lines can stand for gigabytes or hold themselves; no deep nesting; and
    no field twice, of which only the last would count."""

    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise yaml.composer.ComposerError(
                None, None, "has anchors or aliases (&, *); write it out", event.start_mark
            )
        if self._depth > _DEEPEST:
            raise yaml.composer.ComposerError(None, None, f"is nested more than {_DEEPEST} deep", event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"has {twice} twice", node.start_mark)
        return super().construct_mapping(node, deep)
