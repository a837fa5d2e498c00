"""Decisions for CUDA, and calls into Megatron-Core that fit its installed version."""

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.optimizer import distrib_optimizer
from megatron.core.parallel_state import RankGenerator
from torch import Tensor

from megatron_grpo import models, planning, trainer
from megatron_grpo.cluster.allocators import choose_cuda_settings
from megatron_grpo.config.policy_schema import ParallelConfig
from megatron_grpo.config.schema import Config, Fp8Config, ReferenceConfig
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.platform.device import Platform
from megatron_grpo.trainer import actor, offload, parallel
from megatron_grpo.trainer.actor import RankActor
from megatron_grpo.trainer.model import build, layer_spec, megatron_config
from megatron_grpo.trainer.model.attention import RotaryTable, TorchCoreAttention
from megatron_grpo.trainer.model.layer_spec import uses_transformer_engine
from megatron_grpo.trainer.model.megatron_config import build_transformer_fields
from megatron_grpo.trainer.model.packed_sequences import build_packed_sequences, lay_out
from tests.cuda import contracts
from tests.support.config_problems import SMALL
from tests.support.hf_configs import QWEN3_MOE

CPU, CUDA = Platform("cpu", torch.device("cpu"), "gloo"), Platform("cuda", torch.device("cpu"), "nccl")
SHAPE = parse_model_shape(SMALL)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The packages that are installed, which the test adds."""
    names: set[str] = set()
    find_spec = importlib.util.find_spec
    made_up = {"transformer_engine", "transformer_engine_torch", "fused_weight_gradient_mlp_cuda"}

    def find(name: str, *args: Any) -> Any:
        return (object() if name in names else None) if name in made_up else find_spec(name, *args)

    monkeypatch.setattr("importlib.util.find_spec", find)
    layer_spec._has_transformer_engine.cache_clear()
    yield names
    layer_spec._has_transformer_engine.cache_clear()


def test_float32_layers_are_plain_torch(packages: set[str]) -> None:
    packages |= {"transformer_engine", "transformer_engine_torch"}
    assert uses_transformer_engine(SHAPE, CUDA, "bfloat16")
    assert not uses_transformer_engine(SHAPE, CUDA, "float32")


def test_transformer_engine_without_its_extension_for_torch_is_not_used(packages: set[str]) -> None:
    packages.add("transformer_engine")
    assert not uses_transformer_engine(SHAPE, CUDA, "bfloat16")


@pytest.mark.parametrize("unfused", [True, False])
def test_attention_without_a_fused_kernel_is_warned_of(
    unfused: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention"
    layer_spec.warn_of_unfused_attention.cache_clear()
    monkeypatch.setitem(sys.modules, name, Mock(_attention_backends={"use_unfused_attention": unfused}))
    with caplog.at_level("WARNING"):
        layer_spec.warn_of_unfused_attention()
    layer_spec.warn_of_unfused_attention.cache_clear()
    assert ("square of a sequence's length" in caplog.text) == unfused


def test_boundaries_that_are_one_tensor_stay_one_on_the_device() -> None:
    layout = lay_out([3, 5], rank=0, size=1)
    copy = build_packed_sequences(layout, transformer_engine=True, move=lambda array: torch.from_numpy(array).clone())
    assert copy.cu_seqlens_q.tolist() == [0, 3, 8]
    for boundaries in (copy.cu_seqlens_kv, copy.cu_seqlens_q_padded, copy.cu_seqlens_kv_padded):
        assert boundaries is copy.cu_seqlens_q


@pytest.mark.parametrize(("simulate", "fused"), [(False, True), (True, False)])
def test_gradients_of_rounded_weights_are_not_fused(simulate: bool, fused: bool, packages: set[str]) -> None:
    packages.add("fused_weight_gradient_mlp_cuda")
    fp8 = Fp8Config(format="hybrid", recipe="tensorwise", simulate=simulate)
    policy = Config().policy
    policy.fp8 = fp8
    assert build_transformer_fields(policy, CUDA)["gradient_accumulation_fusion"] is fused


def test_a_reference_that_moves_to_the_host_has_no_fp8_parameters() -> None:
    policy = Config().policy
    policy.fp8 = Fp8Config(format="hybrid", recipe="tensorwise", parameters=True)
    assert build.make_reference_config(policy, ReferenceConfig(offload=False)).fp8.parameters
    moved_config = build.make_reference_config(policy, ReferenceConfig(offload=True))
    assert not moved_config.fp8.parameters
    assert moved_config.fp8.format == "hybrid"


def test_what_transformer_engine_keeps_is_given_up_with_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, used, cleared = torch.nn.Linear(2, 2), [], []
    layer._fp8_workspaces = {"weight": torch.empty(4)}
    layer.weight.update_usage = lambda **usage: used.append(usage)  # as FP8 parameters have
    gradients = {(2, 2, torch.bfloat16): torch.empty(2, 2)}
    parts = {
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.module.base": {"_dummy_wgrads": gradients},
        "transformer_engine.pytorch.cpp_extensions.gemm": {
            "get_cublas_workspace": SimpleNamespace(cache_clear=lambda: cleared.append(True))
        },
    }
    model: Any = SimpleNamespace(chunks=[torch.nn.Sequential(layer)], reference=None)
    offload._drop_copies(model)
    assert gradients, "nothing of Transformer Engine is imported"
    for name, contents in parts.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    offload._drop_copies(model)
    assert layer._fp8_workspaces == {}
    assert used == [{"rowwise_usage": True, "columnwise_usage": False}] * 2
    assert not gradients
    assert cleared == [True]


def test_a_reference_is_built_without_copies_of_what_was_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core asks Transformer Engine for such copies where gradients are on."""
    chunk = torch.nn.Linear(2, 2)
    grads: list[bool] = []

    def build_linear(*_: Any) -> list[torch.nn.Module]:
        grads.append(torch.is_grad_enabled())
        return [torch.nn.Linear(2, 2)]

    monkeypatch.setattr(build, "build_model", build_linear)
    chunks: list[Any] = [chunk]
    (reference,) = build.build_reference(chunks, Config().policy, ReferenceConfig(), SHAPE, CPU)
    assert grads == [False]
    assert torch.equal(reference.weight, chunk.weight)
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_experts_of_transformer_engine_are_grouped_and_permuted_by_its_kernels() -> None:
    shape = parse_model_shape(QWEN3_MOE)
    for engine in (True, False):
        settings = megatron_config._list_expert_settings(shape, uses_te=engine)
        assert settings["moe_grouped_gemm"] is settings["moe_permute_fusion"] is engine


