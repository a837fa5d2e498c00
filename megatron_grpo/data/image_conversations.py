"""Conversations to learn from, with images: the rows of supervised fine-tuning and of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_grpo.batch.images import StoredImage, require_placeholders
from megatron_grpo.data.chat_messages import ASSISTANT
from megatron_grpo.data.image_prompts import ImageSource, add_images, expand_placeholders
from megatron_grpo.data.image_rows import place_images, read_images, show_images
from megatron_grpo.data.processors import DataProcessor, DatumSpec, Message, TaskDataSpec, apply_prompt_file
from megatron_grpo.data.supervised_rows import list_image_columns, name_row, require_length


@dataclass(frozen=True)
class ImageConversationProcessor:
    """Makes rows with images that are learnt from (`DataProcessor`)."""

    source: ImageSource
    make: DataProcessor  # of the same rows without images

    def __call__(
        self, row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any, max_seq_length: int, idx: int
    ) -> DatumSpec:
        """Make the sequence or the pair of a row, and store its images.

        A placeholder of the rendered text becomes as many tokens as its image has, as the model's processor does.

        ValueError: an image cannot be read, has no place, or stands in a learnt turn; or as without images.
        """
        try:
            placed, contents = self._place_row(row, spec, idx)
            images = add_images(contents, self.source)
        except ValueError as error:
            raise ValueError(name_row(error, idx)) from None
        # The text around every prompt is written already, and the length is known only with the tokens of images.
        rendered = replace(spec, prompt=None, takes_images=True, long_prompts="filter")
        datum = self.make(placed, rendered, tokenizer, max_seq_length, idx)
        try:
            sequences = [self._expand(messages, images) for messages in _list_sequences(datum)]
        except ValueError as error:
            raise ValueError(f"row {idx}: {error}") from None
        length = max(sum(len(message["token_ids"]) for message in messages) for messages in sequences)
        require_length(length, max_seq_length, spec, idx)
        datum |= {"message_log": sequences[0], "length": length, "images": images}
        if "rejected" in datum:
            datum["rejected"] = sequences[1]
        datum["loss_multiplier"] = 1.0 if length <= max_seq_length else 0.0
        datum["prompt"] = show_images(datum["prompt"])
        return datum

    def _place_row(self, row: dict[str, Any], spec: TaskDataSpec, idx: int) -> tuple[dict[str, Any], list[bytes]]:
        """Give images their places; returns the row without its images, and these."""
        folder, column = self.source.folder, self.source.column
        images = read_images(row.get(column), folder)
        placed = {name: value for name, value in row.items() if name != column}
        if spec.prompt_key in placed:
            placed[spec.prompt_key] = apply_prompt_file(row[spec.prompt_key], row, spec, idx)
        elif spec.prompt is not None:
            raise ValueError(f"{spec.prompt_setting} needs a column {spec.prompt_key!r} where rows have images")
        by_column: list[list[bytes]] = []
        for name in list_image_columns(placed, spec):
            placed[name], contents = place_images(placed[name], images, folder)
            by_column.append(contents)
        if any(contents != by_column[0] for contents in by_column):
            raise ValueError(f"columns {spec.chosen_key!r} and {spec.rejected_key!r} show different images")
        return placed, by_column[0]

    def _expand(self, messages: Sequence[Message], images: Sequence[StoredImage]) -> list[Message]:
        """Repeat each placeholder for the tokens of its image."""
        vision = self.source.vision
        for message in messages:
            if message["role"] == ASSISTANT and not set(vision.placeholders).isdisjoint(message["token_ids"]):
                raise ValueError("a turn that is learnt has an image, and the model never writes one")
        placeholders = sum(message["token_ids"].count(vision.image_token) for message in messages)
        if placeholders != len(images):
            raise ValueError(f"has {len(images)} images, and the rendered conversation {placeholders} places")
        remaining = iter(images)
        expanded: list[Message] = [
            {**message, "token_ids": list(expand_placeholders(message["token_ids"], remaining, vision))}
            for message in messages
        ]
        token_ids = np.array([token for message in expanded for token in message["token_ids"]])
        require_placeholders(token_ids, images, vision)
        return expanded


def _list_sequences(datum: DatumSpec) -> list[list[Message]]:
    return [datum["message_log"], *([datum["rejected"]] if "rejected" in datum else [])]
