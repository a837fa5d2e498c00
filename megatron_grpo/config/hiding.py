"""Hides secrets in texts: passwords and tokens of addresses, commands, headers and settings."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"

# Ends of names whose values are secrets: of options, variables and parameters. Not `token` alone, as in pad_token.
_NAME = r"(?:api[-_]?key|access[-_]?key|private[-_]?key|secret|password|passwd|credentials?|authorization)"
_TOKEN = r"(?:(?:api|access|auth|bearer|client|hf|id|refresh|session|user)[-_]?token)"
_SECRET_NAME = re.compile(rf"(?:.*[-_.])?(?:{_NAME}|{_TOKEN}|token|pwd)", re.IGNORECASE)
_IN_QUERY = r"[\w.-]*(?:token|key|secret|passw(?:or)?d|pwd|pass|auth|authorization|credentials?|sig|signature|jwt)"
_VALUE = r"[^\s'\",&\]}]+"

# Each pattern keeps its first group, and hides the rest of the match up to an optional second group. Each begins at few
# places or looks at few characters from there, because texts from outside come by here: the time grows as the text.
_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        r"(:/{1,2})[^\s/?#'\"<>]*(@)",  # user:password@host; a path has only one slash
        r"(:/{1,2})[^\s/:@]{1,256}:(?!\d{1,5}(?:[/?#\s]|$))[^\s@]{1,1024}(@)",  # a password with / ? or #
        r"(?:(?<![\w./@-])|(?<=//))()[\w.+%-]+:[^\s/:@]+(@)(?=\w)",  # without a scheme
        rf"(?i)([?&#]{_IN_QUERY}=)[^\s&#'\"]+",
        rf"(?i)((?<![\w-])--?[\w-]*(?:{_NAME}|token|auth)(?:=|['\",\s]+))(?!-){_VALUE}",  # --api-key VALUE
        rf"(?i)((?<![\w.-])(?:[\w.-]*[-_.])?(?:{_NAME}|{_TOKEN})['\"]?=['\"]?){_VALUE}",  # options.api_key=VALUE
        rf"(?i)((?:{_NAME}|{_TOKEN})['\"]\s*:\s*['\"]){_VALUE}",  # "api_key": "VALUE"
        rf"((?<!\w)[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD|PASS|PWD)=['\"]?){_VALUE}",  # API_KEY=VALUE
        # A header.
        rf"(?i)((?<![\w-])(?:authorization|(?:\w[\w-]*-)?api-key)\s*:\s*['\"]?(?:(?:bearer|basic|token)\s+)?){_VALUE}",
        r"(?i)(\bbearer\s+)[\w.~+/=-]{20,}",
        r"()\b(?:sk-[\w-]{20,}|hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16})",
    )
)


def hide_secrets(text: str) -> str:
    """Replace passwords and tokens in a text by ***."""
    for pattern in _PATTERNS:
        text = pattern.sub(lambda match: "".join([match[1], HIDDEN, *match.groups()[1:]]), text)
    return text


def is_secret_name(name: str) -> bool:
    """True for the name of an option or variable that holds a secret."""
    return _SECRET_NAME.fullmatch(name) is not None


def hide_values(values: Any, name: str = "") -> Any:
    """Hide the secrets in nested settings, for printing."""
    if isinstance(values, dict):
        return {key: hide_values(value, str(key)) for key, value in values.items()}
    if isinstance(values, list):
        return [hide_values(value, name) for value in values]
    if not isinstance(values, str):
        return values
    return HIDDEN if is_secret_name(name) and values else hide_secrets(values)
