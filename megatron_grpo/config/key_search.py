"""Searches keys, recipes and config groups for --help PATTERN."""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from importlib import resources

from megatron_grpo.config.keys import Key, read_keys
from megatron_grpo.config.overrides import CONF_MODULE, RECIPES, list_config_groups
from megatron_grpo.config.suggestions import describe_counterpart

_WIDEST = 100  # columns of a text, also on wider terminals
_INDENT = " " * 6


def format_search(pattern: str) -> str:
    """Format the keys, recipes and groups that match a pattern.

    "recipes" and "groups" match all of them.
    """
    name, _, option = pattern.lower().lstrip("+~").partition("=")
    pattern = option if name in list_config_groups() and option else name  # of +exp=quickstart and of KEY=VALUE
    parts = [*_find_keys(pattern), *_find_recipes(pattern), *_find_groups(pattern)]
    if not parts:
        names = {name.rpartition(".")[2]: name for name in read_keys()}
        close = [names[word] for word in difflib.get_close_matches(pattern.rpartition(".")[2], names, n=3)]
        advice = f"did you mean {' or '.join(close)}?" if close else "docs/configuration.md has every key"
        parts = ["\n".join(fill_lines(text, "") for text in (f"no key, recipe or group matches {pattern};", advice))]
    return "\n\n".join(parts) + "\n"


def read_recipe_summary(name: str) -> str:
    """Read the comment at the top of a recipe."""
    lines = resources.files(CONF_MODULE).joinpath(RECIPES, f"{name}.yaml").read_text().splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#") and "@package" not in line]
    return " ".join(comments)


def format_texts(texts: Mapping[str, str]) -> str:
    """Format names, each with its text below it."""
    return "\n".join(f"{fill_lines(name, '  ', _INDENT)}\n{fill_lines(text, _INDENT)}" for name, text in texts.items())


def fill_lines(text: str, indent: str, hanging_indent: str | None = None) -> str:
    """Break a text into lines that fit the terminal."""
    width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    hanging_indent = indent if hanging_indent is None else hanging_indent
    wrapper = textwrap.TextWrapper(
        width, initial_indent=indent, subsequent_indent=hanging_indent, break_on_hyphens=False
    )
    return wrapper.fill(" ".join(text.split()))


def _find_keys(pattern: str) -> Iterator[str]:
    counterpart = describe_counterpart(pattern, "grpo")
    if counterpart is not None:
        yield counterpart
    names = [name for name in read_keys() if pattern in name.lower() or name in (counterpart or "").split()]
    if names:
        yield f"keys:\n{format_texts({_describe_key(read_keys()[name]): read_keys()[name].doc for name in names})}"
    word = re.compile(rf"(?<!\w){re.escape(pattern)}", flags=re.IGNORECASE)
    in_texts = [name for name, key in read_keys().items() if word.search(key.doc) and name not in names]
    if in_texts:
        yield f"keys whose text has it (--help KEY shows it):\n{fill_lines(', '.join(in_texts), '  ')}"


def _describe_key(key: Key) -> str:
    default = "" if key.default_text == "required" else f", by default {key.default_text}"
    return f"{key.name} ({'required, ' if not default else ''}{key.type}{default})"


def _find_recipes(pattern: str) -> Iterator[str]:
    summaries = {name: read_recipe_summary(name) for name in list_config_groups()[RECIPES]}
    are_all = pattern in ("recipes", "recipe", RECIPES)
    matching = {name: text for name, text in summaries.items() if are_all or pattern in name}
    if matching:
        yield f"recipes (+exp=NAME):\n{format_texts(matching)}"


def _find_groups(pattern: str) -> Iterator[str]:
    groups = {name: options for name, options in list_config_groups().items() if name != RECIPES}
    are_all = pattern in ("groups", "group")
    matching = {
        name: ", ".join(options if are_all or pattern in name else [word for word in options if pattern in word])
        for name, options in groups.items()
        if are_all or any(pattern in word for word in [name, *options])
    }
    if matching:
        yield f"groups (GROUP=OPTION):\n{format_texts(matching)}"
