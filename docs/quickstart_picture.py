"""Takes the curves of a quickstart into the README: python docs/quickstart_picture.py RUN_DIR."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).parents[1]
README, PICTURE = ROOT / "README.md", ROOT / "docs" / "images" / "quickstart.png"
LINK = re.compile(r"!\[.*\]\(docs/images/quickstart\.png\)")


def describe_run(run_dir: Path) -> str:
    """Name the recipe of a finished run, its steps and what it learnt."""
    name = yaml.safe_load((run_dir / "config.yaml").read_text())["name"]
    summary = json.loads((run_dir / "summary.json").read_text())
    if name != "quickstart" or summary["outcome"] != "completed":
        raise SystemExit(f"{run_dir} is no finished run of +exp=quickstart")
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    return f"{name}: {summary['steps']} steps, held-out accuracy {before:.3f} -> {after:.3f}"


def take_picture(run_dir: Path) -> None:
    """Store the curves; picture and README say which run they show."""
    information, text = PngInfo(), describe_run(run_dir)
    information.add_text("Title", text)
    with Image.open(run_dir / "curves.png") as picture:
        picture.convert("P", palette=Image.Palette.ADAPTIVE).save(PICTURE, pnginfo=information, optimize=True)
    README.write_text(LINK.sub(f"![{text}](docs/images/quickstart.png)", README.read_text()))


if __name__ == "__main__":
    take_picture(Path(sys.argv[1]))
