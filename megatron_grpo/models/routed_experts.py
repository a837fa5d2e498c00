"""Layout of the experts that an engine chose for each token, as training's router replays them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.models.shape import ModelShape

UNKNOWN = -1  # where a token's experts are not known


@dataclass(frozen=True, slots=True)
class RoutedForm:
    """Layout of recorded router choices: rows are tokens, columns are chosen experts."""

    layers: tuple[int, ...]  # numbers of the layers with experts among all layers, from 0
    top_k: int  # experts of a token in one layer
    experts: int  # experts in one layer

    @staticmethod
    def from_shape(shape: ModelShape) -> RoutedForm:
        experts = shape.experts
        assert experts is not None, "a model without experts routes nothing"
        layers = tuple(layer for layer, has_experts in enumerate(experts.layers) if has_experts)
        return RoutedForm(layers, experts.top_k, experts.count)

    @property
    def columns(self) -> int:
        """Columns of the arrays: layers with experts * experts of a token."""
        return len(self.layers) * self.top_k

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest type for the number of every expert, signed because of UNKNOWN."""
        return np.dtype(np.int8 if self.experts <= 2**7 else np.int16)

    def from_engine(self, chosen: NDArray[np.integer]) -> NDArray[Any]:
        """Convert the experts that vLLM reports to [tokens, columns], of `dtype`.

        `chosen`: [tokens, all layers, experts of a token], integers; layers without experts hold anything.
        """
        _, layers, top_k = chosen.shape
        assert layers > self.layers[-1], f"{layers} layers, and layer {self.layers[-1]} has experts"
        assert top_k == self.top_k, f"{top_k} experts of a token, expected {self.top_k}"
        return chosen[:, list(self.layers)].astype(self.dtype).reshape(len(chosen), self.columns)

    def concatenate(self, sequences: Sequence[tuple[int, NDArray[Any] | None]]) -> NDArray[Any]:
        """Concatenate the experts of sequences: [tokens, columns], of `dtype`.

        `sequences`: for each its number of tokens, and the experts of its first tokens, [first tokens, columns], of
        `dtype`; None: no experts are known. Other tokens have UNKNOWN.
        """
        choices = np.full((sum(tokens for tokens, _ in sequences), self.columns), UNKNOWN, dtype=self.dtype)
        begin = 0
        for tokens, recorded in sequences:
            if recorded is not None:
                assert len(recorded) <= tokens, f"{len(recorded)} rows of {tokens} tokens"
                choices[begin : begin + len(recorded)] = recorded
            begin += tokens
        return choices
