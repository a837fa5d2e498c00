"""Reads the files of a tokenizer in a model's folder as they are, without a tokenizer library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megatron_grpo.config.outside_files import read_json

TOKENIZER_FILE = "tokenizer.json"


def read_settings(file: Path) -> dict[str, Any]:
    """Read the object in a JSON file; empty where there is none."""
    try:
        content = read_json(file, links=True)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def read_token_ids(folder: Path) -> dict[str, int] | None:
    """Read the ids of all tokens in tokenizer.json; None: it cannot be read."""
    content = read_settings(folder / TOKENIZER_FILE)
    try:
        tokens = content["model"]["vocab"]
        pairs = tokens.items() if isinstance(tokens, dict) else ((row[0], index) for index, row in enumerate(tokens))
        added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
        return {str(token): int(token_id) for token, token_id in (dict(pairs) | added).items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        return None


def explain_other_tokens(policy: Path, teacher: Path) -> str | None:
    """Describe the first token that two folders have differently; None: none."""
    ours, theirs = read_token_ids(policy), read_token_ids(teacher)
    if ours is None or theirs is None:
        files = [folder / "tokenizer.model" for folder in (policy, teacher)]
        if all(file.is_file() for file in files) and files[0].read_bytes() == files[1].read_bytes():
            return None
        return (
            f"its tokens cannot be compared: {teacher if theirs is None else policy} has no readable {TOKENIZER_FILE}"
        )
    our_texts, their_texts = ({number: text for text, number in tokens.items()} for tokens in (ours, theirs))
    for number in sorted(our_texts.keys() | their_texts.keys()):
        if our_texts.get(number) != their_texts.get(number):
            names = (texts.get(number) for texts in (their_texts, our_texts))
            their_name, our_name = ("missing" if name is None else repr(name) for name in names)
            return f"has another tokenizer: its token {number} is {their_name}, that of the policy {our_name}"
    return None


def read_vocabulary_size(model: Path) -> int | None:
    """Read a model's number of tokens from config.json, if there."""
    number = _read_text_settings(model).get("vocab_size")
    return number if type(number) is int else None


def _read_text_settings(model: Path) -> dict[str, Any]:
    """Read a language model's entries in config.json or its text_config."""
    settings = read_settings(model / "config.json")
    text = settings.get("text_config")
    return {**settings, **text} if isinstance(text, dict) else settings


def read_end_tokens(model: Path) -> tuple[int, ...]:
    """Read the tokens that end a response from the model's files."""
    file = model / "generation_config.json"
    end = (read_settings(file) if file.is_file() else _read_text_settings(model)).get("eos_token_id")
    numbers = end if isinstance(end, list) else [end]
    return tuple(number for number in numbers if type(number) is int)


def list_declared_tokens(folder: Path) -> Iterator[str]:
    """List the tokens that files beside tokenizer.json name."""
    settings = read_settings(folder / "tokenizer_config.json")
    for content in (settings, read_settings(folder / "special_tokens_map.json")):
        for key, value in content.items():
            if key.endswith("_token"):
                yield from _list_contents([value])
            elif key in ("additional_special_tokens", "extra_special_tokens"):
                yield from _list_contents(value.values() if isinstance(value, dict) else value)
    numbered = settings.get("added_tokens_decoder")
    yield from _list_contents(numbered.values() if isinstance(numbered, dict) else ())
    yield from read_settings(folder / "added_tokens.json")


def _list_contents(tokens: Any) -> Iterator[str]:
    for token in tokens if isinstance(tokens, Iterable) else ():
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            yield content
