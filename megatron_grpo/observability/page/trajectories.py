"""Tables of each step's trajectories for the report page; some trajectories are included in full, token by token."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from megatron_grpo.batch.rollout_files import count_rollouts, recorded_steps, rows_of_file
from megatron_grpo.batch.trajectory import list_suspicions
from megatron_grpo.models.source import find_local_folder

TOKENIZER_FILE = "tokenizer.json"
LEAST_GAP = -40.0
"""Limit of log ratios, as in the metrics of a step."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"
"""Character that SentencePiece tokenizers write for a space."""


class TokenBytes:
    """The bytes of each token of a model, read from its tokenizer.json alone."""

    def __init__(self, folder: Path) -> None:
        """Read the tokenizer of a model's folder; ValueError: tokenizer.json is missing or damaged."""
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # noqa: BLE001  # tokenizers raises bare Exception
            raise ValueError(f"{folder / TOKENIZER_FILE} cannot be read: {error}") from None
        self._added = {number: one.content for number, one in self._tokenizer.get_added_tokens_decoder().items()}
        # The repr of a composed decoder contains the names of its parts.
        self._alphabet = list_byte_alphabet() if "ByteLevel(" in repr(self._tokenizer.decoder) else None

    def of(self, token_id: int) -> bytes:
        """Bytes of a token; for an id that the tokenizer does not have, the number in angle brackets."""
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
        """Text of tokens, without added (control) tokens; bytes that are not UTF-8 become U+FFFD."""
        shown = (self.of(one) for one in token_ids if one not in self._added)
        return b"".join(shown).decode(errors="replace")


def load_token_bytes(model: str) -> TokenBytes | None:
    """Token bytes of a model, given its path or hub name; None: it has no tokenizer.json on this machine.

    Raises:
        ValueError: tokenizer.json exists but cannot be read.
    """
    folder = find_local_folder(model)
    return TokenBytes(folder) if folder is not None and (folder / TOKENIZER_FILE).exists() else None


def list_byte_alphabet() -> dict[str, int]:
    """The byte for each character of a byte-level tokenizer, in the alphabet of GPT-2 (Radford et al. 2019).

    Printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in their order.
    """
    characters = sorted(ByteLevel.alphabet())
    others = iter(sorted(set(range(256)) - set(map(ord, characters))))
    return {one: ord(one) if ord(one) < 0x100 else next(others) for one in characters}


ROWS = 160_000
"""Most rows in all tables of a run, divided equally over its steps."""
READ_TOKENS = 100_000_000
"""Most tokens of the rollouts that are read, which takes about ten seconds; divided equally over the steps."""
TOKENS = 2_000_000
"""Most tokens of full trajectories, about eight bytes of the page each; divided equally over the steps."""
HEAD = 160
"""Most characters of a prompt, and of a response that is not shown in full."""
LONGEST = 1_200_000
"""Most characters of a response that is shown in full; longer responses are cut, and the page says so."""


