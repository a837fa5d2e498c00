"""What vLLM's CPU build has no kernels for is refused before a start, as vLLM itself would refuse it later."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_grpo.config.schema import Config
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.preflight import engine_checks
from megatron_grpo.preflight.load import compose_config
from tests.support.engine_configs import ENGINE_CONFIGS

MODEL = "policy.model.path=m"


@functools.cache
def compose(*overrides: str) -> Config:
    return compose_config(["+exp=quickstart", MODEL, *overrides])


def find_texts(family: str, *overrides: str, **sizes: Any) -> dict[str, str]:
    """Problems of the quickstart's engines with a model of the family that has other sizes."""
    shape = parse_model_shape({**ENGINE_CONFIGS[family], **sizes})
    dtype = ["generation.engine.dtype=bfloat16"] if shape.delta is not None else []
    config = compose("generation.parallel.pipeline=1", *dtype, *overrides)
    return {problem.subject: problem.text for problem in engine_checks.find_engine_problems(config, shape)}


@pytest.fixture(scope="module")
def vllm_config() -> Iterator[Any]:
    from vllm.config import VllmConfig, set_current_vllm_config  # here: vLLM takes long to import

    with set_current_vllm_config(VllmConfig()):
        yield


def has_kernel(hidden: int, rows: int, activation: str, tensor: int, dtype: str) -> bool:
    """Whether vLLM finds a kernel for experts on this CPU."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend

    layout = FusedMoEParallelConfig.make_no_parallel()
    layout.tp_size = tensor
    try:
        experts = FusedMoEConfig(
            num_experts=4,
            experts_per_token=2,
            hidden_dim=hidden,
            intermediate_size=rows,
            num_local_experts=4,
            num_logical_experts=4,
            activation=MoEActivation(activation),
            device="cpu",
            routing_method=RoutingMethodType.Renormalize,
            moe_parallel_config=layout,
            in_dtype=getattr(torch, dtype),
        )
        select_unquantized_moe_backend(experts)
    except NotImplementedError:
        return False
    return True


# By activation in vLLM: a family, and the names of an expert's width in its config.json.
FAMILIES = {
    "silu": ("qwen3_moe", "moe_intermediate_size"),
    "swigluoai": ("gpt_oss", "intermediate_size"),
    "gelu_tanh": ("gemma4_moe", "moe_intermediate_size"),
    "relu2_no_mul": ("nemotron_h_moe", "moe_intermediate_size"),
}


@pytest.mark.usefixtures("vllm_config")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", FAMILIES)
def test_experts_are_refused_for_which_vllm_finds_no_kernel(activation: str, dtype: str) -> None:
    family, width = FAMILIES[activation]
    for hidden in (64, 48, 80):
        for rows, tensor in ((64, 2), (96, 2), (20, 1)):
            sizes = {"hidden_size": hidden, width: rows}
            texts = find_texts(
                family, f"generation.parallel.tensor={tensor}", f"generation.engine.dtype={dtype}", **sizes
            )
            is_refused = any("expert" in text for text in texts.values())
            assert is_refused != has_kernel(hidden, rows, activation, tensor, dtype), (sizes, tensor, texts)


def test_messages_name_the_size_and_the_way_out() -> None:
    text = "has experts that read vectors of 48 (hidden_size), and vLLM's kernel on a CPU takes multiples of 32; use"
    assert find_texts("mixtral", hidden_size=48)[MODEL].startswith(text)
    text = "has experts of 48 rows (intermediate_size), and vLLM's kernel on a CPU takes multiples of 32 for gpt_oss"
    assert find_texts("gpt_oss", intermediate_size=48)[MODEL].startswith(text)
    ((subject, text),) = find_texts("gpt_oss", "generation.parallel.tensor=2", intermediate_size=96).items()
    assert subject == "generation.parallel.tensor=2"
    assert text.startswith("leaves 48 rows of each expert to a rank")
    assert text.endswith("use 1, or generation.parallel.expert=2")
    parallel_sizes = ("generation.parallel.tensor=2", "generation.parallel.expert=2")
    assert find_texts("gpt_oss", *parallel_sizes, intermediate_size=96) == {}
    assert find_texts("nemotron_h_moe")[MODEL].startswith("has experts without gates, for which vLLM has no kernel")


def test_gpus_servers_and_recordings_need_no_kernel_of_a_cpu() -> None:
    sizes = {"hidden_size": 48}
    assert find_texts("glm4_moe", **sizes)
    assert find_texts("glm4_moe", "cluster.gpus_per_node=8", **sizes) == {}
    assert find_texts("glm4_moe", "generation.server.urls=[http://127.0.0.1:1]", **sizes) == {}
    assert find_texts("glm4_moe", "debug.rollouts_from=recorded", "data.val_path=null", **sizes) == {}


def decode_latent(rank: int, rope_dim: int) -> bool:
    """Whether vLLM's kernel decodes a token of latent attention of these sizes on a CPU."""
    import torch
    import vllm._custom_ops  # noqa: F401 - it loads the kernels

    length = torch.tensor([3], dtype=torch.int32)
    query, cache = torch.randn(1, 2, rank + rope_dim), torch.randn(1, 16, rank + rope_dim)
    try:
        torch.ops._C.mla_decode_kvcache(
            torch.empty(1, 2, rank), query, cache, 1.0, torch.zeros(1, 1, dtype=torch.int32), length
        )
    except RuntimeError:
        return False
    return True


