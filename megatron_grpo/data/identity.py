"""Identity of a run's data: digests of the content of its sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError
from xxhash import xxh3_128

from megatron_grpo.config.errors import format_count
from megatron_grpo.config.outside_files import read_bytes
from megatron_grpo.config.schema import Config
from megatron_grpo.data.rows import SetReport, examine_set, find_row_kinds
from megatron_grpo.data.sources import is_named_set
from megatron_grpo.models.source import is_made_before_run


@dataclass(frozen=True, slots=True)
class SetIdentity:
    """A set of rows at the start of a run."""

    path: str  # path or hub name, with its subset and split where it has some, for messages
    digest: str | None = None  # of the file, or of the rows of a folder or hub set
    rows: int | None = None  # usable or not
    usable: str | None = None  # digest of the indices of the usable rows
    weight: float = 1.0

    def describe_rows(self) -> str:
        return f"{format_count('row', self.rows or 0)}, digest {(self.digest or '')[:12]}"


@dataclass(frozen=True, slots=True)
class DataIdentity:
    """Identities of a run's sets, by the keys of their paths."""

    training: Mapping[str, SetIdentity]
    validation: Mapping[str, SetIdentity]
    shuffle: bool
    streaming: bool

    @property
    def is_comparable(self) -> bool:
        """False if only the paths can be compared."""
        return self.streaming or any(identity.digest is not None for identity in self.training.values())


def identify(config: Config) -> DataIdentity:
    """Identify a run's data; reads every row that was not read before."""
    data = config.data
    training, validation = (
        {key: _identify_set(config, key) for key in sets} for sets in (data.training_sets, data.validation_sets)
    )
    return DataIdentity(training, validation, data.shuffle, data.streaming)


def _identify_set(config: Config, key: str) -> SetIdentity:
    training = config.data.training_sets
    dataset = training[key] if key in training else config.data.validation_sets[key]
    has_parts = is_named_set(dataset.path) or os.path.isdir(dataset.path)
    parts = [part for part in (dataset.subset, dataset.split) if has_parts and part is not None]
    path = "".join([dataset.path, *(f" ({part})" for part in parts)])
    report, is_streamed = SetReport(), config.data.streaming and key in training
    # The rows that prepare.name makes follow from it, and may be made only after this check.
    is_made = is_made_before_run(config, dataset.path)
    if config.reads_prompts and not is_streamed and not is_made and (has_parts or os.path.isfile(dataset.path)):
        report = examine_set(
            dataset, config.data, find_row_kinds(config, trains=key in training or not config.needs_generation)
        )
    if report.source is None:
        return SetIdentity(path, weight=dataset.weight)
    usable = xxh3_128(report.usable.tobytes()).hexdigest()
    return SetIdentity(path, report.digest, len(report.source), usable, dataset.weight)


def find_training_difference(before: DataIdentity, now: DataIdentity) -> str | None:
    """Find why training data differs from an earlier start's; None: equal."""
    if len(before.training) != len(now.training):
        return f"has {format_count('training set', len(now.training))}, and had {len(before.training)}"
    for (old_key, old), (key, new) in zip(before.training.items(), now.training.items(), strict=True):
        subject = f"{key}={new.path}"
        if old.digest is None or new.digest is None:  # a stream, or a set that was not read: only paths can be compared
            if not _is_same_path(old.path, new.path):
                return f"its {old_key} is {old.path}, this one's is {new.path}"
        elif old.digest != new.digest:
            origin = "" if _is_same_path(old.path, new.path) else f" in {old.path}"
            change = f"{new.describe_rows()}, and the run began with {old.describe_rows()}{origin}"
            return f"{subject} has other rows: {change}"
        elif old.usable != new.usable:
            reasons = "(data.bad_rows, data.processor, the columns)"
            return f"the usable rows of {subject} are others than when it began {reasons}"
        if old.weight != new.weight:
            return f"the weight of {subject} is {new.weight:g}, and was {old.weight:g}"
    for name in ("shuffle", "streaming"):
        old_value, value = (str(getattr(identity, name)).lower() for identity in (before, now))
        if value != old_value:
            return f"data.{name} is {value}, and was {old_value}"
    return None


def find_validation_differences(before: DataIdentity, now: DataIdentity) -> list[str]:
    """Find validation sets whose rows changed since an earlier start."""
    text = "; figures of validation before and after, and the ranking of checkpoints by them, cannot be compared"
    return [
        f"{key}={new.path} has other rows: {new.describe_rows()}, before {old.describe_rows()}{text}"
        for key, new in now.validation.items()
        if (old := before.validation.get(key)) is not None
        and None not in (old.digest, new.digest)
        and old.digest != new.digest
    ]


def _is_same_path(old: str, new: str) -> bool:
    return old == new or (Path(old).exists() and os.path.realpath(old) == os.path.realpath(new))


def read_identity(file: Path) -> DataIdentity | None:
    """Read a file of a DataIdentity as JSON; None: no file; ValueError: unreadable."""
    try:
        return TypeAdapter(DataIdentity).validate_json(read_bytes(file))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"])) or "the file"
        raise ValueError(f"{file} is damaged: {key}: {problem['msg']}") from None
