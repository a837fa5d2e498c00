"""Sources of rows: a file, a folder or a hub set, read by row number."""

from __future__ import annotations

import csv
import json
import mmap
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_grpo.config.data_schema import REASONING_GYM, DatasetConfig
from megatron_grpo.config.errors import RunError, select_first_line
from megatron_grpo.config.gym_schema import GymConfig
from megatron_grpo.config.paths import LFS_POINTER, is_hub_name, is_lfs_pointer
from megatron_grpo.data import table_values
from megatron_grpo.data.gym_rows import GymError, GymRows

Row = dict[str, Any]
HEAD_BYTES = 2**16
# Rows of a table that are converted to Python objects at a time; with audio, images or video a row may have megabytes.
BATCH_ROWS, MEDIA_BATCH_ROWS = 1000, 20
# Exceptions of pyarrow and `datasets` for a value that Python cannot hold, such as a date before the year 1.
_UNREADABLE_VALUE = (ArithmeticError, ValueError, TypeError, LookupError, RuntimeError)
_MAGIC = {
    b"\x1f\x8b": "is compressed with gzip; unpack it first (gunzip)",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it first (unzstd)",
    b"\xfd7zXZ\x00": "is compressed with xz; unpack it first (unxz)",
    b"BZh": "is compressed with bzip2; unpack it first (bunzip2)",
    b"PK\x03\x04": "is a zip archive; unpack it first",
    b"PAR1": "is a Parquet file; give it a name that ends in .parquet",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8",
    b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
}


def detect_binary_format(head: bytes) -> str | None:
    """Describe the binary format of a file; None: it may be text."""
    return next((text for magic, text in _MAGIC.items() if head.startswith(magic)), None)


def detect_wrong_format(head: bytes) -> str | None:
    """Describe a file's format if it is not JSONL, with advice.

    `head`: its first HEAD_BYTES bytes. None: the first line is an object, or a broken one.
    """
    binary = detect_binary_format(head)
    if binary is not None:
        return binary
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip().split(b"\n", 1)[0].strip()
    if not first or (first.startswith(b"{") and first != b"{"):
        return None
    if first == b"{":
        return "spreads an object over several lines; write one object a line (jq -c . FILE)"
    if first.startswith(b"["):
        return "is a JSON array; write one object a line (jq -c '.[]' FILE)"
    try:
        json.loads(first)
    except (ValueError, RecursionError):
        if b"," in first or b"\t" in first:
            return "looks like a table (CSV); give it a name that ends in .csv (or .tsv, with tabs)"
        return "is not JSONL: its first line is not an object {...}"
    return None


class SourceError(ValueError):
    """A set of rows cannot be read, for this reason."""


def parse_line(line: bytes) -> Row | str:
    """Parse a line of JSONL: an object, or an error."""
    try:
        text = line.decode().removeprefix("\ufeff")
        row = json.loads(text)
    except UnicodeDecodeError:
        return "is not UTF-8 text"
    except json.JSONDecodeError as error:
        content = error.doc.rstrip()
        advice = "; is the file truncated?" if error.pos >= len(content) or "Unterminated" in error.msg else ""
        if content[error.pos : error.pos + 1] == "'":
            advice = "; texts stand in double quotes"
        return f"is not valid JSON: {error.msg} at column {error.colno}{advice}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        return f"is not JSON that can be read: {error}"
    if not isinstance(row, dict):
        return f"is {type(row).__name__}, not an object {{...}}"
    row = table_values.strip_messages(row)
    return (_find_broken_text(row) or row) if "\\ud" in text or "\\uD" in text else row


def _find_broken_text(row: Row) -> str | None:
    # Half of a surrogate pair is valid in JSON, but UTF-8 cannot write it, so logs and dumps would fail on it later.
    for name, value in row.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            name = name.encode("unicode_escape").decode()
            return f"column {name!r} has {half}, half of a pair that stands for one character; drop the row or the half"
    return None


