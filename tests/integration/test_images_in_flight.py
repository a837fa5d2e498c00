"""Weights that change under responses to prompts with images: every token was drawn as its span's version draws."""

from collections.abc import Sequence
from functools import partial
from itertools import count, cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from torch import Tensor
from transformers import DynamicCache

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest
from megatron_grpo.batch.images import StoredImage, compute_grid_positions
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.config.loop_schema import AsyncGRPOConfig
from megatron_grpo.config.schema import ModelConfig, ParallelConfig, PolicyConfig, RefitConfig
from megatron_grpo.generation.vllm_images import EngineImages
from megatron_grpo.models.families.reading import include_tower, read_model_shape
from megatron_grpo.models.image_store import store_image
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.verification.random_pictures import load_whole_model, make_model_inputs
from megatron_grpo.weight_sync.transport import WeightTransport, make_transport
from tests.integration.test_refit import ray_cluster
from tests.integration.test_updates_in_flight import (
    BLOCK,
    MAX_LENGTH,
    MODELS,
    ROUNDS,
    TOKENS,
    become,
    select_entries,
    while_publishing,
)
from tests.integration.vllm_helpers import START_S, engines
from tests.support.image_models import draw_picture, make_image_model

__all__ = ["ray_cluster"]  # a fixture of every test here
pytestmark = pytest.mark.slow
pytest.importorskip("torchvision")  # vLLM's module of these models imports it

PROMPT_TOKENS = 150
"""More than a block of the cache, so that later samples of a prompt find its image there."""


class SeeingVersions:
    """Models of which the policy takes turns to be, and the version that each has been published as."""

    def __init__(self, folder: Path, *, trains_tower: bool) -> None:
        self.folders = [folder / str(seed) for seed in range(MODELS)]
        first = None
        for seed, path in enumerate(self.folders):
            model = make_image_model(path, seed, max_position_embeddings=MAX_LENGTH)
            first = first or model
            if not trains_tower:
                model.model.visual.load_state_dict(first.model.visual.state_dict())
                model.save_pretrained(path)
        self.models = [load_whole_model(path, torch.float32) for path in self.folders]
        vision = read_model_shape(self.folders[0]).vision
        assert vision is not None
        self.vision, self.store, self.number = vision, folder / "images", {0: 0}
        self._next, self._versions = cycle([1, 2, 0]), count(1)
        self.policy = _start_policy(self.folders[0], trains_tower=trains_tower)

    def publish(self, transport: WeightTransport) -> None:
        """Make the policy another model and publish it."""
        number, version = next(self._next), next(self._versions)
        ray.get(self.policy.submit(become, str(self.folders[number])))
        transport.publish(version)
        self.number[version] = number

    def make_request(self, seed: int) -> GenerationRequest:
        """A sample of one of four prompts, with two images and a text that fills a cache block."""
        prompt = seed % 4
        images = [
            StoredImage(store_image(self.store, draw_picture(rows, 3, seed=prompt)), 2 * rows, 6) for rows in (2, 4)
        ]
        ids = [46, *[self.vision.image_token] * 6, 47, 3, 46, *[self.vision.image_token] * 12, 47]
        ids += [2 + (3 * prompt + j * j) % 30 for j in range(PROMPT_TOKENS - len(ids))]
        return GenerationRequest(prompt_ids=np.array(ids, np.int32), seed=seed, max_new_tokens=TOKENS, images=images)

    def compute(self, request: GenerationRequest, ids: Sequence[int], spans: Sequence[Span], prompt: Span) -> Tensor:
        """[tokens of all spans]: by each span's model over the cache that the models before it have filled.

        Args:
            request: the prompt.
            ids: prompt and response.
            spans: those of the response.
            prompt: the beginning of the prompt that is already in the cache, and by which version; it may be empty.
        """
        cache, rows = DynamicCache(), []
        parts = [Span(0, prompt.end + 1, prompt.version)] * bool(prompt.end) + list(spans)
        ends = [prompt.end] * bool(prompt.end) + [span.end - 1 for span in spans]
        for part, (begin, end) in zip(parts, pairwise([0, *ends]), strict=True):
            images = [] if begin else request.images
            fed = make_model_inputs(torch.tensor(ids[begin:end]), images, self.vision, self.folders[0], self.store)
            grid = compute_grid_positions(np.array(ids), request.images, self.vision)[:, None, begin:end]
            model = self.models[self.number[part.version]]
            positions = torch.from_numpy(np.ascontiguousarray(grid))
            logits = model(**fed, position_ids=positions, past_key_values=cache, use_cache=True).logits[0]
            logits[:, list(self.vision.placeholders)] = -torch.inf
            if part in spans:
                rows.append(logits[part.start - 1 - begin :].log_softmax(-1))
        return select_entries(torch.cat(rows), ids[spans[0].start :])


