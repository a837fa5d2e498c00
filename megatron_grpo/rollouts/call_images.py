"""Images of an agent's calls: data URLs of messages go into the run's store, and messages carry digests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_grpo.batch.images import Images, StoredImage
from megatron_grpo.data.chat_messages import ChatMessage
from megatron_grpo.data.image_prompts import (
    RunImages,
    TooManyImagesError,
    fill_places,
    measure_image,
    require_few_images,
    require_few_tokens,
)
from megatron_grpo.data.image_rows import PLACE, take_images
from megatron_grpo.models.image_store import digest_image, store_image
from megatron_grpo.rollouts.call_prompts import BadCallError

IMAGE_BYTES = 2**22  # that a call may have more for each image of a prompt


class CallImages:
    """Images of one rollout's calls; each is decoded once."""

    def __init__(self, run: RunImages) -> None:
        self._run = run
        self._known: dict[str, StoredImage] = {}  # by digest

    @property
    def largest(self) -> int:
        """Most bytes of the images of a call."""
        return self._run.max_images * IMAGE_BYTES

    def store(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        """Store the images of messages; returns messages with digests.

        BadCallError: an image is a link, cannot be decoded, or they are too many.
        """
        try:
            emptied, contents = take_images(messages, None)
            require_few_images(len(contents), self._run)  # before any is decoded
            images = [self._measure(number, content) for number, content in enumerate(contents, start=1)]
            self.require_few(images)
        except TooManyImagesError as error:
            raise BadCallError(f"the conversation {error}") from None
        except ValueError as error:
            raise BadCallError(str(error)) from None
        for image, content in zip(images, contents, strict=True):
            if image.digest not in self._known:
                store_image(self._run.store, content)
                self._known[image.digest] = image
        remaining = iter(images)
        return [{**message, **_fill_content(message, remaining)} for message in emptied]

    def _measure(self, number: int, content: bytes) -> StoredImage:
        try:
            return self._known.get(digest_image(content)) or measure_image(content, self._run)
        except ValueError as error:
            raise ValueError(f"image {number} {error}") from None

    def require_few(self, images: Images) -> None:
        """BadCallError: a conversation has too many images, or too large ones."""
        try:
            require_few_images(len(images), self._run)
            require_few_tokens(images, self._run)
        except TooManyImagesError as error:
            raise BadCallError(f"the conversation {error}") from None

    def fill(self, token_ids: Sequence[int], images: Images) -> list[int]:
        """Repeat placeholders for tokens of images; BadCallError about their number."""
        try:
            return fill_places(token_ids, images, self._run)
        except ValueError as error:
            raise BadCallError(str(error)) from None


def _fill_content(message: ChatMessage, images: Iterator[StoredImage]) -> dict[str, Any]:
    parts = message.get("content")
    if not isinstance(parts, list):
        return {}
    return {"content": [{**PLACE, **next(images)._asdict()} if part == PLACE else part for part in parts]}


def list_images(messages: Sequence[ChatMessage]) -> list[StoredImage]:
    """List the images of stored messages, in order."""
    contents = (message.get("content") for message in messages)
    parts = [part for content in contents if isinstance(content, list) for part in content]
    stored = [part for part in parts if isinstance(part, dict) and part.get("type") == PLACE["type"]]
    return [StoredImage(*(part[name] for name in StoredImage._fields)) for part in stored]
