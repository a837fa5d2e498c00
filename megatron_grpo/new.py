"""Writes a folder to start from: python -m megatron_grpo.new NAME [kind=KIND]"""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from megatron_grpo.config.command_line import as_command, parse_arguments
from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.overrides import list_config_groups
from megatron_grpo.config.paths import check_writable
from megatron_grpo.prepare.lessons import TRAIN_FILE, VAL_FILE, split_lessons

# What the folder of each kind holds; its files are templates in prepare/starter/KIND.
KINDS = {
    "environment": "two recipes, reward functions, an environment of two turns, and rows",
    "loss": "an objective, which gives each token its loss, and a recipe",
    "advantages": "a function from rewards to advantages, and a recipe",
    "algorithm": "an algorithm with a step and a loss, and a recipe",
    "family": "a family of models, a small model of it, and a recipe",
}
USAGE = f"""\
python -m megatron_grpo.new NAME [kind=KIND]

Writes the folder NAME, with code to start from and a test of it. It trains the quickstart's tiny model as it is; change
one file after another (docs/tutorial.md, docs/extending.md).

  NAME  a new folder in this one, and the name of the recipe: small letters, digits and _
  kind  {f"{chr(10)}        ".join(f"{kind}: {content}" for kind, content in KINDS.items())}
        (environment)
"""
_SUFFIX, _PLACEHOLDER = ".template", "NAME"
_ROWS = {TRAIN_FILE: 1024, VAL_FILE: 256}  # rows by file


@as_command("new", USAGE)
def main(arguments: Sequence[str]) -> int:
    """Write the folder; return the exit code."""
    parsed = parse_arguments(arguments, {"kind": str}, most_words=len(arguments))
    words, kind = parsed.words, parsed.options.get("kind", "environment")
    if kind not in KINDS:
        raise ConfigError([Problem(f"kind={kind}", f"must be one of {', '.join(KINDS)}")])
    if len(words) != 1:
        text = "give one name, such as my_task, for which there is no folder yet"
        raise ConfigError([Problem(" ".join(words) or "NAME", text)])
    (name,) = words
    reason = _explain_bad_name(name)
    if reason is not None:
        raise ConfigError([Problem(f"NAME={name}", reason)])
    if problems := list(check_writable("NAME", name)):
        raise ConfigError(problems)
    _write_starter(Path(name), name, kind)
    print(f"wrote {name}/; {name}/README.md tells what is where. Next:")
    print(f"  python -m pytest {name}")
    print(f"  python -m megatron_grpo.train --config-dir={name} +exp={name}")
    return 0


def _explain_bad_name(name: str) -> str | None:
    """Explain why this name cannot be taken; None: it can."""
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        return "is a folder, a Python module and a recipe, so it has small letters, digits and _, such as my_task"
    if os.path.lexists(name):
        return "already exists; give the name of a new folder"
    if importlib.util.find_spec(name) is not None:
        return "is a Python module that is installed, which would be imported in place of yours; choose another"
    groups = list_config_groups()
    if {name, f"{name}_turns"} & {*groups["exp"], *groups["env"]}:
        return "is a recipe or an environment of the package; choose another"
    return None


def _write_starter(target: Path, name: str, kind: str) -> None:
    # Written under another name and renamed, so that the folder is there whole or not at all.
    with tempfile.TemporaryDirectory(dir=".", prefix=f".{name}.") as temporary:
        folder = Path(temporary, name)
        _render_folder(resources.files("megatron_grpo.prepare").joinpath("starter", kind), folder, name)
        if kind == "environment":
            _write_rows(folder)
        shutil.move(folder, target)


def _write_rows(folder: Path) -> None:
    _, train, val = split_lessons("addition")
    for file, lessons in ((TRAIN_FILE, train), (VAL_FILE, val)):
        rows = [{key: lesson.row[key] for key in ("prompt", "answer")} for lesson in lessons[: _ROWS[file]]]
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _render_folder(templates: Traversable, folder: Path, name: str) -> None:
    """Write each template of a folder, with `name` in file names and texts."""
    folder.mkdir()
    for template in templates.iterdir():
        target = folder / template.name.removesuffix(_SUFFIX).replace(_PLACEHOLDER, name)
        if template.is_dir():
            _render_folder(template, target, name)
        else:
            target.write_text(template.read_text(encoding="utf-8").replace(_PLACEHOLDER, name), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
