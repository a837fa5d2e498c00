"""Names the supported family whose tensors are the most like those of an unsupported model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megatron_grpo.models.families import list_families, list_rows
from megatron_grpo.models.families.family import Family
from megatron_grpo.models.stored_tensors import EMBEDDING, HEAD, list_stored_tensors

_SHOWN = 6
"""Most names of each kind in the message."""
_OUTSIDE_LAYERS = {EMBEDDING, HEAD, "model.norm.weight"}


def describe_nearest_family(folder: Path) -> str:
    """Describe the supported family that a folder's tensors resemble most.

    The text names the tensors that this family lacks and those that it has beyond the folder's. It is empty if the
    folder has no weights that can be read.
    """
    try:
        names = _number_alike(list_stored_tensors(folder))
    except ValueError:
        return ""
    tables = {family.name: _list_tensors(family, names) for family in list_families()}
    nearest = max(tables, key=lambda name: len(names & tables[name]) / len(names | tables[name]))
    unknown, missing = names - tables[nearest], tables[nearest] - names - {HEAD}
    if not unknown and not missing:
        return f" All of its tensors have names of {nearest}, so it may differ in numbers or operations alone."
    lists = [f"without a row in its tables: {_write_first(unknown)}"] if unknown else []
    lists += [f"only in its tables: {_write_first(missing)}"] if missing else []
    return f" The nearest family is {nearest}; {'; '.join(lists)}. docs/extending.md shows how to add a family."


def _number_alike(names: Iterable[str]) -> set[str]:
    # A scale belongs to a quantized tensor, and text inside a model for images has a prefix.
    plain = (name.replace("language_model.", "") for name in names if not name.endswith(("_scale_inv", "_scale")))
    return {re.sub(r"\.\d+\.", ".N.", name) for name in plain}


def _list_tensors(family: Family, names: set[str]) -> set[str]:
    """List a family's tensors, with experts if the names have some."""
    rows, absent = list_rows(family), set()
    if any(".experts." in name for name in names) and any(row.per_expert for row in rows):
        # Such models may have no dense layer, and their experts one of two forms.
        has_single = any(".experts.N." in name for name in names)
        absent = {"dense", "packed_experts" if has_single else "single_experts"}
    rows = [row for row in rows if row.kind not in absent]
    tensors = (tensor.name.format(layer=0, expert=0) for row in rows for tensor in row.hf)
    return _number_alike(tensors) | set(map(family.rename, _OUTSIDE_LAYERS))


def _write_first(names: set[str]) -> str:
    first = sorted(names)[:_SHOWN]
    return ", ".join(first) + (f" and {len(names) - len(first)} more" if len(names) > len(first) else "")
