"""Adapters of a model without its weights: the adapter's name in engines, and its matrices under peft's names."""

from __future__ import annotations

from megatron_grpo.config.schema import LoraConfig, PolicyConfig
from megatron_grpo.models.adapter_slot import AdapterSlot
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import WeightEntry, index_tensors

POLICY_ADAPTER = "policy"
"""Name of the policy's adapter in an engine."""


_SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of vLLM's slots (`vllm.config.lora.MaxLoRARanks`)."""


def choose_slot_rank(rank: int) -> int:
    """Choose the smallest rank of a slot that holds an adapter."""
    return min(size for size in _SLOT_RANKS if size >= rank)


def make_policy_slot(policy: PolicyConfig, shape: ModelShape) -> AdapterSlot:
    """Make the slot of the policy's adapter, the only one of a run."""
    names = measure_adapters(shape, policy.lora)
    modules = {name.split(".")[-3] for name in names}
    if any(".experts." in name for name in names):
        modules.add("experts")  # vLLM has all of a layer's experts in one module
    return AdapterSlot(POLICY_ADAPTER, 1, policy.lora.rank, policy.lora.alpha, sorted(modules))


def measure_adapters(shape: ModelShape, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Measure all A and B, by name.

    Those of a matrix are side by side. Names are peft's without its prefix, as those of
    `hf_weights.iter_adapter_tensors`.
    """
    shapes: dict[str, tuple[int, int]] = {}
    entries = build_weight_map(shape)
    for name, key in index_tensors(entries, shape).items():
        if is_adapted(entries[key.row], lora):
            rows, columns = key.tensor.measure(shape.sizes)[-2:]
            matrix = name.removesuffix(".weight")
            shapes[f"{matrix}.lora_A.weight"] = (lora.rank, columns)
            shapes[f"{matrix}.lora_B.weight"] = (rows, lora.rank)
    return shapes


def is_adapted(entry: WeightEntry, lora: LoraConfig) -> bool:
    """True for the weight of a layer with adapters."""
    module, _, last = entry.name.rpartition(".")
    return last == "weight" and module.rpartition(".")[2] in lora.target_modules


def name_matrix(adapter_tensor: str) -> str:
    """Name the weight that an A or B belongs to."""
    return adapter_tensor.rpartition(".lora_")[0] + ".weight"
