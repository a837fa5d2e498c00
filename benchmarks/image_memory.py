"""Bytes of a step's prompts with images: in the store, in rollout workers, in the driver, by distinct images.

    python benchmarks/image_memory.py > benchmarks/results/DATE_image_memory_cpu.json

Prompts have one image each; of `distinct` images, prompts share one in turn. Every prompt is as the loader makes it
(digests in the prompt, files in the store), every sample as a rollout worker makes it.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import tempfile
from pathlib import Path

import numpy as np
from header import header
from PIL import Image

from megatron_grpo.batch.images import StoredImage
from megatron_grpo.batch.trajectory import Span, Trajectory
from megatron_grpo.models.image_store import store_image

PROMPTS, SAMPLES = 512, 16
SIDE, PATCH, MERGE = 448, 14, 2  # pixels of a square image, of a patch; patches along the side of a token
TEXT, RESPONSE = 64, 256  # tokens
PIXEL_BYTES = (SIDE // PATCH) ** 2 * PATCH**2 * 2 * 3 * 4  # of an image, as Qwen2.5-VL's processor gives it: float32


def measure(distinct: int, folder: Path) -> dict[str, int]:
    """Measure the bytes of one step with this many distinct images; 0: text alone."""
    images = [store_picture(folder, seed) for seed in range(distinct)]
    in_prompt = (SIDE // PATCH // MERGE) ** 2 if distinct else 0
    worker, driver = 0, 0
    for number in range(PROMPTS):
        stored = [images[number % distinct]] if distinct else []
        samples = [make_sample(number, sample, in_prompt + TEXT, stored) for sample in range(SAMPLES)]
        # As they travel: the samples of a prompt as one object of the store, their outcomes as one message.
        worker += len(pickle.dumps(samples, protocol=5))
        driver += len(pickle.dumps([sample.outcome for sample in samples], protocol=5))
    return {
        "distinct_images": distinct,
        "image_store_bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "rollout_worker_bytes": worker,
        "driver_bytes": driver,
        "pixels_in_every_sample_bytes": PIXEL_BYTES * PROMPTS * SAMPLES if distinct else 0,
    }


def store_picture(folder: Path, seed: int) -> StoredImage:
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format="JPEG")
    return StoredImage(store_image(folder, file.getvalue()), SIDE // PATCH, SIDE // PATCH)


def make_sample(prompt: int, sample: int, prompt_tokens: int, images: list[StoredImage]) -> Trajectory:
    length = prompt_tokens + RESPONSE
    return Trajectory(
        prompt_idx=prompt,
        group=prompt,
        sample=sample,
        reward=1.0,
        token_ids=np.arange(length, dtype=np.int32),
        spans=[Span(prompt_tokens, length, 1)],
        logprobs=np.full(RESPONSE, -0.5, dtype=np.float32),
        response="x" * RESPONSE,
        stop_reason="stop",
        images=images,
    )


def main() -> None:
    rows = []
    for distinct in (0, 1, 32, 128, PROMPTS):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(distinct, Path(folder)))
    sizes = {"prompts": PROMPTS, "samples_per_prompt": SAMPLES, "pixels": [SIDE, SIDE]}
    json.dump({**header("image_memory"), **sizes, "rows": rows}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
