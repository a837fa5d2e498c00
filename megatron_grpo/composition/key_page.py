"""Writes the page of all configuration keys: python -m megatron_grpo.composition.key_page > docs/configuration.md."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.composition.help import recipe_summary
from megatron_grpo.composition.overrides import RECIPES, config_groups
from megatron_grpo.config.keys import Group, groups
from megatron_grpo.config.loop_keys import LOOPS

_INTRODUCTION = """\
# Configuration

Made by `make docs` from the schema (`megatron_grpo/config/schema.py` and the `*_schema.py` beside it) and from `conf/`;
edit those, not this page.

A run is described by the defaults below, the options chosen from the groups, a recipe, and the command line, each
overriding what comes before it:

    python -m megatron_grpo.train +exp=quickstart loss_fn=clip_higher grpo.max_num_steps=100

`--cfg job` prints the outcome, and on standard error what is wrong with it (exit code 2). Before any process starts the
configuration is checked as a whole, and every mistake is listed in one message; `--check` does only that. Texts are
taken as they are written, and `~` at the beginning of a path is the home folder. A value may refer to another key
(`${policy.precision}`), to an environment variable (`${oc.env:HOME}`) or to the time (`${now:%Y-%m-%d}`).
"""


def markdown() -> str:
    """The whole page."""
    return "\n".join(
        [_INTRODUCTION, *_recipes(), *_options(), *(line for group in groups() for line in _section(group))]
    )


def _recipes() -> Iterator[str]:
    yield "## Recipes\n"
    yield from (f"- `+exp={name}`: {recipe_summary(name)}" for name in config_groups()[RECIPES])
    yield ""


def _options() -> Iterator[str]:
    yield "## Groups\n"
    for name, options in config_groups().items():
        if name != RECIPES:
            yield f"- `{name}`: " + ", ".join(f"`{name}={option}`" for option in options)
    yield ""


def _section(group: Group) -> Iterator[str]:
    if not group.keys:
        return
    yield f"## {_title(group)}\n"
    if group.name:
        yield f"{group.doc}\n"
    yield "| Key | Type | Default | Meaning |"
    yield "|---|---|---|---|"
    for key in group.keys:
        doc = " ".join(key.doc.split()).replace("|", "\\|")
        yield f"| `{key.name}` | {key.type} | `{key.default_text}` | {doc} |"
    yield ""


def _title(group: Group) -> str:
    """GRPO and PPO have a section of their own each beside those that they share."""
    if group.name in LOOPS and not group.shared:
        return f"Only in {group.name}"
    return " and ".join(group.names) or "Top level"


if __name__ == "__main__":
    print(markdown(), end="")