def test_outputs_that_were_sent_to_the_next_stage_are_freed() -> None:
    assert megatron_config.build_transformer_config(Config().policy, SHAPE, CPU).deallocate_pipeline_outputs


def test_one_table_of_angles_serves_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    table = RotaryTable(RotaryEmbedding(8, rotary_percent=1.0))
    expected = table.rotary.get_freqs_non_repeated(7)
    longest = table(7, packed_seq=True, cp_group=None)
    assert torch.equal(longest[:, 0, 0], torch.cat([expected, expected], dim=-1))
    for length in (3, 5, 7):
        shorter = table(length, packed_seq=True, cp_group=None)
        assert torch.equal(shorter, longest[:length])
        assert shorter.untyped_storage().data_ptr() == longest.untyped_storage().data_ptr()
    assert len(table(9, packed_seq=True)) == 9


@pytest.mark.parametrize(
    ("dtype", "window", "grouped"),
    [(torch.bfloat16, None, True), (torch.bfloat16, 3, False), (torch.float32, None, False)],
    ids=["causal", "masked", "float32"],
)
def test_keys_are_repeated_where_no_fused_kernel_takes_groups(
    dtype: torch.dtype, window: int | None, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = {"window_size": window and (window - 1, 0), "window_attn_skip_freq": None}
    on_cpu, on_gpu = (
        TorchCoreAttention(
            SimpleNamespace(context_parallel_size=1, platform=platform, softmax_type="vanilla", **windows),
            layer_number=1,
        )
        for platform in (CPU, CUDA)
    )
    head_counts: set[tuple[int, int, bool]] = set()
    query, key, value = (torch.randn(8, 1, heads, 8).to(dtype) for heads in (4, 2, 2))
    packed = build_packed_sequences(lay_out([4, 4]), transformer_engine=False, window=window)
    expected = on_cpu(query, key, value, None, packed_seq_params=packed)
    kernel = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        head_counts.add((key.shape[1], value.shape[1], options["enable_gqa"]))
        return kernel(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    torch.testing.assert_close(on_gpu(query, key, value, None, packed_seq_params=packed), expected)
    assert head_counts == {(2, 2, True) if grouped else (4, 4, False)}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a process, which the test may change."""
    variables = {"PATH": os.environ["PATH"]}
    monkeypatch.setattr(os, "environ", variables)
    return variables


@pytest.mark.parametrize("fused", [True, False])
def test_the_state_of_torch_adamw_is_patched_without_a_fused_optimizer(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU without Transformer Engine and apex checkpoints could not be loaded."""
    patched: list[bool] = []
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", fused)
    monkeypatch.setattr(parallel, "patch_state_of_adamw", lambda: patched.append(True))
    monkeypatch.setattr(torch.cuda, "set_device", Mock(side_effect=InterruptedError))
    with pytest.raises(InterruptedError):
        parallel.initialize_parallel(Config().policy.parallel, rank=0, store=Mock(), seed=1, timeout_s=1, platform=CUDA)
    assert patched == [True] * (not fused)


def test_a_rank_sets_what_cuda_reads_before_torch_is_imported(environment: dict[str, str]) -> None:
    RankActor("policy rank 0", 0, 1)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert environment["PYTORCH_ALLOC_CONF"] == choose_cuda_settings()
    assert environment["NCCL_CUMEM_ENABLE"] == "1"
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    RankActor("policy rank 0", 0, 1)
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"


@pytest.mark.parametrize(("capability", "value"), [((9, 0), "1"), ((10, 0), None)])
def test_fp8_blocks_of_a_rank_have_the_scales_of_engines(
    capability: tuple[int, int], value: str | None, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    actor.choose_fp8_scales()
    assert environment.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES") == value


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_deterministic_rank_asks_torch_cublas_and_nccl(
    deterministic: bool, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before it makes the first communicator."""
    torch_flags: list[bool] = []

    def initialize(*_: Any, **__: Any) -> None:
        torch_flags.append(torch.are_deterministic_algorithms_enabled())
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron_grpo.platform.device.detect_platform", lambda: CUDA)
    monkeypatch.setattr("megatron_grpo.platform.device.connect_store", lambda *_: None)
    monkeypatch.setattr(parallel, "initialize_parallel", initialize)
    monkeypatch.setattr(RankActor, "import_packages", lambda _: None)
    (tmp_path / "config.json").write_text("{}")
    policy = Config().policy
    policy.deterministic = deterministic
    settings = actor.RankSettings(config=policy, shape=SHAPE, folder=str(tmp_path), decay_steps=1)
    try:
        with pytest.raises(KeyboardInterrupt):
            RankActor("policy rank 0", 0, 1).start(settings, ("here", 1))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch_flags == [deterministic]
    values = [environment.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")]
    assert values == ([":4096:8", "Ring"] if deterministic else [None, None])


def test_calls_and_overridden_methods_fit_the_installed_megatron_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts, "LIBRARIES", ("megatron",))
    monkeypatch.setattr(contracts, "NCCL", "(none)")
    findings = contracts.Findings()
    for package in (models, planning, trainer):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            contracts.check_module(module.name, findings)
    assert findings.problems == []
    assert findings.checked > 60


@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor": 2, "expert": 2},
        {"tensor": 2, "expert": 4, "data": 2},
        {"tensor": 2, "expert": 2, "expert_tensor": 2, "data": 2},
        {"tensor": 4, "expert": 2, "expert_tensor": 2},
        {"context": 2, "expert": 2, "data": 2, "pipeline": 2},
        {"data": 4, "expert": 2, "pipeline": 2},
    ],
    ids=str,
)
def test_ranks_hold_the_parts_that_megatron_core_gives_them(sizes: dict[str, int]) -> None:
    layout, shape = ParallelConfig(sequence=True, **sizes), parse_model_shape(QWEN3_MOE)
    stages: dict[str, Any] = {"pp": layout.pipeline, "order": "tp-cp-ep-dp-pp"}
    dense = RankGenerator(tp=layout.tensor, ep=1, cp=layout.context, dp=layout.data, **stages)
    replicas = layout.world_size // (layout.pipeline * layout.expert * layout.expert_tensor)
    sparse = RankGenerator(tp=layout.expert_tensor, ep=layout.expert, cp=1, dp=replicas, **stages)

    def find_index(ranks: RankGenerator, axis: str, rank: int) -> int:
        return next(group.index(rank) for group in ranks.get_ranks(axis) if rank in group)

    per_rank = shape.experts.count // layout.expert
    for rank, shard in enumerate(split_policy(layout, shape)):
        assert shard.tensor.index == find_index(dense, "tp", rank)
        assert shard.expert_tensor.index == find_index(sparse, "tp", rank)
        assert shard.experts[0] == per_rank * find_index(sparse, "ep", rank)
        assert shard.has_embedding == (find_index(dense, "pp", rank) == 0)
