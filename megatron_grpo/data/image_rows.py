"""Images of rows in every form of data: paths, bytes, data URLs, features of hub sets, parts of messages."""

from __future__ import annotations

import base64
import binascii
import io
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_grpo.models.image_store import MAX_BYTES

MARK = "<image>"  # in a prompt's text, stands for the next image of the row
_KINDS = ("image", "image_url", "input_image")  # of a message's part
_PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
PLACE: dict[str, Any] = {"type": "image"}


def read_images(value: Any, folder: Path) -> list[bytes]:
    """Read the images of a row's column, as contents of image files.

    `value`: an image or a list of images; null: none. `folder`: of paths that are not absolute. ValueError: an image
    is missing, or of an unknown form.
    """
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [_read_numbered(number, image, folder) for number, image in enumerate(value, start=1)]
    return [_read_numbered(1, value, folder)]


def _read_numbered(number: int, image: Any, folder: Path | None) -> bytes:
    try:
        return read_image(image, folder)
    except ValueError as error:
        raise ValueError(f"image {number} {error}") from None


def read_image(image: Any, folder: Path | None) -> bytes:
    """Read the content of an image's file; ValueError: missing, or of unknown form.

    `folder`: of paths that are not absolute; None: no file is read.
    """
    if isinstance(image, Mapping):  # the feature of a hub set that is not decoded
        image = image.get("path") if image.get("bytes") is None else image["bytes"]
    if isinstance(image, bytes):
        return image
    if is_opened(image):
        return _write_opened(image)
    if not isinstance(image, str) or not image:
        raise ValueError(f"is {type(image).__name__}; give a path, bytes, a data URL, or {{bytes, path}}")
    if image.startswith("data:"):
        return _decode_url(image)
    if "://" in image and not image.startswith("file://"):
        advice = "a data URL" if folder is None else "its file, or a data URL"
        raise ValueError(f"is a link ({image[:60]}), and nothing is fetched; give {advice}")
    if folder is None:
        raise ValueError("is no data URL; write data:image/png;base64,...")
    return _read_file(folder / image.removeprefix("file://"))


def is_opened(image: Any) -> bool:
    """True for an image that a script opened with Pillow."""
    return hasattr(image, "save") and hasattr(image, "size")


def _write_opened(image: Any) -> bytes:
    from PIL import ImageOps

    file = io.BytesIO()
    try:
        upright = ImageOps.exif_transpose(image)
        upright = upright if upright.mode in _PNG_MODES else upright.convert("RGB")
        upright.save(file, format="PNG")
    except (OSError, SyntaxError, struct.error) as error:  # Pillow reads a file only now
        raise ValueError(f"cannot be decoded: {error}") from None
    return file.getvalue()


def write_images(row: Mapping[str, Any], column: str) -> str:
    """Write a script's row as JSON that reads alike from any folder.

    Images become data URLs, and paths in `column` absolute. TypeError, ValueError: the row has values of other kinds.
    """
    value = row.get(column)
    images = [_locate(image) for image in value] if isinstance(value, list | tuple) else _locate(value)
    return json.dumps({**row, column: images}, ensure_ascii=False, default=_make_data_url)


def _locate(image: Any) -> Any:
    """Make a path absolute; other images stay as they are."""
    if isinstance(image, Mapping) and image.get("bytes") is None:
        image = image.get("path")
    is_path = isinstance(image, str) and image and "://" not in image and not image.startswith("data:")
    return str(Path(image).absolute()) if is_path else image


def _make_data_url(image: Any) -> str:
    if not (isinstance(image, bytes) or is_opened(image)):
        raise TypeError(f"{type(image).__name__} is neither text nor number nor image")
    return f"data:;base64,{base64.b64encode(read_image(image, Path())).decode()}"


def _decode_url(url: str) -> bytes:
    header, comma, text = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise ValueError("is a data URL that is not in base64; write data:image/png;base64,...")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"is a data URL whose base64 is damaged: {error}") from None


def _read_file(file: Path) -> bytes:
    try:
        if not file.is_file():
            raise ValueError(f"is not there: {file}")
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"has more than {MAX_BYTES:,} bytes: {file}")
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot be read: {file}: {error.strerror}") from None


def has_images(content: Any) -> bool:
    """True for a content of parts that are images and texts."""
    parts = content if isinstance(content, list) else []
    return any(_is_image(part) for part in parts) and all(_is_image(part) or _is_text(part) for part in parts)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _KINDS


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def show_images(prompt: Any) -> Any:
    """Write the images of a prompt's messages as `MARK`."""
    if not isinstance(prompt, list):
        return prompt
    return [
        {**message, "content": _show_parts(message["content"])}
        if isinstance(message, Mapping) and has_images(message.get("content"))
        else message
        for message in prompt
    ]


