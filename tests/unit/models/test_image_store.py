"""The decoder of images: odd files, limits, and the store under digests."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_grpo.models import image_store
from megatron_grpo.models.image_store import (
    copy_images,
    decode_image,
    digest_image,
    inspect_image,
    open_stored_image,
    store_image,
)
from tests.support.image_models import draw_picture, save


def test_a_picture_is_decoded_to_its_pixels() -> None:
    content = draw_picture(2, 3)
    image = decode_image(content)
    assert (image.mode, image.size) == ("RGB", (24, 16))
    assert np.asarray(image)[0, 0].tolist() == np.random.default_rng(0).integers(0, 256, 3, dtype=np.uint8).tolist()


def test_other_colours_become_rgb() -> None:
    cmyk = decode_image(save(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    assert np.asarray(cmyk)[4, 4, 0] > 200
    grey = decode_image(save(Image.fromarray(np.full((8, 8), 257 * 100, dtype=np.uint16))))
    assert np.asarray(grey)[0, 0].tolist() == [100, 100, 100], "16 bits are scaled, not cut off"
    palette = Image.new("P", (8, 8), 0)
    palette.putpalette([255, 0, 0])
    content = save(palette, transparency=b"\0")
    assert np.asarray(decode_image(content))[0, 0].tolist() == [255, 255, 255], "also of a palette"
    clear = decode_image(save(Image.new("RGBA", (8, 8), (0, 0, 0, 0))))
    assert np.asarray(clear)[0, 0].tolist() == [255, 255, 255], "transparency shows white"


def test_a_cameras_rotation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert decode_image(save(Image.new("RGB", (16, 8)), "JPEG", exif=exif)).size == (8, 16)


def test_of_a_photo_with_a_preview_behind_it_the_photo_is_taken() -> None:
    photo, preview = Image.new("RGB", (16, 8), "red"), Image.new("RGB", (8, 4), "blue")
    image = decode_image(save(photo, "MPO", save_all=True, append_images=[preview]))
    assert image.size == (16, 8)
    assert np.asarray(image)[0, 0, 0] > 200


def test_a_header_says_most_of_what_is_wrong() -> None:
    for content in (draw_picture(2, 3), draw_picture(2, 3, form="JPEG"), draw_picture(2, 3, form="WEBP")):
        inspect_image(content)
    bomb = save(Image.new("1", (10_000, 8_000)))
    for content in (b"", b"no image", draw_picture(8, 8)[:-300], draw_picture(8, 8, form="WEBP")[:-30], bomb):
        with pytest.raises(ValueError, match=r"^(is no image|cannot be decoded|has 10000 x 8000)"):
            inspect_image(content)


def test_a_cameras_remarks_that_are_damaged_are_one_message() -> None:
    exif = Image.Exif()
    exif[0x0112], exif[0x0100] = 6, 16  # the rotation, and a width
    damaged = exif.tobytes().replace(b"\x01\x00\x00\x04", b"\x01\x00\x00\x02")  # the width is said to be a text
    assert damaged != exif.tobytes()
    content = save(Image.new("RGB", (16, 8)), "JPEG", exif=damaged)
    with pytest.raises(ValueError, match=r"^cannot be decoded: required argument is not an integer"):
        decode_image(content)


def test_what_is_no_whole_still_image_is_refused() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    animation = save(frames[0], "WEBP", save_all=True, append_images=frames[1:], duration=100)
    for content, reason in {
        b"no image": "no image that can be read; give PNG, JPEG, WEBP",
        save(Image.new("RGB", (8, 8)), "BMP"): "no image that can be read",
        draw_picture(8, 8)[:-300]: "cannot be decoded",
        animation: "is an animation of 2 images",
    }.items():
        with pytest.raises(ValueError, match=reason):
            decode_image(content)


def test_a_bomb_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = save(Image.new("1", (10_000, 8_000)))
    assert len(bomb) < 100_000
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(ValueError, match="has 10000 x 8000 pixels, more than 67,108,864 together"):
        decode_image(bomb)
    monkeypatch.setattr(image_store, "MAX_BYTES", 10)
    with pytest.raises(ValueError, match="more than 10"):
        decode_image(draw_picture(1, 1))


def test_equal_contents_are_stored_once_and_a_changed_one_is_noticed(tmp_path: Path) -> None:
    content = draw_picture(1, 2)
    digests = {store_image(tmp_path, content) for _ in range(3)}
    assert digests == {digest_image(content)}
    assert len(list(tmp_path.iterdir())) == 1
    (digest,) = digests
    assert open_stored_image(tmp_path, digest).size == (16, 8)
    (tmp_path / digest).write_bytes(draw_picture(1, 3))
    with pytest.raises(ValueError, match="was changed since it was stored"):
        open_stored_image(tmp_path, digest)
    with pytest.raises(ValueError, match="cannot be read from"):
        open_stored_image(tmp_path, "0" * 64)


def test_images_are_copied_where_they_are_missing(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    contents = [draw_picture(1, 2), draw_picture(2, 1)]
    digests = [store_image(source, content) for content in contents]
    copy_images(digests[:1], source, target)
    (source / digests[0]).unlink()
    copy_images([*digests, digests[0]], source, target)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == dict(zip(digests, contents, strict=True))
    with pytest.raises(ValueError, match=f"the image {digests[0]} cannot be read from {source}: No such file"):
        copy_images(digests[:1], source, tmp_path / "other")
    (source / digests[1]).write_bytes(contents[0])
    with pytest.raises(ValueError, match="was changed since it was stored"):
        copy_images(digests[1:], source, tmp_path / "other")
    with pytest.raises(ValueError, match=r"'../source/secret' is not the digest of an image"):
        copy_images(["../source/secret"], source, target)
