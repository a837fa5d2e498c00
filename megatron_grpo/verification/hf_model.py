"""Loading a model of transformers, and finding its halves and routers, whose names differ by family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from megatron_grpo.models.families import is_carried, remove_text_prefix
from megatron_grpo.models.families.reading import find_model_type, read_model_shape
from megatron_grpo.models.hf_folder import HFFolderReader
from megatron_grpo.models.quantized_weights import is_quantized
from megatron_grpo.models.shape import LEAST_TIME_STEP, read_config_json


def load_eager_model(folder: Path, dtype: torch.dtype, settings: Mapping[str, Any] | None = None) -> Any:
    """Load a language model in transformers' plain torch code, without fused kernels.

    `settings`: values in place of those of the folder's config.json, or of the text part there.
    """
    # Grouped products of experts need sizes that are multiples of 16 bytes; eager ones take any.
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    raw = read_config_json(folder / "config.json")
    if find_model_type(raw) != raw.get("model_type"):
        entries = {key: value for key, value in raw.items() if key not in ("model_type", "auto_map")}
        options["config"] = AutoConfig.for_model(find_model_type(raw), **entries)
    if settings:
        config = options.get("config") or AutoConfig.from_pretrained(folder, trust_remote_code=False)
        for name, value in settings.items():
            setattr(config.get_text_config(), name, value)
        options["config"] = config
    if "nemotron_h" in (raw.get("model_type"), find_model_type(raw)):
        # Neither vLLM nor training has a lower bound of time steps (docs/layouts.md).
        config = options.setdefault("config", AutoConfig.from_pretrained(folder, trust_remote_code=False))
        config.time_step_min = LEAST_TIME_STEP
    if is_quantized(folder) or "text_config" in raw:
        # What transformers makes of quantized weights depends on the machine's GPU, and it refuses matrices whose last
        # block is not full. Of a model that also sees images only the text part is wanted, under its own names.
        shape = read_model_shape(folder)
        config = options.setdefault("config", AutoConfig.from_pretrained(folder, trust_remote_code=False))
        config = options["config"] = config.get_text_config()
        if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ValueError(f"transformers has no class for the text part alone of {raw.get('model_type')}")
        config.tie_word_embeddings = shape.tied_embeddings
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        stored = HFFolderReader(folder).iterate(lambda name: not is_carried(name, shape))
        tensors = {remove_text_prefix(name, shape.text_prefix): tensor for name, tensor in stored}
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(None, state_dict=tensors, **options).eval()
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, **options).eval()


def find_halves(layer: Any) -> dict[str, Any]:
    """Find a layer's halves: self_attn and mlp, or one.

    They are the modules whose outputs join the residual stream. What stands in the place of attention is self_attn too.
    """
    if hasattr(layer, "mixer"):
        is_network = hasattr(layer.mixer, "experts") or hasattr(layer.mixer, "up_proj")
        return {"mlp" if is_network else "self_attn": layer.mixer}
    if hasattr(layer, "post_feedforward_layernorm"):  # of Gemma, whose norms are behind both
        return {"self_attn": layer.post_attention_layernorm, "mlp": layer.post_feedforward_layernorm}
    mixer = layer.self_attn if hasattr(layer, "self_attn") else layer.linear_attn
    return {"self_attn": mixer, "mlp": layer.feed_forward if hasattr(layer, "feed_forward") else layer.mlp}


def find_router(layer: Any) -> Any:
    """Find a layer's router of experts; None: it has none."""
    parts: list[Any] = [layer, *(getattr(layer, name, None) for name in ("feed_forward", "mlp", "mixer"))]
    part = next((part for part in parts if hasattr(part, "experts")), None)
    return getattr(part, "router", None) or getattr(part, "gate", None)


def read_routing(router: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Read logits, weights and numbers of the chosen experts from a router's output.

    They are [tokens, experts], [tokens, k] and [tokens, k].
    """
    if len(output) == 2:  # Llama 4: weights of all experts, 0 for others than the chosen, and logits
        return output[1], *output[0].topk(router.top_k)
    logits, weights, chosen = output
    if hasattr(router, "per_expert_scale"):  # Gemma 4: probabilities
        logits = logits.log()
    return logits, weights, chosen


def list_stored_tensors(model: Any) -> dict[str, Tensor]:
    """List parameters and stored buffers by their names in transformers."""
    stored = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in stored}
    return dict(model.named_parameters()) | buffers