@pytest.mark.parametrize(
    ("trains_tower", "recompute"), [(False, True), (True, True), (False, False)], ids=["frozen", "trained", "kept"]
)
@torch.no_grad()
def test_every_token_was_drawn_by_its_version_from_the_images(
    trains_tower: bool, recompute: bool, tmp_path: Path
) -> None:
    versions = SeeingVersions(tmp_path, trains_tower=trains_tower)
    in_flight = AsyncGRPOConfig(enabled=True, recompute_kv_cache_after_weight_updates=recompute)
    images = EngineImages(str(versions.store), versions.vision, 2, is_tower_trained=trains_tower)
    requests = [versions.make_request(seed) for seed in range(24)]
    most_spans = 0
    try:
        with engines(versions.folders[0], max_length=MAX_LENGTH, in_flight=in_flight, images=images) as generation:
            refit = RefitConfig(mode="broadcast", bucket_mib=0.05, timeout_s=60.0)
            transport = make_transport(versions.policy, generation, refit, Path())
            transport.connect()
            for _ in range(ROUNDS):
                before = max(versions.number)
                outputs = while_publishing(generation, requests, partial(versions.publish, transport))
                for request, output in zip(requests, outputs, strict=True):
                    expect_drawn(request, output, versions, None if recompute else before)
                    most_spans = max(most_spans, len(output.spans))
                if most_spans > 2:
                    break
        assert most_spans > 2, "no response met two updates"
    finally:
        versions.policy.shutdown()


def expect_drawn(
    request: GenerationRequest, output: GenerationOutput, versions: SeeingVersions, before: int | None
) -> None:
    """Every token was drawn by its span's version.

    `before`: the version that was served when the first was asked, where the cache is kept; None: it is recomputed.
    """
    start, ids = len(request.prompt_ids), [*request.prompt_ids.tolist(), *output.token_ids.tolist()]
    assert not set(output.token_ids.tolist()) & set(versions.vision.placeholders)
    assert [span.start for span in output.spans] == [0, *(span.end for span in output.spans[:-1])]
    spans = [Span(start + span.start, start + span.end, span.version) for span in output.spans]
    nothing = Span(0, 0, spans[0].version)
    if before is None:
        possible = [torch.cat([versions.compute(request, ids[: span.end], [span], nothing) for span in spans])]
    else:
        prompts = [nothing, *(Span(0, BLOCK, version) for version in range(before, spans[0].version))]
        possible = [versions.compute(request, ids, spans, prompt) for prompt in prompts]
    logprobs = output.logprobs.tolist()
    assert any(logprobs == pytest.approx(expected.tolist(), abs=1e-4) for expected in possible), output.spans


def _start_policy(folder: Path, *, trains_tower: bool) -> MegatronPolicy:
    shape: Any = read_model_shape(folder)
    config = PolicyConfig(
        model=ModelConfig(path=str(folder)),
        parallel=ParallelConfig(),
        precision="float32",
        train_vision_tower=trains_tower,
        threads=1,
    )
    shape = include_tower(shape, folder) if trains_tower else shape
    settings = RankSettings(config=config, shape=shape, folder=str(folder), decay_steps=1)
    policy = MegatronPolicy(settings, actor_options=lambda rank: {"num_cpus": 0}, startup_timeout_s=START_S)
    policy.start()
    policy.wait_ready()
    return policy