class JsonLines:
    """A JSONL file of any size, indexed by line offsets.

    Blank lines are not rows. `datasets` is not used: its JSON reader stops at the first bad line without its number,
    and gives every row the columns and types of all rows.
    """

    media: Mapping[str, str] = {}  # JSON has none

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._begins, self._numbers = array("q"), array("q")
        try:
            with path.open("rb") as file:
                kind = detect_wrong_format(file.read(HEAD_BYTES))
                if kind is not None:
                    raise SourceError(kind)
                file.seek(0)
                self._end = 0
                for number, line in enumerate(file, start=1):
                    if not line.isspace():
                        self._begins.append(self._end)
                        self._numbers.append(number)
                    self._end += len(line)
                # Mapped rather than read: a file may be larger than the memory, and processes share its pages.
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self._end else b""
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, number: int, /) -> Row:
        """Read a row, counted from 0; RunError: the file has changed."""
        row = self._read_row(number)
        if isinstance(row, str):
            raise RunError(f"{self.locate(number)} has changed since the run began: the row {row}")
        return row

    def read_all(self) -> Iterator[Row | str]:
        """Read all rows in order; a text replaces an unreadable row."""
        return map(self._read_row, range(len(self)))

    def locate(self, number: int) -> str:
        """Locate a row for messages, as file:line."""
        return f"{self.name}:{self._numbers[number]}"

    def _read_row(self, number: int) -> Row | str:
        begin = self._begins[number]
        end = self._begins[number + 1] if number + 1 < len(self._begins) else self._end
        return parse_line(self._content[begin:end])


class Table:
    """Rows of a Hugging Face dataset.

    Objects within the columns have no keys whose value is null, because Arrow fills in the keys of all other rows'
    objects; a column itself may be null. Audio, images and video are not decoded: their value is {bytes, path}.

    Args:
        lines: line of each row in a text file; empty: the set is not a text file.
        bad: numbers of lines that are not rows, with the reasons; they count as the last rows.
    """

    def __init__(self, dataset: Any, name: str, lines: Sequence[int] = (), bad: Sequence[tuple[int, str]] = ()) -> None:
        self._dataset, self.name, self._lines, self._bad = table_values.view_undecoded(dataset), name, lines, bad
        self._nested = table_values.find_nested_columns(dataset.features)
        self.media = table_values.find_media_columns(dataset.features)

    def __len__(self) -> int:
        return len(self._dataset) + len(self._bad)

    def __getitem__(self, number: int, /) -> Row:
        """Read a row, counted from 0; RunError: it cannot be read."""
        row = self._read_row(number)
        if isinstance(row, str):
            raise RunError(f"{self.locate(number)}: the row {row}")
        return row

    def read_all(self) -> Iterator[Row | str]:
        """Read all rows in order; a text replaces an unreadable row."""
        batch = MEDIA_BATCH_ROWS if self.media else BATCH_ROWS
        for begin in range(0, len(self._dataset), batch):
            try:
                columns = self._dataset[begin : begin + batch]
            except _UNREADABLE_VALUE:  # one bad value fails the batch: row by row, only its row is bad
                yield from map(self._read_row, range(begin, min(begin + batch, len(self._dataset))))
                continue
            for name in self._nested:
                columns[name] = [table_values.strip_nulls(value) for value in columns[name]]
            yield from (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        yield from (reason for _, reason in self._bad)

    def _read_row(self, number: int) -> Row | str:
        try:
            row = dict(self._dataset[number])
        except _UNREADABLE_VALUE as error:
            return f"has a value that cannot be read: {select_first_line(error)}"
        return {**row, **{name: table_values.strip_nulls(row[name]) for name in self._nested}}

    def locate(self, number: int) -> str:
        """Locate a row for messages, by line or number."""
        if number >= len(self._dataset):
            return f"{self.name}:{self._bad[number - len(self._dataset)][0]}"
        return f"{self.name}:{self._lines[number]}" if self._lines else f"{self.name}, row {number}"


Source = JsonLines | Table | GymRows


def open_source(config: DatasetConfig, gym: GymConfig | None = None) -> Source:
    """Open the rows of a set; downloads a hub set; SourceError: it is unreadable.

    `gym`: description of the rows of reasoning_gym.
    """
    path = Path(config.path)
    if config.path == REASONING_GYM:
        try:
            return GymRows(gym or GymConfig(), config.split)
        except GymError as error:
            raise SourceError(str(error)) from error
    if os.path.isdir(path) or is_named_set(config.path):
        return _load_dataset(config)
    if is_lfs_pointer(path):
        raise SourceError(LFS_POINTER)
    if not os.path.exists(path) or path.suffix not in _READERS:
        return JsonLines(path)
    try:
        return _READERS[path.suffix](path)
    except SourceError:
        raise  # it says already what is wrong
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror or select_first_line(error)}") from None
    except Exception as error:  # pyarrow and `datasets` raise many kinds for a damaged file
        reason = select_first_line(error.__cause__ or error)
        raise SourceError(f"is not a {path.suffix} file that can be read: {reason}") from error