def make_step_tables(folder: Path, vocabulary: TokenBytes | None) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yield for each step of a run its number, its count of rollouts, and their table by columns (`_table`).

    Args:
        folder: the run's folder.
        vocabulary: token bytes of the run's model; None: not known.

    Raises:
        ValueError: a file of rollouts cannot be read; the message names it.
    """
    files = recorded_steps(folder)
    for step, file in files.items():
        try:
            rows = _first_rows(step, file, rows=ROWS // len(files), tokens=READ_TOKENS // len(files))
            yield step, count_rollouts(file), _table(rows, vocabulary, TOKENS // len(files))
        except (ValueError, TypeError, LookupError, OSError) as error:
            if str(file) in str(error):
                raise
            reason = " ".join(str(error).split())
            raise ValueError(f"{file} cannot be read as rollouts: {type(error).__name__}: {reason}") from error


def _first_rows(step: int, file: Path, *, rows: int, tokens: int) -> list[dict[str, Any]]:
    """The first rollouts of a file, up to `rows` rows or `tokens` tokens; at least one."""
    found: list[dict[str, Any]] = []
    for row in rows_of_file(step, file):
        found.append(row)
        tokens -= len(row["token_ids"])
        if len(found) >= rows or tokens <= 0:
            break
    return found


def make_token_table(vocabulary: TokenBytes | None, used: Iterable[int]) -> dict[str, Any]:
    """Text of each token by id; for a token that is not whole characters, a list with its bytes in base 64."""
    table: dict[str, Any] = {}
    if vocabulary is None:
        return table
    for token_id in sorted(used):
        content = vocabulary.of(token_id)
        try:
            table[str(token_id)] = content.decode()
        except UnicodeDecodeError:
            table[str(token_id)] = [base64.b64encode(content).decode()]
    return table


def _table(rows: Sequence[Mapping[str, Any]], vocabulary: TokenBytes | None, tokens: int) -> dict[str, Any]:
    """Table of a step's trajectories by columns; its entry `full` has all data of some of them, by row number."""
    chosen = _chosen(rows, tokens)
    prompts: dict[str, str] = {}
    for row in rows:
        if vocabulary is None:
            prompts[str(row["group"])] = ""
        elif str(row["group"]) not in prompts:
            length = row["spans"][0][0] if row["spans"] else len(row["token_ids"])
            text = vocabulary.text(row["token_ids"][:length])
            prompts[str(row["group"])] = " ".join(text.split())[-HEAD:]  # the end, because prompts often begin alike
    advantages = (compute_mean_advantage(row["advantages"]) for row in rows)
    lengths = (LONGEST if place in chosen else HEAD for place in range(len(rows)))
    return {
        **{name: [row[name] for row in rows] for name in _AS_WRITTEN},
        "suspect": [list_suspicions(row["reward_metrics"]) for row in rows],
        "tokens": [len(row["logprobs"]) for row in rows],
        "advantage": [None if mean is None else round(mean, 5) for mean in advantages],
        "response": [row["response"][:length] for row, length in zip(rows, lengths, strict=True)],
        "characters": [len(row["response"]) for row in rows],
        "prompts": prompts,
        "full": {str(place): _in_full(rows[place], vocabulary) for place in sorted(chosen)},
    }


_AS_WRITTEN = ("prompt_idx", "group", "sample", "reward", "correct", "stop_reason", "failure")


def compute_mean_advantage(advantages: Any) -> float | None:
    """Mean over the sampled tokens of a response; None: not known."""
    return None if advantages is None or len(advantages) == 0 else float(np.mean(advantages))


def _chosen(rows: Sequence[Mapping[str, Any]], tokens: int) -> set[int]:
    """Numbers of the rows to show in full: whole groups, so that samples can be compared, spread over the step."""
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
    """Reorder groups so that every prefix is spread evenly over all of them (van der Corput sequence)."""
    bits = max(len(groups) - 1, 1).bit_length()
    return [groups[place] for place in sorted(range(len(groups)), key=lambda place: f"{place:0{bits}b}"[::-1])]


def _in_full(row: Mapping[str, Any], vocabulary: TokenBytes | None) -> dict[str, Any]:
    """All data of a trajectory: its tokens and their values, rounded for display."""
    full: dict[str, Any] = {"spans": row["spans"], "parts": row["reward_parts"]}
    if vocabulary is None:
        return full
    full |= {"ids": row["token_ids"][:LONGEST].tolist(), "logprobs": _rounded(row["logprobs"])}
    if row["advantages"] is not None:
        advantages = _rounded(row["advantages"])
        full["advantages"] = advantages[:1] if len(set(advantages)) == 1 else advantages
    if row["prev_logprobs"] is not None:
        # -inf where a filter of sampling removes the token in training: JSON has no such number.
        gaps = np.maximum(row["prev_logprobs"] - row["logprobs"], LEAST_GAP)
        full["gaps"] = [float(f"{gap:.3g}") for gap in gaps.tolist()]
    return full


def _rounded(values: Any) -> list[float]:
    return [round(value, 4) for value in values.tolist()]
