"""Renders the prompts of a run's data again, as the configuration says and as other templates would."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config
from megatron_grpo.data.load_prompts import load_prompt_data
from megatron_grpo.data.loader import PromptLoader

TEMPLATES: dict[str, str] = yaml.safe_load(Path(__file__).with_name("chat_templates.yaml").read_text(encoding="utf-8"))
"""Chat templates of common families in Jinja, by name."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """The tokens of prompts under one setting of the data."""

    text: str
    """The setting, for messages."""
    key: str
    """The configuration key that chooses it."""
    prompts: Mapping[int, list[int]]
    """Token ids by row of the data."""


def render_configured(config: Config, model: Path, rows: Sequence[int]) -> Rendering:
    """Render the prompts as the configuration says.

    Args:
        config: how rows become prompts.
        model: folder with the tokenizer.
        rows: rows of the training data.

    Raises:
        ValueError: the data or a row cannot be read, or the data is streamed.
    """
    return Rendering("as the configuration says", "data.chat_template", _read_prompts(config, model, rows))


def iterate_other_renderings(config: Config, model: Path, rows: Sequence[int]) -> Iterator[Rendering]:
    """Render the prompts under other settings; arguments are those of `render_configured`."""
    with tempfile.TemporaryDirectory() as folder:
        for text, key, changes in _iterate_settings(config, Path(folder)):
            data: Any = replace(config.data, **changes)
            try:
                yield Rendering(text, key, _read_prompts(replace(config, data=data), model, rows))
            except (ValueError, RunError):  # the tokenizer has no template, or this one refuses the rows
                continue


def _iterate_settings(config: Config, folder: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each setting: description, key, changed fields of the section data."""
    data = config.data
    if data.apply_chat_template:
        plain = {"apply_chat_template": False, "system_prompt": None, "system_prompt_file": None}
        yield "the plain text without a chat template", "data.apply_chat_template", plain
    if data.chat_template is not None or not data.apply_chat_template:
        settings = {"apply_chat_template": True, "chat_template": None}
        yield "the chat template of the model's tokenizer", "data.chat_template", settings
    if data.system_prompt is not None or data.system_prompt_file is not None:
        yield "no system prompt", "data.system_prompt", {"system_prompt": None, "system_prompt_file": None}
    for name, template in TEMPLATES.items():
        file = folder / f"{name}.jinja"
        file.write_text(template, encoding="utf-8")
        changes = {"apply_chat_template": True, "chat_template": str(file)}
        yield f"the chat template of {name}", "data.chat_template", changes
    if data.apply_chat_template:
        for thinking in (False, True):
            kwargs = {"chat_template_kwargs": {**data.chat_template_kwargs, "enable_thinking": thinking}}
            yield f"enable_thinking={str(thinking).lower()}", "data.chat_template_kwargs", kwargs


def _read_prompts(config: Config, model: Path, rows: Sequence[int]) -> dict[int, list[int]]:
    if config.data.streaming:
        raise ValueError("data.streaming=true: rows of a stream cannot be read again")
    # Only the requested rows are rendered, not all rows at the start, and no validation sets are read.
    loader = load_prompt_data(
        replace(config, data=replace(config.data, val_path=None, val_sets={}, rows_rendered_at_start=1)), model
    ).loader
    assert isinstance(loader, PromptLoader)
    try:
        prompts = loader.load_prompts(rows)
    except IndexError:
        raise ValueError(f"the data has no row {max(rows)}") from None
    return {
        row: [token for message in prompt["message_log"] for token in message["token_ids"]]
        for row, prompt in zip(rows, prompts, strict=True)
    }
