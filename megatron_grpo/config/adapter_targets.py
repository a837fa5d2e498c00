"""Names of the layers that can have an adapter: Megatron-Core's, and those of peft for them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator

# Linear layers of Megatron-Core that can have an adapter: those of most models, and those of delta nets and Mamba.
MainTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
StateTarget = Literal["in_proj", "out_proj"]
AdapterTarget = Literal[MainTarget, StateTarget]
_ALL_LINEAR = "all-linear"
# Names of linear layers in Hugging Face models and peft, by the layer of Megatron-Core that holds their matrices.
_MATRICES: dict[str, list[tuple[str, ...]]] = {
    "linear_qkv": [("q_proj", "k_proj", "v_proj"), ("qkv_proj",)],
    "linear_proj": [("o_proj",)],
    "linear_fc1": [("gate_proj", "up_proj"), ("gate_up_proj",)],
    "linear_fc2": [("down_proj",)],
    "in_proj": [("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")],
}


def translate_targets(targets: Any) -> Any:
    """Name peft's layers as Megatron-Core does.

    ValueError: only a part of the layers that share an adapter.
    """
    if targets in (_ALL_LINEAR, [_ALL_LINEAR]):
        return list(get_args(MainTarget))
    if not isinstance(targets, list):
        return targets
    translated = list(targets)
    for layer, choices in _MATRICES.items():
        for names in choices:
            named = [name for name in translated if name in names]
            missing = [name for name in names if name not in named]
            if named and missing:
                text = f"{' and '.join(missing)} too, or {layer}: these matrices share one adapter here"
                raise ValueError(f"has {' and '.join(named)} alone; name {text}")
            if named:
                translated = [layer if name == named[0] else name for name in translated if name not in named[1:]]
    return translated


AdapterTargets = Annotated[
    list[AdapterTarget],
    BeforeValidator(translate_targets),
    f"list of one of {', '.join(get_args(AdapterTarget))}, or peft's names, or all-linear",
]
