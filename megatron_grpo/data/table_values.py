"""Values of a table as in JSONL: no null-filled keys, and media as bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any


def strip_nulls(value: Any) -> Any:
    """Drop null keys from an object and all objects within.

    Arrow gives each object of a column the keys of all objects, so a null key means that the object lacks it. A message
    (an object with a role) keeps a null content, which chat templates distinguish from an empty content.
    """
    if isinstance(value, dict):
        nullable = "content" if "role" in value else None
        return {key: strip_nulls(member) for key, member in value.items() if member is not None or key == nullable}
    if isinstance(value, list) and any(isinstance(member, dict | list) for member in value):
        return [strip_nulls(member) for member in value]
    return value


def strip_messages(row: dict[str, Any]) -> dict[str, Any]:
    """Drop null keys from the messages of a row."""
    # A file that `datasets` or pandas wrote as JSON has null-filled messages too, and no template or API tells a null
    # name or tool_calls from a missing key.
    stripped = dict(row)
    for name, value in row.items():
        if isinstance(value, list) and all(isinstance(turn, dict) and "role" in turn for turn in value):
            stripped[name] = strip_nulls(value)
    return stripped


def find_nested_columns(features: Mapping[str, Any]) -> list[str]:
    """Find the columns whose values may hold objects."""
    return [name for name, feature in features.items() if type(feature).__name__ not in ("Value", "ClassLabel")]


def find_media_columns(features: Mapping[str, Any]) -> dict[str, str]:
    """Find columns with audio, images or video; kinds by name."""
    media = ((name, next(_find_media(feature), None)) for name, feature in features.items())
    return {name: type(part).__name__ for name, part in media if part is not None}


def _find_media(feature: Any) -> Iterator[Any]:
    if isinstance(feature, Mapping | list | tuple):
        for part in feature.values() if isinstance(feature, Mapping) else feature:
            yield from _find_media(part)
    elif hasattr(feature, "feature"):
        yield from _find_media(feature.feature)
    # Json is no medium: its decoding only parses a text.
    elif hasattr(feature, "decode") and type(feature).__name__ != "Json":
        yield feature


def copy_undecoded(features: Any) -> Any:
    """Copy the features of a set with media as {bytes, path}."""
    undecoded = copy.deepcopy(features)
    for column in list(undecoded):
        for part in _find_media(undecoded[column]):
            part.decode = False
        undecoded[column] = undecoded[column]  # `datasets` notes at the assignment which columns it has to decode
    return undecoded


def view_undecoded(dataset: Any) -> Any:
    """View a `datasets.Dataset` with media as {bytes, path}, without copying."""
    if not find_media_columns(dataset.features):
        return dataset
    from datasets import Dataset, DatasetInfo

    info = DatasetInfo(features=copy_undecoded(dataset.features))
    return Dataset(dataset.data, info=info, indices_table=dataset._indices)


class StreamedRows:
    """Rows of a `datasets.IterableDataset` as in JSONL, or of another iterable."""

    def __init__(self, stream: Any) -> None:
        self._nested: list[str] | None = None  # columns that may hold objects; None: the stream has no list of columns
        if getattr(stream, "features", None) is not None:
            self._nested = find_nested_columns(stream.features)
            if find_media_columns(stream.features):
                features = copy_undecoded(stream.features)  # decode(False) alone would leave Json as text
                stream = stream.decode(False).cast(features)
        self._stream = stream

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self._stream:
            names = list(row) if self._nested is None else self._nested
            yield {**row, **{name: strip_nulls(row[name]) for name in names if name in row}}
