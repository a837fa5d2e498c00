"""Data inside an HTML page: text that can never become markup or script, whatever a model wrote."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}
"""Characters of HTML, as JSON may write them in a string; json.dumps escapes all that is not ASCII itself."""
_DIGITS = 7
"""Significant digits of a number in the page."""


def json_element(name: str, value: Any) -> str:
    """A script element that no browser runs, with a value as JSON that has no character of HTML in it."""
    return f'<script type="application/json" id="{name}">{escaped_json(value)}</script>\n'


def packed_element(name: str, value: Any) -> str:
    """The same, compressed: gzip in base 64, for what is looked at later or never."""
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:  # a number that is not finite: rare, and looking for them takes longer than everything else
        text = json.dumps(shortened(value), separators=(",", ":"))
    packed = gzip.compress(text.encode(), compresslevel=6, mtime=0)
    return f'<script type="text/plain" id="{name}">{base64.b64encode(packed).decode()}</script>\n'


def escaped_json(value: Any) -> str:
    """ASCII JSON without `<`, `>` and `&`; numbers that are not finite are null."""
    text = json.dumps(shortened(value), separators=(",", ":"), allow_nan=False)
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text


def shortened(value: Any) -> Any:
    """The value with its numbers as short as their first digits allow, and null for those that are not finite."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): shortened(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [shortened(one) for one in value]
    return value


def page(style: str, script: str, body: str, data: Sequence[str]) -> str:
    """A whole page, which may load nothing, send nothing, and run this one script.

    Args:
        style: CSS.
        script: JavaScript; runs when everything is there.
        body: HTML of this package's own, without anything of a run.
        data: elements of `json_element` and `packed_element`.
    """
    for kind, text in (("style", style), ("script", script)):
        assert f"</{kind}" not in text.lower(), f"the {kind} would end its own element"
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>Run report</title>\n<style>{style}</style>\n</head>\n<body>\n{body}\n"
        f"{''.join(data)}<script>{script}</script>\n</body>\n</html>\n"
    )


def _hash(text: str) -> str:
    """How a Content-Security-Policy names an element of exactly this content."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
