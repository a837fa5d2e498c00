"""Prints docs/configuration.md, the reference of all keys, from the schema and conf/; `make docs` writes it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from megatron_grpo.config.key_search import read_recipe_summary
from megatron_grpo.config.keys import read_sections
from megatron_grpo.config.loop_schema import LOOPS
from megatron_grpo.config.overrides import RECIPES, list_config_groups

_INTRODUCTION = """\
# Configuration

Made by `make docs` from the schema (`megatron_grpo/config/schema.py` and the `*_schema.py` beside
it) and from `conf/`; edit those, not this page.

A run is described by the defaults below, the options chosen from the groups, a recipe, and the
command line, each overriding what comes before it:

    python -m megatron_grpo.train +exp=quickstart loss_fn=clip_higher grpo.max_num_steps=100

`--cfg job` prints the outcome, and on standard error what is wrong with it (exit code 2). Before
any process starts the configuration is checked as a whole, and every mistake is listed in one
message; `--check` does only that.

Texts are taken as they are written, and `~` at the beginning of a path is the home folder. A value
may refer to another key (`${policy.precision}`), to an environment variable (`${oc.env:HOME}`) or
to the time (`${now:%Y-%m-%d}`). A line below has the key, its type and, behind the semicolon, its
default.
"""


def format_page() -> str:
    """Format the page docs/configuration.md."""
    options = list_config_groups()
    lines = [_INTRODUCTION, "## Recipes\n"]
    lines += [_wrap(f"- `+exp={name}`: {read_recipe_summary(name)}") for name in options.pop(RECIPES)]
    lines += ["", "## Groups\n"]
    lines += [_wrap(f"- `{name}`: {', '.join(f'`{name}={choice}`' for choice in options[name])}") for name in options]
    for section in read_sections():
        if not section.keys:
            continue
        is_own = section.name in LOOPS and len(section.names) == 1
        lines.append(f"\n## {f'Only in {section.name}' if is_own else _join_names(section.names) or 'Top level'}\n")
        if section.name:
            lines.append(f"{_wrap(section.doc, indent='')}\n")
        for key in section.keys:
            lines.append(_wrap(f"- `{key.name}` ({key.type}; `{key.default_text}`): {key.doc}"))
    return "\n".join([*lines, ""])


def _join_names(names: Sequence[str]) -> str:
    """Join names of a section: `grpo.early_stop, also ppo, sft`."""
    first, *others = names
    return f"{first}, also {', '.join(name.partition('.')[0] for name in others)}" if others else first


def _wrap(text: str, indent: str = "  ") -> str:
    return textwrap.fill(" ".join(text.split()), 100, subsequent_indent=indent, break_on_hyphens=False)


if __name__ == "__main__":
    print(format_page(), end="")