def _show_parts(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(MARK if _is_image(part) else str(part["text"]) for part in parts)


def place_images(prompt: Any, images: Sequence[bytes], folder: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Give each image of a row its place in the messages.

    A place is a part of type image, or `MARK` in a text; a part may hold its image itself. Without any place the images
    stand before the text of the user's first message.

    Returns:
        The messages, whose images are parts without content, and the images in the order of their places.

    Raises:
        ValueError: there are more or fewer images than places, or one cannot be read.
    """
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    messages: list[dict[str, Any]] = [dict(turn) for turn in turns]
    remaining, ordered, slot_count = iter(images), list[bytes](), 0
    for message in messages:
        parts = list(_split_parts(message.get("content")))
        if not any(_is_image(part) for part in parts):
            continue
        for number, part in enumerate(parts):
            if not _is_image(part):
                continue
            slot_count += 1
            image = _read_part(part, slot_count, folder)
            image = next(remaining, None) if image is None else image
            if image is not None:
                ordered.append(image)
            parts[number] = PLACE
        message["content"] = parts
    unused = len(list(remaining))
    if not slot_count and images:
        first = next((message for message in messages if message.get("role") == "user"), None)
        if first is None:
            raise ValueError("has images, and no message is the user's")
        text = first.get("content")
        rest = [{"type": "text", "text": text}] if isinstance(text, str) else list(text or ())
        first["content"] = [*[PLACE] * len(images), *rest]
        return messages, list(images)
    if unused or len(ordered) != slot_count:
        raise ValueError(f"has {len(images)} images in its column, and {slot_count} places for images in its prompt")
    return messages, ordered


def take_images(messages: Sequence[Mapping[str, Any]], folder: Path | None) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Take the images out of messages whose parts hold them.

    `folder`: as of `read_image`.

    Returns:
        The messages, whose images are parts without content, and the images in order.

    Raises:
        ValueError: a part holds no image or one that cannot be read, or stands beside parts of other kinds.
    """
    emptied, contents = list[dict[str, Any]](), list[bytes]()
    for number, message in enumerate(messages, start=1):
        parts = message.get("content")
        if not (isinstance(parts, list) and any(map(_is_image, parts))):
            emptied.append(dict(message))
            continue
        parts = list(map(_rename_text, parts))
        if not has_images(parts):
            raise ValueError(f"message {number} has parts that are neither text nor image")
        for part in filter(_is_image, parts):
            content = _read_part(part, len(contents) + 1, folder)
            if content is None:
                raise ValueError(f"image {len(contents) + 1} is a part without an image")
            contents.append(content)
        emptied.append({**message, "content": [PLACE if _is_image(part) else part for part in parts]})
    return emptied, contents


def _rename_text(part: Any) -> Any:
    is_renamed = isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text")
    return {"type": "text", "text": part.get("text")} if is_renamed else part


def attach_images(prompt: Sequence[Mapping[str, Any]], contents: Sequence[bytes]) -> list[dict[str, Any]]:
    """Put images as data URLs where `show_images` left marks."""
    remaining = iter(contents)
    return [
        {**message, "content": [_make_url_part(next(remaining)) if part == PLACE else part for part in parts]}
        if PLACE in (parts := list(_split_parts(message.get("content"))))
        else dict(message)
        for message in prompt
    ]


def _make_url_part(content: bytes) -> dict[str, Any]:
    kind = "png" if content.startswith(b"\x89PNG") else "jpeg" if content.startswith(b"\xff\xd8") else "webp"
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(content).decode()}"}}


def _split_parts(content: Any) -> Iterator[dict[str, Any]]:
    """Split a message's content into parts, also a text at its marks."""
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        text = part.get("text") if isinstance(part, Mapping) else None
        if _is_image(part) or not isinstance(text, str):
            yield part
            continue
        for number, piece in enumerate(text.split(MARK)):
            if number:
                yield PLACE
            if piece:
                yield {"type": "text", "text": piece}


def _read_part(part: Mapping[str, Any], number: int, folder: Path | None) -> bytes | None:
    """Read the image of a part; None: it holds none."""
    value = next((part[name] for name in ("image", "image_url", "url", "path") if part.get(name) is not None), None)
    if isinstance(value, Mapping) and "url" in value:
        value = value["url"]
    return None if value is None else _read_numbered(number, value, folder)
