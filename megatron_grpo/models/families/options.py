"""Options of a config.json that have no support, each refused by its key and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_grpo.config.errors import to_text
from megatron_grpo.models.families.rotary import refuse_partial_rotation
from megatron_grpo.models.quantized_weights import read_quantization, refuse_quantized
from megatron_grpo.models.tokenizer_files import read_settings

Neutral = Mapping[str, tuple[Any, ...]]
"""Values with which an option changes nothing, by key; a missing key changes nothing either."""

_COMMON: Neutral = {
    "use_sliding_window": (False, None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "per_layer_config": (None, {}),
}
# Options that change vLLM's model of some supported family and not transformers'.
_VLLM_ONLY: Neutral = {
    "is_causal": (True,),
    "bias": (False, None),
    "qkv_bias": (False, None),
    "qk_norm": (False, None),
    "logit_scale": (1,),
    "dual_chunk_attention_config": (None, {}),
    "index_topk": (),
    "llama_4_scaling": (None,),
    "moe_layer_freq": (1,),
}
WINDOW: Neutral = {"sliding_window": (None, 0)}
"""For families without windows: vLLM would apply this one to every layer."""


def refuse_options(
    raw: Mapping[str, Any],
    family: str,
    family_options: Neutral | None,
    windows: bool,
    *,
    is_partly_rotated: bool = False,
) -> None:
    """Refuse options that the Megatron model cannot express; parameters as `read_dense`."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={to_text(raw['hidden_act'])} is not supported; only silu is")
    read_quantization(raw, family)
    refuse_quantized(raw.get("compression_config"), "compression_config")
    for key, neutral in {**_COMMON, **(family_options or {}), **_VLLM_ONLY}.items():
        if key in raw and raw[key] not in neutral:
            reason = ": vLLM would compute another model with it than transformers; remove it"
            text = f"{key}={to_text(json.dumps(raw[key]))} is not supported for {family}"
            raise ValueError(text + (reason if key in _VLLM_ONLY else ""))
    if not is_partly_rotated:
        refuse_partial_rotation(raw)
    types = raw.get("layer_types")
    unsupported = [kind for kind in types if kind != "full_attention"] if isinstance(types, list) else []
    if unsupported and not windows:
        raise ValueError(
            f"layer_types with {to_text(unsupported[0])} is not supported for {family}; only full_attention is"
        )


def refuse_folder(folder: Path) -> None:
    """Refuse a folder of adapters, or of quantized weights."""
    adapter, modelopt = folder / "adapter_config.json", folder / "hf_quant_config.json"
    if adapter.is_file():
        base = read_settings(adapter).get("base_model_name_or_path")
        of_base = f" for {base}" if isinstance(base, str) else ""
        raise ValueError(
            f"{folder} holds adapters{of_base} ({adapter.name}); merge them into the model first, with peft's "
            "merge_and_unload, and give the folder of the merged model"
        )
    settings = read_settings(modelopt).get("quantization")
    if isinstance(settings, dict) and settings:
        refuse_quantized(settings, f"{modelopt}: quantization")
