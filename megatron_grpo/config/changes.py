"""Which keys of a section a run has set to something else than their defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_grpo.config.schema import Config


def changed(config: Config, section: str) -> Iterator[tuple[str, Any]]:
    """Leaves of a section that are not at their defaults, with their values."""
    defaults = dict(leaves(dataclasses.asdict(getattr(Config(), section)), f"{section}."))
    for key, value in leaves(dataclasses.asdict(getattr(config, section)), f"{section}."):
        if key not in defaults or value != defaults[key]:  # fields that are passed on have no default here
            yield key, value


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of everything in nested mappings that is no mapping itself."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