@pytest.mark.parametrize(("rank", "rope_dim"), [(512, 64), (256, 64), (512, 32), (64, 32), (32, 16)])
def test_latent_attention_is_refused_that_vllm_does_not_decode(rank: int, rope_dim: int) -> None:
    texts = find_texts("deepseek_v3", kv_lora_rank=rank, qk_rope_head_dim=rope_dim)
    assert bool(texts) != decode_latent(rank, rope_dim)
    if texts:
        assert texts[MODEL].startswith(f"has latent attention of {rank} and {rope_dim} (kv_lora_rank, qk_rope_head")


def accepts_stages(kinds: list[str], stages: int) -> bool:
    """Whether vLLM finds a layout of caches for all stages of these layers; MLP layers have no cache."""
    from vllm.config import VllmConfig
    from vllm.distributed.utils import get_pp_indices
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout

    backends = {"full_attention": CPUAttentionBackend, "linear_attention": GDNAttentionBackend}
    supported = []
    for stage in range(stages):
        begin, end = get_pp_indices(len(kinds), stage, stages)
        layouts = get_supported_kv_cache_layouts(dict.fromkeys(backends[kind] for kind in kinds[begin:end]))
        supported.append([layout.name for layout in layouts])
    try:
        resolve_kv_cache_layout(VllmConfig(), supported)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize(
    ("kinds", "stages", "usable"),
    [
        ("dfdf", 2, 2),
        ("dddf", 2, 1),
        ("fddd", 2, 1),
        ("dddfdddf", 3, 2),  # of 3, 3 and 2 layers
        ("dfddf", 3, 2),
        ("dffddf", 3, 3),
        ("ffff", 4, 4),
    ],
)
def test_stages_of_delta_nets_alone_are_refused(kinds: str, stages: int, usable: int) -> None:
    names = [{"d": "linear_attention", "f": "full_attention"}[kind] for kind in kinds]
    pipeline = f"generation.parallel.pipeline={stages}"
    texts = find_texts("qwen3_next", pipeline, layer_types=names, num_hidden_layers=len(names))
    assert accepts_stages(names, usable)
    assert accepts_stages(names, stages) == (usable == stages)
    if usable == stages:
        assert texts == {}
    else:
        ((subject, text),) = texts.items()
        assert subject == pipeline
        assert text.startswith("has a stage without attention, of the layers ")
        assert text.endswith(f"use {usable}")


def test_stages_of_mamba_or_mlps_alone_are_refused() -> None:
    pipeline = "generation.parallel.pipeline=2"
    for layers, stage in (("mamba mamba attention mlp", "0 to 1"), ("mlp attention mlp mlp", "2 to 3")):
        text = find_texts("nemotron_h", pipeline, layers_block_type=layers.split(), num_hidden_layers=4)[pipeline]
        assert text.startswith(f"has a stage without attention, of the layers {stage}, ")
    served = find_texts("nemotron_h", pipeline, layers_block_type=["mamba", "attention"] * 2, num_hidden_layers=4)
    assert served == {}
