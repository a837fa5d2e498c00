"""Tiny random models in Hugging Face format, one per family and peculiarity, as oracles for the real code."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from megatron_grpo.models.families import read_model_shape
from megatron_grpo.models.shape import ModelShape

VOCAB = 61
"""Odd, so that it has to be padded in every tensor-parallel layout."""

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": torch.float32,
}


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
            return logprobs_of_logits(_loaded(self)(token_ids).logits, token_ids)


@cache
def _loaded(model: TinyModel) -> PreTrainedModel:
    return model.load()


def logprobs_of_logits(logits: Tensor, token_ids: Tensor) -> Tensor:
    """[sequences, length, vocabulary] logits -> [sequences, length]; position t speaks of token t, 0 at the first."""
    logprobs = logits[:, :-1].float().log_softmax(dim=-1).gather(2, token_ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(logprobs, (1, 0))


def _qwen3(tied: bool, layers: int = 2) -> PreTrainedModel:
    # A head size that is not hidden_size / heads, as in the released models.
    sizes = {**_SIZES, "num_hidden_layers": layers}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=tied))


def _qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**_SIZES, tie_word_embeddings=True))


def _llama() -> PreTrainedModel:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        # Shorter than the tests' sequences, so that every one of the three frequency bands matters.
        "original_max_position_embeddings": 16,
    }
    return LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=False, rope_parameters=scaling))


def _gemma3() -> PreTrainedModel:
    config = Gemma3TextConfig(
        **_SIZES,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=5,  # shorter than most of the tests' sequences
        query_pre_attn_scalar=24,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        },
    )
    return Gemma3ForCausalLM(config)


BUILDERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_tied": lambda: _qwen3(tied=True),
    "qwen3_untied": lambda: _qwen3(tied=False),
    "qwen2_tied": _qwen2,
    "llama_untied": _llama,
    "gemma3": _gemma3,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,  # unlike mscale, so that rotated vectors have a factor
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 16,
}


def _deepseek_v3(query_rank: int | None = None, **rope: Any) -> PreTrainedModel:
    config = DeepseekV3Config(
        **{**_SIZES, **_EXPERTS, "num_key_value_heads": 4},
        q_lora_rank=query_rank,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        head_dim=4,
        v_head_dim=6,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        **rope,
    )
    return DeepseekV3ForCausalLM(config)


def _qwen3_stretched() -> PreTrainedModel:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
    return Qwen3ForCausalLM(Qwen3Config(**_SIZES, head_dim=16, rope_parameters=rope))


SPECIAL: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3_stretched": _qwen3_stretched,
    "qwen3_deep": lambda: _qwen3(tied=True, layers=7),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=False)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_SIZES, **_EXPERTS)),
    "deepseek_v3": _deepseek_v3,
    "deepseek_v3_compressed": lambda: _deepseek_v3(query_rank=20, rope_parameters=_YARN),
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
