"""The trajectories of a run for the page: a table for every step, and as many in full, token by token, as fit."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from megatron_grpo.data.rollout_files import count_rollouts, rollout_files, rows_of_file
from megatron_grpo.weights.source import local_folder

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


ROWS = 160_000
"""Most rows of all tables of a run; the steps share them equally."""
READ_TOKENS = 100_000_000
"""Tokens after which no more rollouts are read; the steps share them equally. They take about ten seconds."""
TOKENS = 2_000_000
"""Tokens of the trajectories in full; the steps share them equally. One takes about eight bytes of the page."""
HEAD = 160
"""Characters of a prompt or response that is not there in full."""
LONGEST = 1_200_000
"""Characters of a response that is; what is longer is cut, and says so."""


@dataclass(slots=True)
class Embedded:
    """How much of a run's trajectories the page holds."""

    steps: list[int] = field(default_factory=list)
    written: int = 0
    """Rollouts in the run's folder."""
    rows: int = 0
    full: int = 0
    remark: str | None = None
    """Why there are no tokens; None: there are."""
    used: set[int] = field(default_factory=set)
    """Ids of the tokens in the page."""


def embed_steps(
    folder: Path, vocabulary: TokenBytes | None, embedded: Embedded
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Step by step, the table of its trajectories in columns, with those in full under `full` by row.

    Args:
        folder: of the run.
        vocabulary: the tokens of the run's model; None: they are not known.
        embedded: filled in on the way.

    Raises:
        ValueError: a file of rollouts cannot be read; the text names it.
    """
    files = rollout_files(folder)
    for step, file in files:
        try:
            rows = _first_rows(step, file, rows=ROWS // len(files), tokens=READ_TOKENS // len(files))
            written = count_rollouts(file)
            table = _table(rows, vocabulary, TOKENS // len(files), embedded)
        except (ValueError, TypeError, LookupError, OSError) as error:  # pyarrow's errors are of these, without a name
            reason = " ".join(str(error).split())
            raise ValueError(f"{file} cannot be read as rollouts: {type(error).__name__}: {reason}") from error
        embedded.steps.append(step)
        embedded.written += written
        embedded.rows += len(rows)
        yield step, table


def _first_rows(step: int, file: Path, *, rows: int, tokens: int) -> list[dict[str, Any]]:
    """The first rollouts of a file up to a number of rows or tokens, at least one; prompts come in no order."""
    found: list[dict[str, Any]] = []
    for row in rows_of_file(step, file):
        found.append(row)
        tokens -= len(row["token_ids"])
        if len(found) >= rows or tokens <= 0:
            break
    return found


def token_table(vocabulary: TokenBytes | None, used: set[int]) -> dict[str, Any]:
    """The text of each token by id, and in base 64 the bytes of those that are no whole characters."""
    if vocabulary is None:
        return {}
    table: dict[str, Any] = {}
    for token_id in sorted(used):
        content = vocabulary.of(token_id)
        try:
            table[str(token_id)] = content.decode()
        except UnicodeDecodeError:
            table[str(token_id)] = [base64.b64encode(content).decode()]
    return table


def _table(
    rows: Sequence[Mapping[str, Any]], vocabulary: TokenBytes | None, tokens: int, embedded: Embedded
) -> dict[str, Any]:
    """Columns of a step's trajectories; `full` has, by number of the row, those of which the page holds everything."""
    chosen = _chosen(rows, tokens)
    prompts: dict[int, str] = {}
    table: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    for place, row in enumerate(rows):
        group = row["group"]
        if group not in prompts:
            prompts[group] = "" if vocabulary is None else _tail(vocabulary.text(row["token_ids"][: _prompt(row)]))
        length = LONGEST if place in chosen else HEAD
        advantages = row["advantages"]
        known = advantages is not None and len(advantages) > 0
        values = (
            *(row[name] for name in _AS_WRITTEN),
            len(row["logprobs"]),
            round(float(np.mean(advantages)), 5) if known else None,
            row["response"][:length],
            len(row["response"]),
        )
        for column, value in zip(table.values(), values, strict=True):
            column.append(value)
    embedded.full += len(chosen)
    return {
        **table,
        "prompts": {str(group): text for group, text in prompts.items()},
        "full": {str(place): _in_full(rows[place], vocabulary, embedded) for place in sorted(chosen)},
    }


_AS_WRITTEN = ("prompt_idx", "group", "sample", "reward", "correct", "stop_reason", "failure")
_COLUMNS = (*_AS_WRITTEN, "tokens", "advantage", "response", "characters")


def _chosen(rows: Sequence[Mapping[str, Any]], tokens: int) -> set[int]:
    """Rows to hold in full: whole groups, whose samples are to be compared, from all over the step."""
    groups: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault(row["group"], []).append(place)
    in_turn = _far_apart(list(groups.values()))
    chosen: set[int] = set()
    for place in (place for group in in_turn for place in group):
        tokens -= len(rows[place]["token_ids"])
        if tokens < 0 and chosen:
            break
        chosen.add(place)
    return chosen


def _far_apart(groups: list[list[int]]) -> list[list[int]]:
    """Groups in an order of which every beginning is spread over all of them (van der Corput's sequence)."""
    bits = max(len(groups) - 1, 1).bit_length()
    return [groups[place] for place in sorted(range(len(groups)), key=lambda place: f"{place:0{bits}b}"[::-1])]


def _in_full(row: Mapping[str, Any], vocabulary: TokenBytes | None, embedded: Embedded) -> dict[str, Any]:
    """Tokens and what is known of each, as short as it is exact enough to read."""
    full: dict[str, Any] = {"spans": row["spans"], "parts": row["reward_parts"]}
    if vocabulary is None:
        return full
    ids = row["token_ids"][:LONGEST].tolist()
    embedded.used.update(ids)
    full |= {"ids": ids, "logprobs": _rounded(row["logprobs"], 4)}
    if row["advantages"] is not None:
        advantages = _rounded(row["advantages"], 4)
        full["advantages"] = advantages[:1] if len(set(advantages)) == 1 else advantages
    if row["prev_logprobs"] is not None:
        full["gaps"] = [float(f"{gap:.3g}") for gap in (row["prev_logprobs"] - row["logprobs"]).tolist()]
    return full


def _rounded(values: Any, digits: int) -> list[float]:
    return [round(value, digits) for value in values.tolist()]


def _prompt(row: Mapping[str, Any]) -> int:
    """Tokens before the first that was sampled."""
    return row["spans"][0][0] if row["spans"] else len(row["token_ids"])


def _tail(text: str) -> str:
    """The end of a prompt in one line: what comes before is often the same for all."""
    return " ".join(text.split())[-HEAD:]
