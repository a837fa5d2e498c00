"""Checks of the tokenizer files in a model's folder, without transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.config.data_schema import DataConfig, TaskConfig
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.paths import LFS_POINTER, check_readable, is_lfs_pointer
from megatron_grpo.config.schema import Config
from megatron_grpo.models.tokenizer_files import TOKENIZER_FILE, read_end_tokens, read_settings, read_token_ids

_SETTINGS_FILE = "tokenizer_config.json"
_FILES = (TOKENIZER_FILE, "tokenizer.model", _SETTINGS_FILE)
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates")


def has_tokenizer(folder: Path) -> bool:
    """True for tokenizer files; the hub's cache may lack them as yet."""
    return any((folder / name).is_file() for name in _FILES)


def find_tokenizer_problems(subject: str, folder: Path, config: Config, vocab: int) -> Iterator[Problem]:
    """Check the tokenizer's files, chat template and tokens.

    Args:
        subject: key and value that name the folder.
        folder: the model's folder.
        config: how prompts are rendered.
        vocab: number of the model's tokens.
    """
    files = [folder / name for name in _FILES if os.path.lexists(folder / name)]
    if not files:
        yield Problem(subject, f"the folder holds no tokenizer ({', '.join(_FILES)})")
    for file in files:
        reason = LFS_POINTER if is_lfs_pointer(file) else check_readable(file)
        if reason is not None:
            yield Problem(subject, f"{file}: {reason}")
            return
    if folder / _SETTINGS_FILE in files and not _has_chat_template(folder):
        yield from _find_template_problems(folder, config)
    yield from _find_vocabulary_problems(subject, folder, config.data, vocab)


def _find_template_problems(folder: Path, config: Config) -> Iterator[Problem]:
    """Find the first task whose prompts lack a chat template."""
    data = config.data
    for task in dict.fromkeys([data.task_name, *config.env]):
        settings = data.tasks.get(task, TaskConfig())
        section = "data" if settings.apply_chat_template is None else f"data.tasks.{task}"
        is_chat = data.apply_chat_template if settings.apply_chat_template is None else settings.apply_chat_template
        if is_chat and not (settings.chat_template or data.chat_template):
            text = f"the tokenizer in {folder} has no chat template; use false for prompts as they are, or give a file"
            yield Problem(f"{section}.apply_chat_template=True", f"{text} with one in {section}.chat_template")
            return


def _has_chat_template(folder: Path) -> bool:
    """True for a chat template, and for an unreadable file."""
    if any((folder / name).exists() for name in _TEMPLATE_FILES):
        return True
    try:
        content = json.loads((folder / _SETTINGS_FILE).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return True
    return not isinstance(content, dict) or bool(content.get("chat_template"))


def _find_vocabulary_problems(subject: str, folder: Path, data: DataConfig, vocab: int) -> Iterator[Problem]:
    """Check that the model has embeddings for common tokens."""
    limit = f"the model's tokens are numbered from 0 to {vocab - 1} (vocab_size in config.json)"
    name = "generation_config.json" if (folder / "generation_config.json").is_file() else "config.json"
    beyond = [number for number in read_end_tokens(folder) if not 0 <= number < vocab]
    if beyond:
        yield Problem(subject, f"eos_token_id of {name} has {beyond[0]}, and {limit}; give the model's own end token")
    tokens = read_token_ids(folder) or {}
    settings = read_settings(folder / "special_tokens_map.json") | read_settings(folder / _SETTINGS_FILE)
    advice = "give the model's own tokens, or a model whose embedding has a row for each token"
    for role in ("eos_token", "bos_token"):
        token = settings.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        # A token without a number would get the one after the last.
        number = tokens.get(token, max(tokens.values()) + 1) if isinstance(token, str) and tokens else 0
        if number >= vocab:
            yield Problem(subject, f"the tokenizer's {role} {token} is token {number}, and {limit}; {advice}")
            return
    templates = "\n".join(_read_templates(folder, data, settings))
    for token, number in tokens.items():
        if number >= vocab and token in templates:
            yield Problem(subject, f"the chat template writes {token}, which is token {number}, and {limit}; {advice}")
            return


def _read_templates(folder: Path, data: DataConfig, settings: Mapping[str, Any]) -> Iterator[str]:
    files = [data.chat_template, *(task.chat_template for task in data.tasks.values())]
    paths = [Path(file) for file in files if file] or [folder / "chat_template.jinja"]
    for path in paths:
        if path.is_file():
            yield path.read_text(encoding="utf-8", errors="replace")
    if not any(files):
        yield str(settings.get("chat_template") or "")
