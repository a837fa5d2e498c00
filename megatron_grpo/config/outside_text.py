"""Text from outside the run, made safe: files can encode it, a line stays one line, and it steers no terminal.

Models, agents, tools, servers and reward functions write what they like. Their text is made safe where it enters the
run, so that a step's files are always written, and logs and consoles show nothing that the run did not write.
"""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from typing import Any

REASON_CHARACTERS = 1000  # of the reason why a rollout failed
NAME_CHARACTERS = 120  # of a metric or note; trackers refuse names of more than 250
NOTE_CHARACTERS = 100_000
NESTING = 100  # levels of lists and objects in JSON from outside

# Characters that steer a terminal, end a line, turn the direction of text, or cannot be encoded.
CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_GAP = " [...] "


def make_encodable(text: str) -> str:
    """Replace halves of surrogate pairs by U+FFFD; join whole pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can write halves (\ud83d), and UTF-8 cannot
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def make_line(text: str, limit: int = REASON_CHARACTERS) -> str:
    """Make one printable line of at most `limit` characters.

    Control characters become escapes (\\x1b, \\n). Of a long text the middle is left out, because the end of an error
    names its place.
    """
    if len(text) > 2 * limit:  # first, so that the work for an endless text is bounded
        text = text[:limit] + text[-limit:]
    line = replace_all_controls(text)
    if len(line) <= limit:
        return line
    end = limit // 3
    return line[: limit - end - len(_GAP)] + _GAP + line[-end:]


def describe_error(error: BaseException) -> str:
    """Describe an exception of code from outside in one line: type and text."""
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 - its class is from outside, too
        text = f"its text cannot be written ({type(failure).__name__})"
    return make_line(f"{type(error).__name__}: {text}")


def make_name(text: str) -> str:
    """Make a printable name of at most NAME_CHARACTERS; different texts have different ones."""
    return mark_name(make_line(text, NAME_CHARACTERS), text)


def mark_name(name: str, text: str) -> str:
    """Add a digest of its text to a name that differs from it.

    Texts that differ late, or in control characters, would have one name, and the later value would replace the other.
    """
    if name == text:
        return name
    digest = blake2b(text.encode(errors="surrogatepass"), digest_size=4).hexdigest()
    return f"{name[: NAME_CHARACTERS - len(digest) - 1]}-{digest}"


def make_note(text: str) -> str:
    """Make a text that files can hold, of at most NOTE_CHARACTERS."""
    text = text if len(text) <= NOTE_CHARACTERS else text[: NOTE_CHARACTERS - len(_GAP)] + _GAP
    return make_encodable(text)


def replace_all_controls(text: str) -> str:
    """Replace control characters by escapes (\\x1b, \\n)."""
    return CONTROLS.sub(_write_escape, text)


def replace_controls(text: str) -> str:
    """Replace control characters by escapes, all but tabs and line feeds."""
    return CONTROLS.sub(lambda match: match[0] if match[0] in "\t\n" else _write_escape(match), text)


def format_record(text: str) -> str:
    """Format a record of a log or console: its further lines are indented.

    So no line of a text from outside passes for a record of its own.
    """
    return replace_controls(text).replace("\n", "\n    ")


def parse_json(text: str | bytes, most_values: int | None = None) -> Any:
    """Parse JSON from outside; its texts become encodable.

    ValueError: it is no JSON, has NaN or an infinity, more than NESTING levels, or more than `most_values` values.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"more than {NESTING} levels of lists and objects") from None
    if most_values is not None:
        _require_few_values(value, most_values)
    return clean_json(value)


def _require_few_values(value: Any, limit: int) -> None:
    # An empty list of two bytes takes 64 of memory, and a hundred times as long as they to be read.
    values = 0
    containers: list[list[Any] | dict[str, Any]] = [[value]]
    while containers:
        container = containers.pop()
        members = container.values() if isinstance(container, dict) else container
        values += len(members)
        if values > limit:
            raise ValueError(f"more than {limit} values")
        if not {list, dict}.isdisjoint(map(type, members)):
            containers += [member for member in members if isinstance(member, list | dict)]


def clean_json(value: Any, levels: int = NESTING) -> Any:
    """Make all texts of a JSON value encodable; ValueError beyond `levels` levels."""
    if isinstance(value, str):
        return make_encodable(value)
    if not isinstance(value, list | dict):
        return value
    if not levels:
        raise ValueError(f"more than {NESTING} levels of lists and objects")
    if isinstance(value, dict):
        return {clean_json(key): clean_json(member, levels - 1) for key, member in value.items()}
    if {str, list, dict}.isdisjoint(map(type, value)):  # millions of token ids
        return value
    return [clean_json(member, levels - 1) for member in value]


def _write_escape(match: re.Match[str]) -> str:
    return repr(match[0])[1:-1]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
