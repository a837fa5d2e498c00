"""What the ids of a tokenizer stand for, in bytes: a character may be spread over several tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_grpo.models.source import local_folder

TOKENIZER_FILE = "tokenizer.json"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"
"""How tokenizers of the SentencePiece kind write a space."""


class TokenBytes:
    """The bytes of each token of a model, read from its tokenizer.json alone."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: of a model in Hugging Face format.

        Raises:
            ValueError: there is no tokenizer.json, or it cannot be read.
        """
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # noqa: BLE001  # the package raises Exception itself, whatever is wrong
            raise ValueError(f"{folder / TOKENIZER_FILE} cannot be read: {error}") from None
        self._added = {number: one.content for number, one in self._tokenizer.get_added_tokens_decoder().items()}
        in_bytes = _of_kind(json.loads(self._tokenizer.to_str()).get("decoder"), "ByteLevel")
        self._alphabet = byte_alphabet() if in_bytes else None

    def of(self, token_id: int) -> bytes:
        """What the token stands for; of an id that the tokenizer does not have, its number in brackets."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return f"<{token_id}>".encode()
        if self._alphabet is not None:
            return bytes(self._alphabet[character] for character in token if character in self._alphabet)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_WORD_START, " ").encode()

    def text(self, token_ids: Iterable[int]) -> str:
        """The text of tokens, control tokens left out; what is no UTF-8 becomes U+FFFD."""
        shown = (self.of(one) for one in token_ids if one not in self._added)
        return b"".join(shown).decode(errors="replace")


def token_bytes_of(model: str) -> TokenBytes | None:
    """The tokens of a model by its path or hub name; None: it has no tokenizer.json on this machine.

    Raises:
        ValueError: the file is there and cannot be read.
    """
    folder = local_folder(model)
    return TokenBytes(folder) if folder is not None and (folder / TOKENIZER_FILE).exists() else None


def byte_alphabet() -> dict[str, int]:
    """The character by which byte-level tokenizers write each byte, as GPT-2 (Radford et al. 2019) chose them.

    Printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in their order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    itself = {chr(byte): byte for byte in printable}
    return itself | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _of_kind(decoder: Any, kind: str) -> bool:
    """Whether a decoder of a tokenizer.json, or one of those that it is made of, is of a kind."""
    if not isinstance(decoder, dict):
        return False
    return decoder.get("type") == kind or any(_of_kind(one, kind) for one in decoder.get("decoders", []))
