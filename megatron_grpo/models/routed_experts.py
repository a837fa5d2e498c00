"""The experts that an engine chose for each token, in as few bits as their numbers need."""

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
    """Layout of recorded router choices: a row of bytes for each token.

    A row has the same number of bytes for every layer with experts. A layer's bytes hold a code of `bits` bits for each
    chosen expert, the lowest bits first. A layer of zeros has no record. Where a token has several experts, the code is
    the expert's number, since expert 0 is not chosen twice; with one expert it is the number plus 1.

    Example: of 8 experts, 2 and 5 were chosen in the first layer, and nothing is known of the second
        RoutedForm(layers=(0, 3), top_k=2, experts=8).pack(np.array([[[2, 5], [-1, -1]]]))  # [[0b101_010, 0]]
    """

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
    def _first_code(self) -> int:
        return int(self.top_k == 1)

    @property
    def bits(self) -> int:
        """Bits of a chosen expert."""
        return max(1, (self.experts - 1 + self._first_code).bit_length())

    @property
    def layer_bytes(self) -> int:
        """Bytes of a token in one layer."""
        return -(-self.top_k * self.bits // 8)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers with experts."""
        return len(self.layers) * self.layer_bytes

    def _list_parts(self, choice: int) -> list[tuple[int, int]]:
        """List the bytes of a code, each with the shift to the left."""
        first = choice * self.bits
        return [(byte, first - 8 * byte) for byte in range(first // 8, (first + self.bits - 1) // 8 + 1)]

    def pack(self, chosen: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Pack experts into bytes: [tokens, layers * layer_bytes].

        `chosen`: [tokens, any layers, experts of a token], -1 where they are unknown.
        """
        tokens, layers, _ = chosen.shape
        packed = np.zeros((tokens, layers, self.layer_bytes), dtype=np.uint8)
        # Shifts of whole codes: numpy takes several times as long for an array of single bits.
        for choice in range(self.top_k):
            code = chosen[:, :, choice].astype(np.uint16) + np.uint16(self._first_code)
            for byte, shift in self._list_parts(choice):
                packed[:, :, byte] |= (code << shift if shift >= 0 else code >> -shift).astype(np.uint8)
        packed[chosen[:, :, 0] < 0] = 0
        return packed.reshape(tokens, layers * self.layer_bytes)

    def unpack(self, packed: NDArray[np.uint8]) -> NDArray[np.int16]:
        """Unpack to [tokens, layers, experts of a token], inverting `pack`."""
        by_layer = packed.reshape(len(packed), packed.shape[1] // self.layer_bytes, self.layer_bytes)
        chosen = np.empty((*by_layer.shape[:2], self.top_k), dtype=np.int16)
        for choice in range(self.top_k):
            code = np.zeros(by_layer.shape[:2], dtype=np.uint16)
            for byte, shift in self._list_parts(choice):
                part = by_layer[:, :, byte].astype(np.uint16)
                code |= part >> shift if shift >= 0 else part << -shift
            chosen[:, :, choice] = code & np.uint16(2**self.bits - 1)
        chosen -= self._first_code
        chosen[~by_layer.any(axis=2)] = UNKNOWN
        return chosen

    def select_layers(self, packed: NDArray[np.uint8], layers: Sequence[int]) -> NDArray[np.uint8]:
        """Select the bytes of layers, given by indices in `self.layers`."""
        by_layer = packed.reshape(len(packed), len(self.layers), self.layer_bytes)
        return by_layer[:, list(layers)].reshape(len(packed), len(layers) * self.layer_bytes)

    def from_engine(self, chosen: NDArray[np.integer]) -> NDArray[np.uint8]:
        """Pack the experts that vLLM reports: [tokens, token_bytes].

        `chosen`: [tokens, all layers, experts of a token], integers; layers without experts hold anything.
        """
        _, layers, top_k = chosen.shape
        assert layers > self.layers[-1], f"{layers} layers, and layer {self.layers[-1]} has experts"
        assert top_k == self.top_k, f"{top_k} experts of a token, expected {self.top_k}"
        return self.pack(chosen[:, list(self.layers)])

    def concatenate(self, sequences: Sequence[tuple[int, NDArray[Any] | None]]) -> NDArray[np.uint8]:
        """Concatenate the rows of sequences: [tokens, token_bytes].

        `sequences`: for each its number of tokens, and the rows of its first tokens; None: it has none. Tokens without
        a row have zeros, no record.
        """
        rows = np.zeros((sum(tokens for tokens, _ in sequences), self.token_bytes), dtype=np.uint8)
        begin = 0
        for tokens, recorded in sequences:
            if recorded is not None:
                assert len(recorded) <= tokens, f"{len(recorded)} rows of {tokens} tokens"
                rows[begin : begin + len(recorded)] = recorded
            begin += tokens
        return rows
