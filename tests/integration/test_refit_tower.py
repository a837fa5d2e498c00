"""A refit of a vision tower: engines forget what the tower before it made of an image that they have seen."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_grpo.batch.generation_requests import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.images import StoredImage
from megatron_grpo.config.schema import ModelConfig, ParallelConfig, PolicyConfig, RefitConfig
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.generation.vllm_images import EngineImages
from megatron_grpo.models.families.reading import include_tower, read_model_shape
from megatron_grpo.models.image_store import store_image
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.verification.random_pictures import load_whole_model, make_model_inputs
from megatron_grpo.weight_sync.transport import make_transport
from tests.integration.test_refit import ray_cluster
from tests.integration.vllm_helpers import START_S, engines, generate
from tests.support.image_models import draw_picture, make_image_model

__all__ = ["ray_cluster"]  # a fixture of every test here
pytestmark = pytest.mark.slow
pytest.importorskip("torchvision")  # vLLM's module of these models imports it


class Question:
    """A prompt with an image, and its response's log-probabilities in transformers."""

    def __init__(self, folder: Path, store: Path) -> None:
        vision = read_model_shape(folder).vision
        assert vision is not None
        self.vision, self.store = vision, store
        self.images = [StoredImage(store_image(store, draw_picture(2, 3)), 4, 6)]
        self.ids = [3, 46, *[vision.image_token] * 6, 47, 11]

    def ask(self, generation: VllmGeneration) -> GenerationOutput:
        """Sample a response from an engine."""
        prompt_ids = np.array(self.ids, np.int32)
        sample = GenerationRequest(prompt_ids=prompt_ids, seed=0, max_new_tokens=4, images=self.images)
        (output,) = generate(generation, [sample], SamplingSettings(max_new_tokens=4, temperature=1.0))
        return output

    @torch.no_grad()
    def measure_distance(self, folder: Path, output: GenerationOutput) -> float:
        """The largest difference of a log-probability from transformers."""
        response = output.token_ids.tolist()
        ids = torch.tensor([*self.ids, *response])
        model = load_whole_model(folder, torch.float32)
        inputs = make_model_inputs(ids, self.images, self.vision, folder, self.store)
        logits = model(**inputs, use_cache=False).logits[0, len(self.ids) - 1 : -1]
        logits[:, list(self.vision.placeholders)] = -torch.inf
        expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
        return float((torch.from_numpy(output.logprobs) - expected).abs().max())


@pytest.mark.parametrize("mode", ["reshard", "broadcast"])
@pytest.mark.parametrize("is_cleared", [True, False])
def test_an_image_that_was_seen_before_is_seen_anew(is_cleared: bool, mode: str, tmp_path: Path) -> None:
    folders = [tmp_path / "base", tmp_path / "trained"]
    for seed, folder in enumerate(folders):
        make_image_model(folder, seed, "qwen3_vl")
    question = Question(folders[0], tmp_path / "images")
    config = PolicyConfig(
        model=ModelConfig(path=str(folders[1])),
        parallel=ParallelConfig(tensor=2),
        precision="float32",
        train_vision_tower=True,
        threads=1,
    )
    shape = include_tower(read_model_shape(folders[1]), folders[1])
    settings = RankSettings(config=config, shape=shape, folder=str(folders[1]), decay_steps=10)
    policy = MegatronPolicy(settings, lambda _: {}, START_S)
    try:
        policy.start()
        images = EngineImages(str(question.store), question.vision, 1, is_tower_trained=is_cleared)
        with engines(folders[0], images=images) as generation:
            assert question.measure_distance(folders[0], question.ask(generation)) < 1e-4
            policy.wait_ready()
            refit = RefitConfig(mode=mode, bucket_mib=0.05, timeout_s=60.0, retries=0)
            transport = make_transport(policy, generation, refit, Path())
            transport.connect()
            report = transport.publish(1)
            assert report.bytes_sent > 4 * sum(np.prod(sizes) for _, sizes in shape.vision.trained.tensors)
            distance = question.measure_distance(folders[1], question.ask(generation))
            # Without it vLLM answers with features of the tower before.
            assert distance < 1e-4 if is_cleared else distance > 1e-3
    finally:
        policy.shutdown()
