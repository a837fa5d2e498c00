"""A row of the data as text, for people who read rollouts and for the page of a run."""

from __future__ import annotations

import json
from typing import Any

from megatron_grpo.config.outside_text import make_encodable, make_name
from megatron_grpo.data.chat_messages import join_content
from megatron_grpo.data.processors import REFERENCE, DatumSpec

PROMPT_CHARACTERS = 20_000  # of a prompt as text; its token ids are always whole
COLUMN_CHARACTERS = 1000  # of an answer, and of another column
MAX_COLUMNS = 32
_GAP = " [...] "


def describe_row(datum: DatumSpec) -> dict[str, Any]:
    """Describe a prompt's row: `prompt`, `answer` and `columns` of a `Trajectory`."""
    columns = datum["extra_env_info"]
    answer = columns.get(REFERENCE)
    # The answer is there by its own name, and "answer" may be a copy of another column.
    copies = ("answer",) if answer is not None and str(columns.get("answer")) == answer else ()
    apart = (REFERENCE, "task_name", *copies)
    images = [f"{image.digest} ({image.rows} x {image.columns} patches)" for image in datum.get("images", [])]
    columns = {**columns, "images": ", ".join(images)} if images else columns
    names = [name for name, value in columns.items() if name not in apart and value is not None]
    return {
        "prompt": cut_text(format_prompt(datum), PROMPT_CHARACTERS),
        "answer": None if answer is None else cut_text(answer, COLUMN_CHARACTERS),
        "columns": {make_name(str(name)): _format_value(columns[name]) for name in names[:MAX_COLUMNS]},
    }


def format_prompt(datum: DatumSpec) -> str:
    """Write a prompt as text: a conversation turn by turn, with roles."""
    prompt = datum["prompt"]
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n".join(f"{turn.get('role')}: {_format_content(turn.get('content'))}" for turn in prompt)


def cut_text(text: str, limit: int) -> str:
    """Cut the middle of a text, so that files can hold it."""
    if len(text) > limit:
        half = (limit - len(_GAP)) // 2
        text = text[:half] + _GAP + text[-half:]
    return make_encodable(text)


def _format_content(content: Any) -> str:
    try:
        return join_content(content)
    except ValueError:  # parts that are no text
        return _format_value(content)


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return cut_text(value, COLUMN_CHARACTERS)
    text = ""
    try:
        # Piece by piece, so that the work for a column of megabytes is bounded.
        for piece in json.JSONEncoder(default=str, ensure_ascii=False).iterencode(value):
            text += piece[: COLUMN_CHARACTERS + 1]
            if len(text) > COLUMN_CHARACTERS:
                return make_encodable(text[: COLUMN_CHARACTERS - len(_GAP)] + _GAP)
    except (TypeError, ValueError, RecursionError):  # keys that are no texts, or a value that holds itself
        return cut_text(repr(value), COLUMN_CHARACTERS)
    return make_encodable(text)
