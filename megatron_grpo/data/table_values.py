"""Values of a table as JSONL would have them: without null-filled keys, and with media as bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any


def strip_nulls(value: Any) -> Any:
    """Drop keys whose value is null from an object and all objects within it.

    Arrow gives each object of a column the keys of all others, so a null key means that the object lacks it. A message
    (an object with a role) keeps a null content, which chat templates distinguish from an empty one.
    """
    if isinstance(value, dict):
        kept = "content" if "role" in value else None
        return {key: strip_nulls(item) for key, item in value.items() if item is not None or key == kept}
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return [strip_nulls(item) for item in value]
    return value


def strip_messages(row: dict[str, Any]) -> dict[str, Any]:
    """The row with null keys dropped from its messages; other columns stay as they are.

    A file that `datasets` or pandas wrote as JSON has null-filled messages too, and no template or API distinguishes a
    null name or tool_calls from none.
    """
    messages = [name for name, value in row.items() if _are_messages(value)]
    return {**row, **{name: strip_nulls(row[name]) for name in messages}} if messages else row


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(turn, dict) and "role" in turn for turn in value)


def find_nested_columns(features: Mapping[str, Any]) -> list[str]:
    """Names of the columns whose values may hold objects."""
    return [name for name, feature in features.items() if type(feature).__name__ not in ("Value", "ClassLabel")]


def find_media_columns(features: Mapping[str, Any]) -> dict[str, str]:
    """Columns that hold audio, images, video or other media, also within lists and objects: the kind, by name."""
    kinds = {
        name: next((type(part).__name__ for part in _media_of(feature)), None) for name, feature in features.items()
    }
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _media_of(feature: Any) -> Iterator[Any]:
    """The features within a feature of `datasets` that decode files (Json, which only parses a text, is none)."""
    if isinstance(feature, Mapping):
        for part in feature.values():
            yield from _media_of(part)
    elif isinstance(feature, list | tuple):
        for part in feature:
            yield from _media_of(part)
    elif hasattr(feature, "feature"):
        yield from _media_of(feature.feature)
    elif hasattr(feature, "decode") and type(feature).__name__ != "Json":
        yield feature


def copy_undecoded(features: Any) -> Any:
    """A copy of the features of a set with media as {bytes, path}, so that no row is decoded."""
    changed = copy.deepcopy(features)
    for column in list(changed):
        for part in _media_of(changed[column]):
            part.decode = False
        changed[column] = changed[column]  # `datasets` notes at the assignment which columns it has to decode
    return changed


def view_undecoded(dataset: Any) -> Any:
    """A view of a `datasets.Dataset` with media as {bytes, path}; nothing is copied or written."""
    if not find_media_columns(dataset.features):
        return dataset
    from datasets import Dataset, DatasetInfo

    info = DatasetInfo(features=copy_undecoded(dataset.features))
    return Dataset(dataset.data, info=info, indices_table=dataset._indices)


class StreamedRows:
    """The rows of a stream of `datasets`, with media as {bytes, path} and without null-filled keys."""

    def __init__(self, stream: Any) -> None:
        """
        Args:
            stream: a `datasets.IterableDataset`.
        """
        self._nested: list[str] | None = None
        """Columns that may hold objects; None: the stream does not know its columns."""
        if stream.features is not None:
            self._nested = find_nested_columns(stream.features)
            if find_media_columns(stream.features):
                features = copy_undecoded(stream.features)  # decode(False) alone would leave Json as text
                stream = stream.decode(False).cast(features)
        self._stream = stream

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for row in self._stream:
            names = list(row) if self._nested is None else self._nested
            yield {**row, **{name: strip_nulls(row[name]) for name in names if name in row}}
