"""Images of requests in vLLM's form: placeholders as vLLM takes them, and prompts that it has processed once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_grpo.batch.generation_requests import GenerationRequest
from megatron_grpo.batch.images import Images
from megatron_grpo.models.image_store import open_stored_image
from megatron_grpo.models.vision_shape import VisionShape

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


@dataclass(frozen=True, slots=True)
class EngineImages:
    """How an engine's requests have images."""

    folder: str  # the run's store
    vision: VisionShape
    max_images: int  # images of one prompt
    is_tower_trained: bool = False  # a refit then changes the features of images

    def make_arguments(self, *, on_cpu: bool) -> dict[str, Any]:
        """Make vLLM's arguments for prompts with images."""
        return {
            "language_model_only": False,
            "limit_mm_per_prompt": {"image": self.max_images, "video": 0},
            # Prompts come processed, once for all samples, so that no cache of processed images can be stale. The
            # features of images are kept under the digests until a refit of the tower.
            "mm_processor_cache_gb": 0,
            **({"skip_mm_profiling": True} if on_cpu else {}),  # the cache has a fixed size there
        }

    def make_logit_bias(self) -> dict[int, float]:
        """Make the biases (vLLM's least) with which placeholders are never drawn."""
        return dict.fromkeys(self.vision.placeholders, -100.0)


def merge_placeholders(token_ids: NDArray[np.integer], images: Images, vision: VisionShape) -> list[int]:
    """Leave one placeholder of each image, which vLLM expands again."""
    positions = np.flatnonzero(token_ids == vision.image_token)
    keeps = np.ones(len(token_ids), dtype=np.bool_)
    begin = 0
    for image in images:
        count = image.count_tokens(vision)
        keeps[positions[begin + 1 : begin + count]] = False
        begin += count
    assert begin == len(positions), "placeholders are those of the images"
    merged: list[int] = token_ids[keeps].tolist()
    return merged


class ImagePrompts:
    """Prompts with images of one call, each processed once."""

    def __init__(self, llm: AsyncLLM, settings: EngineImages) -> None:
        self._llm, self._settings = llm, settings
        self._processed: dict[tuple[bytes, tuple[str, ...]], Any] = {}

    async def process(self, request: GenerationRequest) -> dict[str, Any]:
        """Process a prompt to vLLM's input; RuntimeError: its tokens are others."""
        from vllm.inputs import TokensPrompt

        digests = tuple(image.digest for image in request.images)
        key = (request.prompt_ids.tobytes(), digests)
        if key not in self._processed:
            opened = _open_images(self._settings.folder, digests)
            prompt = TokensPrompt(
                prompt_token_ids=merge_placeholders(request.prompt_ids, request.images, self._settings.vision),
                multi_modal_data={"image": opened},
                multi_modal_uuids={"image": list(digests)},
            )
            processed = await self._llm.renderer.process_for_engine_async(prompt, time.time(), skip_mm_cache=True)
            if list(processed["prompt_token_ids"]) != request.prompt_ids.tolist():
                counts = f"{len(processed['prompt_token_ids'])} tokens of a prompt of {len(request.prompt_ids)}"
                raise RuntimeError(f"vLLM makes {counts}: its processor has other sizes of images than the model's")
            self._processed[key] = processed
        return dict(self._processed[key])


def _open_images(folder: str, digests: Sequence[str]) -> list[Any]:
    return [open_stored_image(Path(folder), digest) for digest in digests]
