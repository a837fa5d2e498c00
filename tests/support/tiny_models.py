"""Tiny random models in Hugging Face format, one per family and peculiarity, as oracles for the real code."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.shape import ModelShape
from tests.support.hf_configs import read_configs

VOCAB = 61
"""Odd, so that it has to be padded in every tensor-parallel layout."""


@dataclass(frozen=True)
class TinyModel:
    """A model on disk."""

    name: str
    path: Path

    @property
    def shape(self) -> ModelShape:
        """Its sizes, read the way the real code reads them."""
        return read_model_shape(self.path)

    def load(self) -> PreTrainedModel:
        """The transformers model, in evaluation mode."""
        config = AutoConfig.from_pretrained(self.path)
        if hasattr(config, "time_step_min"):  # the engine has no lower bound of Mamba's time steps, which is 0
            config.time_step_min = 0.0
        return AutoModelForCausalLM.from_pretrained(self.path, config=config, dtype=torch.float32).eval()

    def tensors(self) -> dict[str, Tensor]:
        """Its weights as they are on disk."""
        return {name: tensor for file in self.path.glob("*.safetensors") for name, tensor in load_file(file).items()}

    def logprobs(self, token_ids: Tensor) -> Tensor:
        """Log-probability of each token given the ones before it, by transformers: [sequences, length]; 0 first."""
        with torch.no_grad():
            return logprobs_of_logits(_load(self)(token_ids).logits, token_ids)


@cache
def _load(model: TinyModel) -> PreTrainedModel:
    return model.load()


def logprobs_of_logits(logits: Tensor, token_ids: Tensor) -> Tensor:
    """[sequences, length, vocabulary] logits -> [sequences, length]; position t speaks of token t, 0 at the first."""
    logprobs = logits[:, :-1].float().log_softmax(dim=-1).gather(2, token_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprobs, (1, 0))


def _build(config: dict[str, Any]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, dtype=torch.float32))


_CONFIGS = read_configs("tiny_models")
BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    name: partial(_build, config) for name, config in _CONFIGS["usual"].items()
}
SPECIAL: dict[str, Callable[[], PreTrainedModel]] = {
    name: partial(_build, config) for name, config in _CONFIGS["special"].items()
}
"""Those that a few tests make for themselves."""


def make_tiny_model(name: str, folder: Path) -> TinyModel:
    """Build a model with every weight random, norms and biases included, and save it to `folder`/`name`."""
    torch.manual_seed(sum(name.encode()))
    model = {**BUILDERS, **SPECIAL}[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.empty_like(parameter).uniform_(-0.5, 0.5))  # to 1, or to 0 in Gemma
            else:
                parameter.normal_(0.0, 0.2)
    path = folder / name
    model.save_pretrained(path)
    return TinyModel(name, path)
