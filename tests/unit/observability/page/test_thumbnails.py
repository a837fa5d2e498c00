"""Images of prompts on the page: small copies in the text around them, within bounds."""

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.models.image_store import locate_images, store_image
from megatron_grpo.observability.page.thumbnails import AROUND, MAX_SIDE, add_images
from tests.support.image_models import draw_picture, save

SMALL = draw_picture(2, 3)
PHOTO = save(Image.effect_noise((2000, 1000), 90).convert("RGB"), "JPEG")


@pytest.fixture
def images(tmp_path: Path) -> list[StoredImage]:
    store = locate_images(str(tmp_path))
    return [StoredImage(store_image(store, SMALL), 4, 6), StoredImage(store_image(store, PHOTO), 70, 142)]


def describe(folder: Path, rows: list[dict[str, Any]], characters: int = 10**6) -> dict[str, Any]:
    table = add_images({"rows": {str(row["group"]): {} for row in rows}}, rows, folder, characters)
    images: dict[str, Any] = table.get("images", {})
    return images


def make_row(images: list[StoredImage], prompt: str, group: int = 0) -> dict[str, Any]:
    return {"group": group, "images": [image._asdict() for image in images], "prompt": prompt}


def open_source(source: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))


def test_small_copies_stand_in_the_text_around_them(tmp_path: Path, images: list[StoredImage]) -> None:
    prompt = f"{'x' * 500} first <image> or <image> second {'y' * 500}"
    first, second = describe(tmp_path, [make_row(images, prompt)])["0"]
    assert open_source(first["source"]).convert("RGB").tobytes() == Image.open(io.BytesIO(SMALL)).tobytes()
    assert open_source(second["source"]).size == (MAX_SIDE, MAX_SIDE // 2)
    assert (first["size"], second["size"]) == ("4 x 6 patches", "70 x 142 patches")
    assert (first["after"], second["before"]) == (" or ", " or ")
    assert first["before"].endswith("xx first ")
    assert second["after"].startswith(" second yy")
    assert len(first["before"]) == len(second["after"]) == AROUND


def test_a_prompt_without_its_middle_has_images_alone(tmp_path: Path, images: list[StoredImage]) -> None:
    (first, _) = describe(tmp_path, [make_row(images, "a <image> b")])["0"]
    assert first["source"] is not None
    assert (first["before"], first["after"]) == ("", "")


def test_thumbnails_have_room_for_some(tmp_path: Path, images: list[StoredImage]) -> None:
    rows = [make_row(images[1:], "<image>", group=number) for number in range(20)]
    described = describe(tmp_path, rows, 30_000)
    lengths = [len(image["source"]) for (image,) in described.values() if image["source"] is not None]
    assert 0 < len(lengths) < 20
    assert sum(lengths[:-1]) < 30_000, "the last one that began within the room is whole"
    assert len(described) == 20, "the others are named"


def test_what_the_folder_lacks_is_left_out(tmp_path: Path, images: list[StoredImage]) -> None:
    store = locate_images(str(tmp_path))
    (store / images[0].digest).write_bytes(PHOTO)  # another one under its name
    (store / images[1].digest).unlink()
    (store / images[1].digest).symlink_to("/etc/hostname")
    described = describe(tmp_path, [make_row([*images, StoredImage("0" * 64, 2, 2)], "?")])
    assert [image["source"] for image in described["0"]] == [None] * 3


def test_a_table_without_images_stays_as_it_is(tmp_path: Path) -> None:
    assert describe(tmp_path, [make_row([], "text"), {"group": 1}]) == {}
