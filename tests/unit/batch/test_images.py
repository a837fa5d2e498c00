"""Positions of images and text in a sequence, against transformers' own."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from megatron_grpo.batch.images import StoredImage, compute_grid_positions, require_placeholders
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.source import PREPARED_MODELS
from megatron_grpo.platform.device import detect_platform
from megatron_grpo.trainer.image_tokens import ImageTokens
from megatron_grpo.trainer.microbatch import MicrobatchMaker
from megatron_grpo.trainer.model.packed_sequences import lay_out as lay_out_rank

SHAPE = parse_model_shape(PREPARED_MODELS["counting"])
assert SHAPE.vision is not None
VISION, IMAGE = SHAPE.vision, SHAPE.vision.image_token
WIDE, TALL, ONE = StoredImage("a", 4, 10), StoredImage("b", 8, 2), StoredImage("c", 2, 2)


def lay_out(*parts: StoredImage | int) -> np.ndarray:
    """Token ids of images, and of this many tokens of text."""
    counts = [(IMAGE, part.count_tokens(VISION)) if isinstance(part, StoredImage) else (5, part) for part in parts]
    return np.concatenate([np.full(count, token) for token, count in counts])


@pytest.mark.parametrize(
    "parts",
    [(7,), (3, WIDE, 4), (WIDE, 2, TALL, 1, ONE, 5), (1, ONE, 1, ONE), (2, TALL)],
    ids=["text", "one", "three", "small", "at the end"],
)
def test_positions_are_those_of_transformers(parts: tuple[StoredImage | int, ...]) -> None:
    ids = lay_out(*parts)
    images = [part for part in parts if isinstance(part, StoredImage)]
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**PREPARED_MODELS["counting"]))
    tokens = torch.from_numpy(ids)[None]
    grids = torch.tensor([[1, image.rows, image.columns] for image in images]) if images else None
    expected, _ = model.model.get_rope_index(tokens, mm_token_type_ids=(tokens == IMAGE).int(), image_grid_thw=grids)
    assert np.array_equal(compute_grid_positions(ids, images, VISION), expected[:, 0].numpy())


def test_images_without_text_between_them_are_told_apart_by_their_sizes() -> None:
    positions = compute_grid_positions(lay_out(ONE, TALL, 1), [ONE, TALL], VISION)
    assert positions[:, 1:].T.tolist() == [[1, 1, 1], [1, 2, 1], [1, 3, 1], [1, 4, 1], [5, 5, 5]]


def test_placeholders_have_to_be_those_of_the_images() -> None:
    require_placeholders(lay_out(2, WIDE), [WIDE], VISION)
    with pytest.raises(ValueError, match="has 10 placeholder tokens, and its 2 images need 14"):
        require_placeholders(lay_out(2, WIDE), [WIDE, TALL], VISION)


def test_a_rank_gets_the_features_of_the_tokens_that_it_embeds() -> None:
    ids = [lay_out(2, ONE, 1), lay_out(3), lay_out(1, TALL, 1)]
    fields = TokenFields(token_ids=torch.from_numpy(np.concatenate(ids)))
    batch = TokenBatch([len(part) for part in ids], fields, [[ONE], [], [TALL]])
    source = np.array([9, 2, -1, 8, 0, 11])  # index of each of the rank's tokens in the flat sequences
    tokens = ImageTokens.locate(batch, source, SHAPE)
    assert tokens.images == [ONE, TALL]
    assert tokens.slots.tolist() == [0, 1, 3, 5]
    assert tokens.features.tolist() == [2, 0, 1, 4]


def test_a_batch_that_lost_its_images_is_noticed() -> None:
    """Before the step learns from placeholders that nobody filled."""
    ids = lay_out(2, ONE, 1)
    config, tower = PolicyConfig(), cast(Any, SimpleNamespace(compute=lambda tokens: tokens.images))
    maker = MicrobatchMaker(config, SHAPE, detect_platform(), tower)
    fields = TokenFields(token_ids=torch.from_numpy(ids))
    layout = lay_out_rank([len(ids)])
    assert maker._place_images(layout, TokenBatch([len(ids)], fields, [[ONE]])) == [ONE]
    for images in (None, [[]]):
        with pytest.raises(AssertionError, match="0 tokens of images, 1 placeholders"):
            maker._place_images(layout, TokenBatch([len(ids)], fields, images))
    text = TokenBatch([3], TokenFields(token_ids=torch.from_numpy(lay_out(3))))
    assert maker._place_images(lay_out_rank([3]), text) is None
