"""Tables of trajectories for the report page, some of them in full, token by token."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from megatron_grpo.batch.rollout_files import (
    ROLLOUTS_FOLDER,
    ROWS_FOLDER,
    count_rollouts,
    find_recorded_steps,
    read_rows,
)
from megatron_grpo.batch.trajectory import list_suspicions
from megatron_grpo.models.source import find_local_folder
from megatron_grpo.observability.page.thumbnails import add_images

TOKENIZER_FILE = "tokenizer.json"
LEAST_GAP = -40.0  # limit of log ratios, as in the metrics of a step
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"  # what SentencePiece tokenizers write for a space
# These three limits of a run are divided equally over its steps.
MAX_ROWS = 160_000  # most rows in all tables
MAX_READ_TOKENS = 100_000_000  # most tokens of the rollouts that are read, which takes about ten seconds
MAX_FULL_TOKENS = 2_000_000  # most tokens of full trajectories, about eight bytes of the page each
MAX_ROW_CHARACTERS = 8_000_000  # most characters of answers and columns, also divided over the steps
MAX_THUMBNAIL_CHARACTERS = 16_000_000  # of thumbnails, in base 64, also divided over the steps
COLUMN_EXCERPT = 400  # most characters of a column
ANSWER_EXCERPT = 2000  # most characters of an answer
_KEPT_OF_PREFIX = 24  # characters that all prompts of a step have in common, before those that differ
EXCERPT = 160  # most characters of a prompt, and of a response that is not shown in full
MAX_FULL_LENGTH = 1_200_000  # most characters and tokens of a response shown in full; the page says if it is cut
_COPIED_COLUMNS = ("prompt_idx", "group", "sample", "reward", "correct", "stop_reason", "fault", "failure", "task_name")


class TokenBytes:
    """The bytes of each token of a model, read from its tokenizer.json alone."""

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # noqa: BLE001  # tokenizers raises bare Exception
            raise ValueError(f"{folder / TOKENIZER_FILE} cannot be read: {error}") from None
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        # The repr of a composed decoder contains the names of its parts.
        self._alphabet = list_byte_alphabet() if "ByteLevel(" in repr(self._tokenizer.decoder) else None

    def find_bytes(self, token_id: int) -> bytes:
        """Find the bytes of a token; an unknown id is written in angle brackets."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return f"<{token_id}>".encode()
        if self._alphabet is not None:
            return bytes(self._alphabet[character] for character in token if character in self._alphabet)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(_WORD_START, " ").encode()

    def decode_text(self, token_ids: Iterable[int]) -> str:
        """Decode tokens, without added (control) tokens; bytes that are not UTF-8 become U+FFFD."""
        parts = (self.find_bytes(token_id) for token_id in token_ids if token_id not in self._added)
        return b"".join(parts).decode(errors="replace")


def load_token_bytes(model: str) -> TokenBytes | None:
    """Load token bytes of a model; None: no tokenizer.json, ValueError: an unreadable one."""
    folder = find_local_folder(model)
    return TokenBytes(folder) if folder is not None and (folder / TOKENIZER_FILE).exists() else None


