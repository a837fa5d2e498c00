"""Sequences with images on ranks, and the same sequences in transformers."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch, require_field
from megatron_grpo.config.schema import ModelConfig, PolicyConfig
from megatron_grpo.models.families.reading import include_tower, read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.verification.problem import make_batch
from megatron_grpo.verification.random_pictures import add_pictures, load_whole_model, make_model_inputs
from tests.parity.policy_training import MAX_GRAD_NORM, OPTIMIZER
from tests.parity.ranks import Layout
from tests.support.image_models import make_image_model

MICROBATCHES = [[0, 3], [1, 2, 4], [5]]
"""Packs with images of several sizes beside sequences without one."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
TEXT: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"num_hidden_layers": 2, "num_attention_heads": 4, "rope_parameters": ROPE}
}


@dataclass(frozen=True)
class ImageModel:
    """A model that sees images on disk, and the store of a batch's pictures."""

    name: str
    path: Path
    store: Path

    @property
    def shape(self) -> ModelShape:
        return read_model_shape(self.path)

    def load(self) -> Any:
        return load_whole_model(self.path, torch.float32)

    def make_settings(self, layout: Layout, *, distributed: bool = True, **settings: Any) -> RankSettings:
        """Settings of a policy's rank; `settings` are further keys of policy.*."""
        config = PolicyConfig(
            model=ModelConfig(path=str(self.path)),
            parallel=layout.parallel,
            precision="float32",
            optimizer=replace(OPTIMIZER, distributed=distributed),
            max_grad_norm=MAX_GRAD_NORM,
            **settings,
        )
        shape = include_tower(self.shape, self.path) if config.train_vision_tower else self.shape
        return RankSettings(
            config=config, shape=shape, folder=str(self.path), decay_steps=100, images_folder=str(self.store)
        )


def make_saved_model(name: str, folder: Path) -> ImageModel:
    make_image_model(folder / name, name=name, **TEXT.get(name, {}))
    return ImageModel(name, folder / name, folder / "images")


def make_image_batch(model: ImageModel) -> TokenBatch:
    """Six sequences, three of which have one to three pictures."""
    vision = model.shape.vision
    assert vision is not None
    return add_pictures(make_batch(model.shape.vocab, 6, 16, 0), vision, model.path, model.store, 0)


def list_inputs(model: ImageModel, batch: TokenBatch) -> list[dict[str, Tensor]]:
    """transformers' inputs of each sequence."""
    vision, images = model.shape.vision, batch.images
    assert vision is not None
    assert images is not None
    parts = require_field(batch.fields.token_ids).long().split(batch.lengths)
    return [
        make_model_inputs(ids, stored, vision, model.path, model.store)
        for ids, stored in zip(parts, images, strict=True)
    ]


def compute_logprobs(oracle: Any, model: ImageModel, batch: TokenBatch) -> list[Tensor]:
    """Log-probabilities of each sequence's tokens but the first, by transformers."""
    logprobs = []
    for inputs in list_inputs(model, batch):
        logits = oracle(**inputs, use_cache=False).logits[0, :-1].float()
        logprobs.append(logits.log_softmax(-1).gather(1, inputs["input_ids"][0, 1:, None])[:, 0])
    return logprobs


def expect_outputs(by_rank: list[Tensor | None], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    """Expect a rank's outputs, [all tokens] with 0 at each first one, on every rank that reports some."""
    padded = torch.cat([torch.nn.functional.pad(values.detach(), (1, 0)) for values in expected])
    reported = [values for values in by_rank if values is not None]
    assert reported
    for values in reported:
        torch.testing.assert_close(values, padded, atol=tolerance, rtol=0)
