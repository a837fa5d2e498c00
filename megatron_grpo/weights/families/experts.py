"""What families with a mixture of experts have in common: the table of an expert layer, and its arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_grpo.weights.families.family import WeightEntry, in_layer, only_in
from megatron_grpo.weights.shape import ModelShape, size

# An expert's matrices in the torch layers, and among Transformer Engine's grouped matrices.
_FC1 = "mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"
_FC2 = "mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"


def expert_layer(block: str, gate: str, up: str, down: str) -> tuple[WeightEntry, ...]:
    """The entries of a layer's norm, router and experts.

    Args:
        block: name of the block in a layer of the Hugging Face model, such as "mlp.".
        gate: name of an expert's gate projection.
        up: name of its projection to the width of the expert.
        down: name of its projection back.
    """
    expert = block + "experts.{expert}."
    return only_in(
        "experts",
        in_layer("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", ("hidden",))),
        in_layer("mlp.router.weight", (block + "gate.weight", ("experts", "hidden"))),
        in_layer(
            _FC1,
            (f"{expert}{gate}.weight", ("expert_ffn", "hidden")),
            (f"{expert}{up}.weight", ("expert_ffn", "hidden")),
            axis=0,
            merge="gate_up",
        ),
        in_layer(_FC2, (f"{expert}{down}.weight", ("hidden", "expert_ffn")), axis=1),
    )


def chosen_experts(raw: Mapping[str, Any], count: int) -> int:
    """Experts of a token, from the contents of a config.json.

    Raises:
        ValueError: the number is missing, or larger than the number of experts.
    """
    top_k = size(raw, "num_experts_per_tok")
    if top_k > count:
        raise ValueError(f"num_experts_per_tok={top_k} is more than the {count} experts")
    return top_k


def expert_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """What layers with experts compute beyond dense ones in a forward pass, in floating-point operations.

    A token passes its own experts, the shared one and the router; not the feed-forward network of a dense layer.

    Args:
        shape: sizes of the model.
        lengths: tokens of each sequence.
    """
    assert shape.experts is not None
    experts = shape.experts
    width = experts.top_k * experts.ffn_hidden + experts.shared_ffn_hidden
    per_token = 3 * (width - shape.ffn_hidden) + experts.count  # in units of hidden
    return 2.0 * sum(experts.layers) * shape.hidden * per_token * sum(lengths)
