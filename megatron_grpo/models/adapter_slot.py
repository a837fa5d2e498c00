"""The place of an adapter in engines; vLLM's workers import it, so it imports nothing of the package."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterSlot:
    """An adapter that engines keep beside the base model, in types of JSON."""

    name: str
    number: int  # by which vLLM knows it, from 1
    rank: int
    alpha: float
    modules: list[str]  # last parts of the names of adapted Hugging Face matrices
