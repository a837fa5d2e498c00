"""Decisions that are made for a GPU, on a made-up platform: which layers, which fused kernels, what is moved."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.config.schema import Config, Fp8Config, ReferenceConfig
from megatron_grpo.platform.device import Platform
from megatron_grpo.trainer import offload, rank
from megatron_grpo.trainer.model import layer_spec
from megatron_grpo.trainer.model.layer_spec import uses_transformer_engine
from megatron_grpo.trainer.model.megatron_config import transformer_fields
from megatron_grpo.trainer.model.packed_sequences import lay_out, packed_sequences
from megatron_grpo.weights.families import shape_of_config
from tests.support.config_problems import SMALL

CUDA = Platform("cuda", torch.device("cpu"), "nccl")
SHAPE = shape_of_config(SMALL)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The packages that are installed, which the test adds."""
    names: set[str] = set()
    real = importlib.util.find_spec
    made_up = {"transformer_engine", "transformer_engine_torch", "fused_weight_gradient_mlp_cuda"}

    def find(name: str, *args: Any) -> Any:
        return (object() if name in names else None) if name in made_up else real(name, *args)

    monkeypatch.setattr("importlib.util.find_spec", find)
    layer_spec._transformer_engine_found.cache_clear()
    yield names
    layer_spec._transformer_engine_found.cache_clear()


def test_float32_layers_are_plain_torch(packages: set[str]) -> None:
    packages |= {"transformer_engine", "transformer_engine_torch"}
    assert uses_transformer_engine(SHAPE, CUDA, "bfloat16")
    assert not uses_transformer_engine(SHAPE, CUDA, "float32")


def test_transformer_engine_without_its_extension_for_torch_is_not_used(packages: set[str]) -> None:
    packages.add("transformer_engine")
    assert not uses_transformer_engine(SHAPE, CUDA, "bfloat16")


def test_boundaries_that_are_one_tensor_stay_one_on_the_device() -> None:
    layout = lay_out([3, 5], rank=0, size=1)
    copy = packed_sequences(layout, transformer_engine=True, move=lambda array: torch.from_numpy(array).clone())
    assert copy.cu_seqlens_q.tolist() == [0, 3, 8]
    for other in (copy.cu_seqlens_kv, copy.cu_seqlens_q_padded, copy.cu_seqlens_kv_padded):
        assert other is copy.cu_seqlens_q


@pytest.mark.parametrize(("simulate", "fused"), [(False, True), (True, False)])
def test_gradients_of_rounded_weights_are_not_fused(simulate: bool, fused: bool, packages: set[str]) -> None:
    packages.add("fused_weight_gradient_mlp_cuda")
    fp8 = Fp8Config(format="hybrid", recipe="tensorwise", simulate=simulate)
    policy = Config().policy
    policy.fp8 = fp8
    assert transformer_fields(policy, CUDA)["gradient_accumulation_fusion"] is fused


class GroupedLinear:
    """Megatron-Core's layer of three experts, as far as its state goes."""

    num_gemms = 3

    def _split_extra_state(self, state: Tensor) -> list[Tensor]:
        return list(state.split(1))


def test_grouped_layers_without_a_state_of_fp8_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.extensions.transformer_engine.TEGroupedLinear", GroupedLinear)
    monkeypatch.setattr(GroupedLinear, "_split_extra_state", GroupedLinear._split_extra_state)  # undone at the end
    layer_spec.keep_empty_states.__wrapped__()
    empty = torch.empty(0, dtype=torch.uint8)
    assert all(one is empty for one in GroupedLinear()._split_extra_state(empty))
    assert len(GroupedLinear()._split_extra_state(empty)) == 3
    assert [one.item() for one in GroupedLinear()._split_extra_state(torch.arange(3))] == [0, 1, 2]


def test_a_reference_that_moves_to_the_host_has_no_fp8_parameters() -> None:
    policy = Config().policy
    policy.fp8 = Fp8Config(format="hybrid", recipe="tensorwise", parameters=True)
    assert rank._reference_config(policy, ReferenceConfig(offload=False)).fp8.parameters
    moved_config = rank._reference_config(policy, ReferenceConfig(offload=True))
    assert not moved_config.fp8.parameters
    assert moved_config.fp8.format == "hybrid"


def test_fp8_copies_of_weights_are_given_up_with_the_device() -> None:
    layer = torch.nn.Linear(2, 2)
    layer._fp8_workspaces = {"weight": torch.empty(4)}
    model: Any = SimpleNamespace(chunks=[torch.nn.Sequential(layer)], reference=None)
    offload._drop_copies(model)
    assert layer._fp8_workspaces == {}
