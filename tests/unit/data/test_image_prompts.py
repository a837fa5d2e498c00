"""Prompts with images: token ids of the model's processor, digests in the store, and limits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoProcessor

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.data.image_prompts import ImagePromptProcessor, ImageSource
from megatron_grpo.data.image_rows import MARK
from megatron_grpo.data.processors import DatumSpec, TaskDataSpec
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.image_processor import require_own_processor
from megatron_grpo.models.image_store import decode_image, open_stored_image
from megatron_grpo.models.source import PREPARED_MODELS
from megatron_grpo.preflight.script_checks import find_processor_problems
from megatron_grpo.prepare.counting import make_processor
from tests.support.image_models import draw_picture, save

SPEC = TaskDataSpec(task_name="counting")
VISION = parse_model_shape(PREPARED_MODELS["counting"]).vision
assert VISION is not None
PICTURES = [draw_picture(2, 3), draw_picture(1, 4, seed=1)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_processor().save_pretrained(folder)
    return folder


@pytest.fixture
def processor(model: Path, tmp_path: Path) -> ImagePromptProcessor:
    assert VISION is not None
    store = tmp_path / "images"
    source = ImageSource(
        column="image", folder=tmp_path, store=store, model=model, vision=VISION, max_images=8, max_tokens=20
    )
    return ImagePromptProcessor(source)


def make(processor: ImagePromptProcessor, image: Any, prompt: Any = "how many", longest: int = 99) -> DatumSpec:
    row = {"prompt": prompt, "answer": 3, "image": image, "level": 2}
    return processor(row, SPEC, AutoProcessor.from_pretrained(processor.source.model).tokenizer, longest, 7)


def test_token_ids_are_the_processors_and_images_are_stored(processor: ImagePromptProcessor, model: Path) -> None:
    datum = make(processor, PICTURES, f"{MARK} or {MARK}")
    theirs = AutoProcessor.from_pretrained(model)
    content = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
    text = theirs.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    expected = theirs(text=[text], images=[decode_image(picture) for picture in PICTURES])
    assert datum["message_log"][0]["token_ids"] == expected["input_ids"][0]
    grids = [[1, image.rows, image.columns] for image in datum["images"]]
    assert grids == expected["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 8]]
    assert [open_stored_image(processor.source.store, image.digest).size for image in datum["images"]] == [
        (24, 16),
        (32, 8),
    ]
    assert datum["prompt"] == [{"role": "user", "content": f"{MARK} or {MARK}"}]
    assert "image" not in datum["extra_env_info"], "environments get no pixels"
    assert datum["extra_env_info"]["level"] == 2


def test_samples_of_equal_images_share_a_file(processor: ImagePromptProcessor) -> None:
    first, second = make(processor, PICTURES[0]), make(processor, [PICTURES[0]])
    assert first["images"] == second["images"]
    assert isinstance(first["images"][0], StoredImage)
    assert len(list(processor.source.store.iterdir())) == 1


def test_a_row_without_an_image_is_a_prompt_of_text(processor: ImagePromptProcessor) -> None:
    datum = make(processor, None)
    assert datum["images"] == []
    assert datum["message_log"][0]["content"] == "how many="


@pytest.mark.parametrize(
    ("image", "prompt", "reason"),
    [
        ([draw_picture(4, 6)], "how", "images of 24 tokens, more than data.max_image_tokens=20"),
        ([PICTURES[0][:60]], "how", "row 7: image 1 cannot be decoded"),
        (PICTURES[0], "how <|image_pad|>", r"has 1 images, and the rendered prompt 2 x <\|image_pad\|>"),
        ([], f"how {MARK}", "has 0 images in its column, and 1 places"),
        (None, "how <|image_pad|>", "has 1 placeholder tokens, and its 0 images need 0"),
        (None, "how <|video_pad|>", "has 1 placeholder tokens, and its 0 images need 0"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(
    image: Any, prompt: str, reason: str, processor: ImagePromptProcessor
) -> None:
    with pytest.raises(ValueError, match=reason):
        make(processor, image, prompt)


def test_a_picture_that_the_model_cannot_take_is_refused(processor: ImagePromptProcessor) -> None:
    from PIL import Image

    with pytest.raises(ValueError, match="aspect ratio"):
        make(processor, save(Image.new("RGB", (10_000, 1))))


def test_a_long_prompt_is_left_out_whole(processor: ImagePromptProcessor) -> None:
    datum = make(processor, PICTURES[0], longest=5)
    assert datum["loss_multiplier"] == 0.0
    assert datum["message_log"][0]["token_ids"].count(processor.source.vision.image_token) == 6, "no image is cut"
    row = {"prompt": "how", "answer": 3, "image": PICTURES[0]}
    tokenizer = AutoProcessor.from_pretrained(processor.source.model).tokenizer
    with pytest.raises(ValueError, match=r"data\.long_prompts=error"):
        processor(row, replace(SPEC, long_prompts="error"), tokenizer, 5, 7)


def test_a_scripts_processor_has_to_be_that_of_the_folder(model: Path) -> None:
    require_own_processor(AutoProcessor.from_pretrained(model), model)
    changed = make_processor()
    changed.image_processor.size = {"shortest_edge": 64, "longest_edge": 1024}
    with pytest.raises(ConfigError, match="ranks and engines use that of"):
        require_own_processor(changed, model)
    assert list(find_processor_problems(changed)) == list(find_processor_problems(None)) == []
    for wrong in (changed.tokenizer, AutoProcessor):
        (problem,) = find_processor_problems(wrong)
        assert problem.text.endswith("transformers.AutoProcessor.from_pretrained(...)")
