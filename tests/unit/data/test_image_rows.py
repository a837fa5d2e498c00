"""Rows with images: every form of an image, and its place in the prompt."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron_grpo.data.image_rows import (
    MARK,
    attach_images,
    has_images,
    place_images,
    read_images,
    show_images,
    take_images,
    write_images,
)
from megatron_grpo.models.image_store import decode_image
from tests.support.image_models import draw_picture, save

CONTENT = draw_picture(1, 2)
PLACE = {"type": "image"}


def test_every_form_gives_the_content_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(CONTENT)
    url = f"data:image/png;base64,{base64.b64encode(CONTENT).decode()}"
    forms: list[Any] = ["a.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png", CONTENT, url]
    forms += [{"bytes": CONTENT, "path": None}, {"bytes": None, "path": "a.png"}]
    for form in forms:
        assert read_images(form, tmp_path) == [CONTENT]
    assert read_images(forms, tmp_path) == [CONTENT] * len(forms)
    assert read_images(None, tmp_path) == []
    for opened in (Image.new("RGB", (8, 8), "red"), Image.new("CMYK", (8, 8))):
        assert read_images(opened, tmp_path)[0].startswith(b"\x89PNG")


def test_an_opened_photo_keeps_its_rotation_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    photo = Image.open(io.BytesIO(save(Image.new("RGB", (16, 8)), "JPEG", exif=exif)))
    assert decode_image(*read_images(photo, tmp_path)).size == (8, 16)
    damaged = Image.open(io.BytesIO(draw_picture(8, 8)[:-300]))
    with pytest.raises(ValueError, match=r"image 1 cannot be decoded: .*truncated"):
        read_images(damaged, tmp_path)


def test_a_scripts_rows_are_written_as_text_that_reads_from_anywhere(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(CONTENT)
    opened = Image.open(io.BytesIO(CONTENT))
    parts = [{"type": "image", "image": opened}, {"type": "text", "text": "Which?"}]
    forms = ["a.png", f"file://{tmp_path}/a.png", CONTENT, {"bytes": CONTENT}, {"bytes": None, "path": "a.png"}]
    rows = [json.loads(write_images({"image": form, "answer": 3}, "image")) for form in [*forms, forms, None]]
    assert rows[0]["answer"] == 3
    elsewhere = Path("/nowhere")
    for row in rows[: len(forms)]:
        assert read_images(row["image"], elsewhere) == [CONTENT]
    assert read_images(rows[-2]["image"], elsewhere) == [CONTENT] * len(forms)
    assert rows[-1]["image"] is None
    row = json.loads(write_images({"prompt": [{"role": "user", "content": parts}]}, "image"))
    _, (image,) = place_images(row["prompt"], [], elsewhere)
    assert decode_image(image).tobytes() == opened.tobytes()
    with pytest.raises(TypeError, match="set is neither text nor number nor image"):
        write_images({"image": None, "answer": {3}}, "image")


@pytest.mark.parametrize(
    ("image", "reason"),
    [
        ("missing.png", "image 1 is not there"),
        ("https://example.com/a.png", "is a link .* nothing is fetched"),
        ("data:image/png;base64,%%%", "base64 is damaged"),
        ("data:image/png,abc", "not in base64"),
        (3, "image 1 is int; give a path"),
        ("", "is str; give a path"),
        ([CONTENT, 3], "image 2 is int"),
    ],
)
def test_what_cannot_be_read_is_named(image: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        read_images(image, tmp_path)


def test_images_stand_where_the_prompt_has_places(tmp_path: Path) -> None:
    text = {"type": "text", "text": "Which?"}
    messages, images = place_images("Which?", [b"1", b"2"], tmp_path)
    assert messages == [{"role": "user", "content": [PLACE, PLACE, text]}], "without places before the text"
    assert images == [b"1", b"2"]
    messages, _ = place_images(f"A {MARK} and {MARK}", [b"1", b"2"], tmp_path)
    assert messages[0]["content"] == [{"type": "text", "text": "A "}, PLACE, {"type": "text", "text": " and "}, PLACE]
    turns = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "image", "image": CONTENT}, text, {"type": "image"}]},
    ]
    messages, images = place_images(turns, [b"2"], tmp_path)
    assert messages == [turns[0], {"role": "user", "content": [PLACE, text, PLACE]}]
    assert images == [CONTENT, b"2"], "in the order of their places"
    url = {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(CONTENT).decode()}"}}
    assert place_images([{"role": "user", "content": [url, text]}], [], tmp_path)[1] == [CONTENT]
    assert place_images("Only text", [], tmp_path) == ([{"role": "user", "content": "Only text"}], [])


@pytest.mark.parametrize(
    ("prompt", "images", "counts"),
    [(f"{MARK}", [], "0 images in its column, and 1 places"), (f"{MARK}", [b"1", b"2"], "2 images .* and 1 places")],
)
def test_more_or_fewer_images_than_places_are_refused(
    prompt: str, images: list[bytes], counts: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=counts):
        place_images(prompt, images, tmp_path)


def test_a_prompt_is_shown_with_marks() -> None:
    content = [PLACE, {"type": "text", "text": "Which?"}]
    assert has_images(content)
    assert not has_images([{"type": "text", "text": "Which?"}])
    assert not has_images([PLACE, {"type": "audio"}])
    assert show_images([{"role": "user", "content": content}]) == [{"role": "user", "content": f"{MARK}Which?"}]
    assert show_images("text") == "text"


def test_the_images_of_a_prompt_come_back_as_data_urls() -> None:
    contents = [CONTENT, draw_picture(2, 1, form="JPEG"), draw_picture(1, 1, form="WEBP")]
    prompt = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [PLACE, {"type": "text", "text": "or"}, PLACE]},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "and"}, PLACE]},
    ]
    messages = attach_images(show_images(prompt), contents)
    assert take_images(messages, None) == (prompt, contents)
    urls = [part["image_url"]["url"] for message in messages for part in message["content"] if "image_url" in part]
    assert [url.partition(";")[0] for url in urls] == ["data:image/png", "data:image/jpeg", "data:image/webp"]