def list_byte_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level tokenizer (GPT-2, Radford et al. 2019).

    Printable bytes of Latin-1 stand for themselves; the other bytes are written as the characters from U+0100 on.
    """
    characters = sorted(ByteLevel.alphabet())
    unprintable = iter(sorted(set(range(256)) - set(map(ord, characters))))
    return {character: ord(character) if ord(character) < 0x100 else next(unprintable) for character in characters}


def make_step_tables(
    folder: Path, kind: str, vocabulary: TokenBytes | None
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield number, rollout count and table of each step; ValueError: unreadable rollouts.

    `kind`: folder of the run in which they are (`read_rollouts`).
    """
    files = find_recorded_steps(folder / kind) if (folder / kind).is_dir() else {}
    parts = len(files) * (1 if kind == ROLLOUTS_FOLDER else 4)  # there may be rollouts beside them
    for step, file in files.items():
        try:
            rows = _read_first_rows(step, file, rows=MAX_ROWS // parts, tokens=MAX_READ_TOKENS // parts)
            table = make_step_table(rows, kind, vocabulary, MAX_FULL_TOKENS // parts, MAX_ROW_CHARACTERS // parts)
            table = add_images(table, rows, folder, MAX_THUMBNAIL_CHARACTERS // parts)
            yield step, count_rollouts(file), table
        except (ValueError, TypeError, LookupError, OSError) as error:
            if str(file) in str(error):
                raise
            reason = " ".join(str(error).split())
            raise ValueError(f"{file} cannot be read as rollouts: {type(error).__name__}: {reason}") from error


def _read_first_rows(step: int, file: Path, *, rows: int, tokens: int) -> list[dict[str, Any]]:
    first_rows: list[dict[str, Any]] = []
    for row in read_rows(step, file):
        first_rows.append(row)
        tokens -= len(row["token_ids"])
        if len(first_rows) >= rows or tokens <= 0:
            break
    return first_rows


def make_token_table(vocabulary: TokenBytes | None, token_ids: Iterable[int]) -> dict[str, Any]:
    """Map ids to the text of their tokens."""
    if vocabulary is None:
        return {}
    table: dict[str, Any] = {}
    for token_id in sorted(token_ids):
        content = vocabulary.find_bytes(token_id)
        try:
            table[str(token_id)] = content.decode()
        except UnicodeDecodeError:  # a part of a character becomes a list with its bytes in base 64
            table[str(token_id)] = [base64.b64encode(content).decode()]
    return table


def make_step_table(
    rows: Sequence[Mapping[str, Any]], kind: str, vocabulary: TokenBytes | None, tokens: int, characters: int
) -> dict[str, Any]:
    """Make the table of a step's rollouts.

    It has `tokens` tokens of full rollouts, and `characters` of rows of the data.
    """
    # Each entry is a column, but for `prompts` and `rows` (texts by group) and `full`: all data of some trajectories,
    # by row index.
    full_rows = _choose_full_rows(rows, tokens)
    first_rows = {str(row["group"]): row for row in reversed(rows)}
    shown_groups = dict.fromkeys(str(rows[index]["group"]) for index in sorted(full_rows))
    advantages = (compute_mean_advantage(row["advantages"]) for row in rows)
    lengths = (MAX_FULL_LENGTH if index in full_rows else EXCERPT for index in range(len(rows)))
    return {
        **{name: [row.get(name) for row in rows] for name in _COPIED_COLUMNS},
        "suspect": [list_suspicions(row["reward_metrics"]) for row in rows],
        "tokens": [len(row["logprobs"]) for row in rows],
        "advantage": [None if mean is None else round(mean, 5) for mean in advantages],
        "response": [row["response"][:length] for row, length in zip(rows, lengths, strict=True)],
        "characters": [len(row["response"]) for row in rows],
        "prompts": make_excerpts({group: _read_prompt(row, vocabulary) for group, row in first_rows.items()}),
        "rows": _describe_rows({group: first_rows[group] for group in shown_groups}, characters),
        "full": {str(index): _describe_in_full(rows[index], kind, vocabulary) for index in sorted(full_rows)},
    }


def _describe_rows(first_rows: Mapping[str, Mapping[str, Any]], characters: int) -> dict[str, Any]:
    """Describe answer and other columns of each group's row, within `characters`."""
    described: dict[str, Any] = {}
    for group, row in first_rows.items():
        columns = {name: str(value)[:COLUMN_EXCERPT] for name, value in (row.get("columns") or {}).items()}
        answer = None if row.get("answer") is None else str(row["answer"])[:ANSWER_EXCERPT]
        characters -= sum(map(len, (*columns, *columns.values(), answer or "")))
        if characters < 0 and described:
            break
        described[group] = {"answer": answer, "columns": columns}
    return described


def make_excerpts(texts: Mapping[str, str]) -> dict[str, str]:
    """Cut texts to EXCERPT characters, from where they begin to differ."""
    lines = {name: " ".join(text.split()) for name, text in texts.items()}
    first, last = min(lines.values(), default=""), max(lines.values(), default="")  # the two that agree least
    pairs = zip(first, last, strict=False) if first != last else ()
    prefix = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    # The last words that all have are kept, so that a text can be read from its first word.
    cut = first.rfind(" ", 0, max(prefix - _KEPT_OF_PREFIX, 0)) + 1
    return {name: f"{'… ' if cut else ''}{line[cut:]}"[:EXCERPT] for name, line in lines.items()}


def _read_prompt(row: Mapping[str, Any], vocabulary: TokenBytes | None) -> str:
    if row.get("prompt") or vocabulary is None:
        return str(row.get("prompt") or "")
    length = row["spans"][0][0] if row["spans"] else len(row["token_ids"])
    return vocabulary.decode_text(row["token_ids"][:length])


def compute_mean_advantage(advantages: Any) -> float | None:
    """Average over a response's sampled tokens; None: not known."""
    return None if advantages is None or len(advantages) == 0 else float(np.mean(advantages))


def _choose_full_rows(rows: Sequence[Mapping[str, Any]], tokens: int) -> set[int]:
    """Choose the indices of rows to show in full, up to `tokens` tokens."""
    by_group: dict[int, list[int]] = {}
    for index, row in enumerate(rows):
        by_group.setdefault(row["group"], []).append(index)
    # Groups stay together, so that their samples can be compared. In the order of their reversed binary numbers (the
    # van der Corput sequence) every prefix is spread over the step.
    groups, bits = list(by_group.values()), max(len(by_group) - 1, 1).bit_length()
    order = sorted(range(len(groups)), key=lambda number: f"{number:0{bits}b}"[::-1])
    chosen: set[int] = set()
    for index in (index for number in order for index in groups[number]):
        tokens -= len(rows[index]["token_ids"])
        if tokens < 0 and chosen:
            break
        chosen.add(index)
    return chosen


def _describe_in_full(row: Mapping[str, Any], kind: str, vocabulary: TokenBytes | None) -> dict[str, Any]:
    full: dict[str, Any] = {"spans": row["spans"], "parts": row["reward_parts"]}
    if vocabulary is None:
        return full
    full["ids"] = row["token_ids"][:MAX_FULL_LENGTH].tolist()
    if kind == ROWS_FOLDER:  # nothing sampled them, so their log-probabilities are those of training alone
        values = row["prev_logprobs"]
        return full if values is None else full | {"logprobs": _round_values(np.maximum(values, LEAST_GAP))}
    full["logprobs"] = _round_values(row["logprobs"])
    if row["advantages"] is not None:
        advantages = _round_values(row["advantages"])
        full["advantages"] = advantages[:1] if len(set(advantages)) == 1 else advantages
    if row["prev_logprobs"] is not None:
        # -inf where a filter of sampling removes the token in training: JSON has no such number.
        gaps = np.maximum(row["prev_logprobs"] - row["logprobs"], LEAST_GAP)
        full["gaps"] = [float(f"{gap:.3g}") for gap in gaps.tolist()]
    return full


def _round_values(values: Any) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
