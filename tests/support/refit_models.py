"""Small models of each kind that a refit has to cut, and what vLLM keeps of them on each rank, written out."""

import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import RankShard
from megatron_grpo.weight_sync.boxes import Box
from tests.support.hf_configs import QWEN3_MOE, read_configs

_CONFIGS = read_configs("model_configs")
DENSE, LATENT = _CONFIGS["refit_qwen2"], _CONFIGS["refit_deepseek_v3"]
SHAPES = {"qwen2": DENSE, "qwen3_moe": {**QWEN3_MOE, "hidden_size": 16, "vocab_size": 70}, "deepseek_v3": LATENT}
"""config.json of each family."""


def full_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """A weight drawn from its name: every process that asks for this name has the same numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def vllm_parameters(shape: ModelShape, shard: RankShard) -> dict[str, Tensor]:
    """What vLLM's model holds on a rank, by name, from vLLM's rules written out for each kind of layer."""
    held_tensors = Held(shape, shard)
    parameters: dict[str, Tensor] = {}
    for layer in shard.layers:
        prefix = f"model.layers.{layer}."
        for name in held_tensors.tensors:
            if name.startswith(prefix) and name.endswith(("norm.weight", "mlp.gate.weight", "correction_bias")):
                parameters[name] = held_tensors.read_tensor(name)
        parameters |= (
            held_tensors.heads(prefix + "self_attn.")
            if shape.latent is None
            else held_tensors.latent(prefix + "self_attn.")
        )
        parameters |= held_tensors.dense(prefix)
        if shape.has_experts(layer):
            parameters |= held_tensors.experts(prefix + "mlp.experts.")
    return parameters | held_tensors.ends()


class Held:
    """A rank's share of Hugging Face tensors, in vLLM's arrangement."""

    def __init__(self, shape: ModelShape, shard: RankShard) -> None:
        self.shape, self.shard = shape, shard
        self.rank, self.size = shard.tensor.index, shard.tensor.count
        self.tensors = {
            tensor.name.format(layer=layer, expert=expert): tensor.measure(shape.sizes)
            for entry in build_weight_map(shape)
            for tensor in entry.hf
            for layer in shard.layers
            for expert in range(shape.experts.count if shape.experts and entry.per_expert else 1)
            if entry.kind is None or entry.kind in shape.list_kinds(layer)
        }

    def read_tensor(self, name: str) -> Tensor:
        return full_tensor(name, self.tensors[name])

    def rows(self, name: str) -> Tensor:
        return self.read_tensor(name).chunk(self.size)[self.rank]

    def columns(self, name: str) -> Tensor:
        return self.read_tensor(name).chunk(self.size, dim=1)[self.rank]

    def heads(self, prefix: str) -> dict[str, Tensor]:
        """Attention with queries, keys and values of heads: all queries, all keys, all values of the rank."""
        groups, size = self.shape.key_value_heads, self.size
        first, count = self.rank * groups // size, max(groups // size, 1)
        parameters = {prefix + "o_proj.weight": self.columns(prefix + "o_proj.weight")}
        for kind in ("weight", "bias") if self.shape.qkv_bias else ("weight",):
            parts = [self.rows(f"{prefix}q_proj.{kind}")]
            for side in "kv":
                heads = self.read_tensor(f"{prefix}{side}_proj.{kind}").split(self.shape.head_dim)
                parts += heads[first : first + count]
            parameters[f"{prefix}qkv_proj.{kind}"] = torch.cat(parts)
        return parameters

    def latent(self, prefix: str) -> dict[str, Tensor]:
        """Multi-latent attention: what makes the short vectors in one matrix that every rank has."""
        down = [self.read_tensor(f"{prefix}{name}.weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
        return {
            prefix + "fused_qkv_a_proj.weight": torch.cat(down),
            prefix + "o_proj.weight": self.columns(prefix + "o_proj.weight"),
            **{f"{prefix}{name}.weight": self.rows(f"{prefix}{name}.weight") for name in ("q_b_proj", "kv_b_proj")},
        }

    def dense(self, prefix: str) -> dict[str, Tensor]:
        """Networks of all tokens: gate rows, then up rows."""
        parameters = {}
        for name in self.tensors:
            if name.startswith(prefix) and name.endswith("gate_proj.weight") and ".experts." not in name:
                block = name.removesuffix("gate_proj.weight")
                both = [self.rows(f"{block}{side}_proj.weight") for side in ("gate", "up")]
                parameters[block + "gate_up_proj.weight"] = torch.cat(both)
                parameters[block + "down_proj.weight"] = self.columns(block + "down_proj.weight")
        return parameters

    def experts(self, prefix: str) -> dict[str, Tensor]:
        """The rank's experts, one behind the other, each as a network of all tokens, or a part of it."""
        rank, size = self.shard.expert_tensor.index, self.shard.expert_tensor.count
        w13, w2 = [], []
        for expert in range(*self.shard.experts):
            gate, up, down = (
                self.read_tensor(f"{prefix}{expert}.{side}_proj.weight") for side in ("gate", "up", "down")
            )
            w13.append(torch.cat([gate.chunk(size)[rank], up.chunk(size)[rank]]))
            w2.append(down.chunk(size, dim=1)[rank])
        return {
            prefix + "routed_experts.w13_weight": torch.stack(w13),
            prefix + "routed_experts.w2_weight": torch.stack(w2),
        }

    def ends(self) -> dict[str, Tensor]:
        """Embedding and head, with zeros behind the vocabulary; and the last norm."""
        shape, shard, parameters = self.shape, self.shard, {}
        head = shard.has_output and not shape.tied_embeddings
        for name, is_here in (("model.embed_tokens.weight", shard.has_embedding), ("lm_head.weight", head)):
            if is_here:
                vocabulary = torch.zeros(-(-shape.vocab // 64) * 64, shape.hidden)
                vocabulary[: shape.vocab] = full_tensor(name, (shape.vocab, shape.hidden))
                parameters[name] = vocabulary.chunk(self.size)[self.rank]
        if shard.has_output:
            parameters["model.norm.weight"] = full_tensor("model.norm.weight", (shape.hidden,))
        return parameters


def model_of(parameters: dict[str, Tensor]) -> nn.Module:
    """Modules with zeros of these names and sizes."""
    root = nn.Module()
    for name, tensor in parameters.items():
        module, _, last = name.rpartition(".")
        layer = root
        for part in module.split("."):
            if part not in layer._modules:
                layer.add_module(part, nn.Module())
            layer = layer.get_submodule(part)
        layer.register_parameter(last, nn.Parameter(torch.zeros_like(tensor), requires_grad=False))
    return root


def made_up_worker(model: Any, boxes: Sequence[Box] = ()) -> Any:
    """What receivers ask of vLLM's worker."""
    return SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: model),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32)),
        device=torch.device("cpu"),
        boxes=boxes,
    )
