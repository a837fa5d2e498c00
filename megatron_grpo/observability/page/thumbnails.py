"""Thumbnails of the images in prompts, with the text around them."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.config.outside_files import require_regular
from megatron_grpo.data.image_rows import MARK
from megatron_grpo.models.image_store import locate_images, open_stored_image

MAX_SIDE = 160  # pixels of a thumbnail's longer side
MAX_IMAGES = 16  # of a prompt
AROUND = 120  # most characters of the text before an image, and after it


def add_images(
    table: dict[str, Any], rows: Sequence[Mapping[str, Any]], run_dir: Path, characters: int
) -> dict[str, Any]:
    """Add the images of each group in a step's table.

    `rows`: the rollouts of the table; `characters`: of all thumbnails together. Without images
    the table stays as it is.
    """
    first_rows = {str(row["group"]): row for row in reversed(rows) if row.get("images")}
    store, described = locate_images(str(run_dir)), dict[str, list[dict[str, Any]]]()
    for group in table["rows"]:
        if group in first_rows:
            described[group] = list(_describe_images(first_rows[group], store, characters))
            characters -= sum(len(image["source"] or "") for image in described[group])
    return table | {"images": described} if described else table


def _describe_images(row: Mapping[str, Any], store: Path, characters: int) -> Iterator[dict[str, Any]]:
    images = row["images"][:MAX_IMAGES]
    texts = str(row.get("prompt") or "").split(MARK)
    is_whole = len(texts) == len(row["images"]) + 1  # the middle of a long prompt is left out
    for number, image in enumerate(images):
        before, after = texts[number : number + 2] if is_whole else ("", "")
        source = _make_thumbnail(store, image["digest"]) if characters > 0 else None
        characters -= len(source or "")
        yield {
            "source": source,
            "size": f"{image['rows']} x {image['columns']} patches",
            "before": before[-AROUND:],
            "after": after[:AROUND],
        }


def _make_thumbnail(store: Path, digest: str) -> str | None:
    """Make a data URL of a small copy; None: the store lacks the image."""
    try:
        require_regular(store / digest, links=False)
        image = open_stored_image(store, digest)
    except (OSError, ValueError):
        return None
    is_small = max(image.size) <= MAX_SIDE
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    file = io.BytesIO()
    form = "PNG" if is_small else "WEBP"  # what is small may have single pixels that matter
    image.save(file, format=form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