def is_named_set(path: str) -> bool:
    """True for a set of the hub or of reasoning_gym."""
    endings = (*_READERS, ".jsonl", ".json", ".gz", ".zst", ".txt")
    return path == REASONING_GYM or (is_hub_name(path) and Path(path).suffix not in endings)


def _load_dataset(config: DatasetConfig) -> Source:
    from datasets import load_dataset, load_from_disk  # here: it takes a second to import

    folder = os.path.isdir(config.path)
    try:
        if folder and os.path.exists(os.path.join(config.path, "state.json")):
            dataset = load_from_disk(config.path)
        elif folder and os.path.exists(os.path.join(config.path, "dataset_dict.json")):
            dataset = load_from_disk(config.path)[config.split]
        else:
            dataset = load_dataset(config.path, config.subset, split=config.split)
    except KeyError as error:
        raise SourceError(f"has no split {config.split!r}") from error
    except Exception as error:  # raised by the hub, its HTTP library or the builder that reads the files
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        text = f"cannot be loaded (split {config.split}): {kind}{select_first_line(error.__cause__ or error)}"
        raise SourceError(text) from error
    return Table(dataset, config.path)


def _open_parquet(path: Path) -> Source:
    import pyarrow.parquet as pq
    from datasets import Dataset

    pq.ParquetFile(path).close()  # fails at once when the file is cut off
    dataset = Dataset.from_parquet(str(path))
    _validate(dataset.data.table)
    return Table(dataset, str(path))


def _open_arrow(path: Path) -> Source:
    import pyarrow as pa
    from datasets import Dataset

    with pa.memory_map(str(path)) as file:
        try:
            table = pa.ipc.open_file(file).read_all()
        except pa.ArrowInvalid:
            file.seek(0)
            table = pa.ipc.open_stream(file).read_all()
    _validate(table)
    return Table(Dataset(table), str(path))


def _validate(table: Any) -> None:
    # Offsets and texts are checked, because pyarrow reads past the end of damaged texts. The fingerprint that a Dataset
    # makes of its table does so already.
    table.validate(full=True)


def _open_csv(path: Path) -> Source:
    import pyarrow as pa
    from datasets import Dataset

    # The csv module reads it rather than pyarrow or `datasets`, which do not say in which line a bad row is.
    lines, bad = array("q"), list[tuple[int, str]]()
    batches: list[pa.RecordBatch] = []
    csv.field_size_limit(2**31 - 1)  # the default refuses texts above 128 KiB
    try:
        with path.open("rb") as head:
            kind = detect_binary_format(head.read(HEAD_BYTES))
        if kind is not None:
            raise SourceError(kind)
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
            names = next(reader, [])
            if not names or not all(names) or len(set(names)) < len(names):
                raise SourceError("is not CSV with a header: its first line has to name every column, each once")
            schema = pa.schema([(name, pa.string()) for name in names])
            good = _read_good_rows(reader, len(names), lines, bad)
            while rows := list(islice(good, 10 * BATCH_ROWS)):
                columns = [pa.array(column, type=pa.string()) for column in zip(*rows, strict=True)]
                batches.append(pa.record_batch(columns, schema=schema))
    except UnicodeDecodeError:
        raise SourceError("is not UTF-8 text") from None
    except csv.Error as error:
        raise SourceError(f"is not CSV: its header: {error}") from None
    return Table(Dataset(pa.Table.from_batches(batches, schema=schema)), str(path), lines, bad)


def _read_good_rows(reader: Any, columns: int, lines: array[int], bad: list[tuple[int, str]]) -> Iterator[list[str]]:
    # The reader is advanced by hand, because a `for` loop would end at the first bad row.
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad.append((reader.line_num, f"is not CSV: {error}"))
            continue
        if len(row) == columns:
            lines.append(reader.line_num)
            yield row
        elif row:  # an empty line is not a row
            bad.append((reader.line_num, f"has {len(row)} values, and the header names {columns} columns"))


_READERS = {".parquet": _open_parquet, ".arrow": _open_arrow, ".csv": _open_csv, ".tsv": _open_csv}
