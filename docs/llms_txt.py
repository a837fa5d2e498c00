"""Writes llms.txt and the sources of the pages beside the site, as mkdocs.yml asks."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent


def format_index(index: str, summary: str) -> str:
    """Turn the tables of an index of pages into lists of links with a description."""
    lines = ["# megatron_grpo", "", f"> {summary}"]
    for group in index.split("\n## ")[1:]:
        rows = re.findall(r"^\| (\[\w+\]\(\w+\.md\)) \| (.*) \|$", group, flags=re.MULTILINE)
        lines += ["", f"## {group.splitlines()[0]}", "", *(f"- {link}: {text}" for link, text in rows)]
    return "\n".join([*lines, ""])


def on_post_build(config: Any) -> None:
    """Write the index, and the pages that it links to."""
    site = Path(config["site_dir"])
    index = (DOCS / "README.md").read_text()
    (site / "llms.txt").write_text(format_index(index, config["site_description"]))
    for page in DOCS.glob("*.md"):
        shutil.copy(page, site / page.name)
