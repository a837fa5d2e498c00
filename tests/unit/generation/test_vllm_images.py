"""Images in vLLM's requests: one placeholder of each image, and biases that keep placeholders away."""

import numpy as np

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.generation.vllm_images import EngineImages, merge_placeholders
from megatron_grpo.models.vision_shape import VisionShape

VISION = VisionShape(image_token=9, placeholders=(9, 8), merge=2, rotary_axes=(0, 1, 2))


def test_each_image_keeps_one_placeholder() -> None:
    ids = np.array([1, 9, 9, 2, 9, 9, 9, 9, 3, 9])
    images = [StoredImage("a", 2, 4), StoredImage("b", 4, 4), StoredImage("c", 2, 2)]
    assert merge_placeholders(ids, images, VISION) == [1, 9, 2, 9, 3, 9]
    neighbours = [StoredImage("a", 2, 4), StoredImage("b", 2, 4)]
    assert merge_placeholders(np.array([9, 9, 9, 9]), neighbours, VISION) == [9, 9]


def test_an_engine_takes_images_up_to_the_limit() -> None:
    settings = EngineImages("store", VISION, 3)
    arguments = settings.make_arguments(on_cpu=True)
    assert arguments["limit_mm_per_prompt"] == {"image": 3, "video": 0}
    assert not arguments["language_model_only"]
    assert "skip_mm_profiling" not in settings.make_arguments(on_cpu=False), "a GPU measures the memory of images"
    assert settings.make_logit_bias() == {9: -100.0, 8: -100.0}
