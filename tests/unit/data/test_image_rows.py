"""Rows with images: every form of an image, and its place in the prompt."""

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from megatron_grpo.data.image_rows import MARK, has_images, place_images, read_images, show_images
from tests.support.image_models import draw_picture

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
    opened = Image.new("RGB", (8, 8), "red")
    assert read_images(opened, tmp_path)[0].startswith(b"\x89PNG")


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
