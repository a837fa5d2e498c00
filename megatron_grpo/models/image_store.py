"""Images as files under the digest of their content, and the decoder with its limits."""

from __future__ import annotations

import hashlib
import io
import os
import re
import struct
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_grpo.config.outside_files import read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP")
_SERIES = "MPO"  # a JPEG photo with further pictures behind it (previews, depth), which Pillow takes for a series
MAX_BYTES = 64 * 2**20  # of an image's file
MAX_PIXELS = 64 * 2**20  # of an image: more decode to over 200 MiB
STORE_FOLDER = "images"  # in the run's folder, and in a checkpoint whose rollouts have images
_DIGEST = re.compile("[0-9a-f]{64}")


def locate_images(run_dir: str) -> Path:
    """Locate the store of a run's images."""
    return Path(run_dir).absolute() / STORE_FOLDER


def decode_image(content: bytes) -> Image:
    """Decode the content of an image file to upright RGB, within limits.

    Transparency is laid over white, 16 bits a channel are scaled to 8, and a camera's rotation is applied.

    Raises:
        ValueError: the content is no whole still image of `FORMATS`, or it is too large.
    """
    from PIL import ImageOps

    with _open_image(content) as image:
        image.load()
        return _convert_to_rgb(ImageOps.exif_transpose(image))


def inspect_image(content: bytes) -> None:
    """Check an image file by its header and checksums, without its pixels.

    Raises:
        ValueError: as `decode_image`; a JPEG that ends early passes.
    """
    with _open_image(content) as image:
        image.verify()


@contextmanager
def _open_image(content: bytes) -> Iterator[Image]:
    """Open an image file within limits; errors of Pillow become ValueError."""
    from PIL import Image, UnidentifiedImageError

    if len(content) > MAX_BYTES:
        raise ValueError(f"has {len(content):,} bytes, more than {MAX_BYTES:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is lower
            image = Image.open(io.BytesIO(content), formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"is no image that can be read; give {', '.join(FORMATS)}") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"cannot be decoded: {error}") from None
    with image:
        _refuse_form(image)
        try:
            yield image
        except (OSError, SyntaxError, ValueError, struct.error) as error:  # struct.error: of a camera's remarks
            raise ValueError(f"cannot be decoded: {error}") from None


def _refuse_form(image: Image) -> None:
    """Refuse an image by its header, before its pixels are decoded."""
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"has {width} x {height} pixels, more than {MAX_PIXELS:,} together")
    if image.format != _SERIES and getattr(image, "n_frames", 1) > 1:
        raise ValueError(f"is an animation of {image.n_frames} images; give one of them")  # type: ignore[attr-defined]


def _convert_to_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits a pixel, which Pillow would clip at 255
        return image.convert("I").point(lambda value: value / 257).convert("L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")
    return image.convert("RGB")


def digest_image(content: bytes) -> str:
    """Digest the content of an image file: SHA-256, hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def store_image(folder: Path, content: bytes) -> str:
    """Store an image file's content unless it is there; returns its digest."""
    digest = digest_image(content)
    file = folder / digest
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{digest}.{os.getpid()}"
        partial.write_bytes(content)
        partial.replace(file)  # a reader sees the whole file or none
    return digest


def open_stored_image(folder: Path, digest: str) -> Image:
    """Decode an image of the store; ValueError: it is not there, or was changed."""
    return decode_image(_read_stored(folder, digest))


def copy_images(digests: Iterable[str], source: Path, target: Path) -> None:
    """Copy images from one store to another that lacks them.

    ValueError: one is not there, or was changed.
    """
    for digest in sorted(set(digests)):
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r:.100} is not the digest of an image")
        if not (target / digest).is_file():
            store_image(target, _read_stored(source, digest))


def _read_stored(folder: Path, digest: str) -> bytes:
    try:
        content = read_bytes(folder / digest, MAX_BYTES, links=True)
    except OSError as error:
        raise ValueError(f"the image {digest} cannot be read from {folder}: {error.strerror}") from None
    if digest_image(content) != digest:
        raise ValueError(f"the image {folder / digest} was changed since it was stored")
    return content
