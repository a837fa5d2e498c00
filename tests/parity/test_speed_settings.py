"""Settings of speed and memory change no number: overlapped communication, recomputation of parts of a layer."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.trainer.model.attention import TorchCoreAttention
from megatron_grpo.trainer.model.megatron_config import build_megatron_config
from tests.parity.policy_training import make_engine, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import fetch, whole_tensors
from tests.support.tiny_models import TinyModel, make_tiny_model

UNCLIPPED = {"max_grad_norm": 0.0}
"""Buckets change the order in which the squares of the norm are added up, and with clipping the last digit."""
OVERLAPPED = UNCLIPPED | {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp": {"bucket_size": 1000}}


def steps_on_rank(layout: Layout, model: TinyModel, settings: dict[str, Any]) -> list[Any]:
    """Three optimizer steps, the second without rows for the loss in its last microbatches; what comes of it."""
    engine = make_engine(layout, model, **settings)
    share, microbatches, loss_fn, counts = train_arguments(layout)
    unlearnt = share.select(list(range(len(share.lengths))))
    last = [piece for index in microbatches[-1] for piece in [unlearnt.fields.loss_mask.split(share.lengths)[index]]]
    for piece in last:
        piece.zero_()
    results: list[Any] = []
    for batch in (share, unlearnt, share):
        engine.train(fetch(engine, batch, loss_fn), microbatches, loss_fn, counts)
        results.append(engine.compute_logprobs(fetch(engine, batch, None), microbatches))
    groups = [len(chunk.bucket_groups) for chunk in engine.optimizer.chunks]
    return [groups, *results, whole_tensors(engine)]


def is_same(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    return torch.equal(first, second) if isinstance(first, Tensor) else first == second


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(data=2), "qwen3_tied"),
        pytest.param(Layout(data=2, pipeline=2), "qwen3_tied", marks=pytest.mark.slow),
        pytest.param(Layout(data=2, tensor=2, sequence=True), "llama_untied", marks=pytest.mark.slow),
        (Layout(context=2), "qwen3_tied"),
        (Layout(data=2, pipeline=2, virtual_pipeline=2, count_loss=True), "qwen3_deep"),
    ],
    ids=lambda value: str(value),
)
def test_overlapping_changes_no_bit(
    layout: Layout, name: str, tiny_models: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tiny_models.get(name) or make_tiny_model(name, tmp_path_factory.mktemp("deep"))
    plain = run_on_ranks(layout, steps_on_rank, model, UNCLIPPED)
    overlapped = run_on_ranks(layout, steps_on_rank, model, OVERLAPPED)
    assert max(max(result[0]) for result in overlapped) > 2  # several buckets, so that some travel during the pass
    for first, second in zip(plain, overlapped, strict=True):
        assert all(map(is_same, first[1:], second[1:]))


def take_numbers(target: Tensor, source: Tensor) -> None:
    storage = source.untyped_storage()
    target.untyped_storage().resize_(storage.size()).copy_(storage)


def recomputed_on_rank(
    layout: Layout, model: TinyModel, modules: Sequence[str], counted: type[torch.nn.Module]
) -> tuple[int, dict[str, Tensor]]:
    """How often a kind of module computed in an optimizer step, and the weights after it."""
    # Megatron-Core would compile this function.
    random._share_storage_ext = SimpleNamespace(share_storage=take_numbers)
    engine = make_engine(layout, model, recompute_modules=list(modules))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for chunk in engine.chunks:
        for module in chunk.decoder.layers.modules():
            if isinstance(module, counted):
                module.register_forward_pre_hook(count)
    engine.train(*train_arguments(layout))
    return calls, whole_tensors(engine)


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, sequence=True)], ids=str)
@pytest.mark.parametrize(
    ("name", "module", "counted"),
    [
        ("qwen3_tied", "core_attn", TorchCoreAttention),
        ("qwen3_tied", "mlp", RowParallelLinear),
        ("deepseek_v3", "core_attn", TorchCoreAttention),
        ("deepseek_v3", "mla_up_proj", ColumnParallelLinear),
    ],
)
def test_recomputing_parts_of_a_layer_changes_no_bit(
    layout: Layout,
    name: str,
    module: str,
    counted: type[torch.nn.Module],
    tiny_models: dict[str, TinyModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = tiny_models.get(name) or make_tiny_model(name, tmp_path_factory.mktemp("parts"))
    plain = run_on_ranks(layout, recomputed_on_rank, model, [], counted)
    recomputed = run_on_ranks(layout, recomputed_on_rank, model, [module], counted)
    for (once, expected), (again, actual) in zip(plain, recomputed, strict=True):
        assert again > once
        assert is_same(expected, actual)


def config_sizes(config: TransformerConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in ("num_layers", "hidden_size", "num_attention_heads")}


def fields_on_rank(layout: Layout, model: TinyModel) -> tuple[Any, ...]:
    engine = make_engine(
        layout,
        model,
        deterministic=True,
        megatron={"moe_router_dtype": "fp32", "disable_bf16_reduced_precision_matmul": True},
        ddp={"grad_reduce_in_fp32": False},
        megatron_optimizer={"log_num_zeros_in_grad": True},
    )
    config, optimizer = engine.chunks[0].config, engine.optimizer
    return (
        config.moe_router_dtype,
        build_megatron_config(
            TransformerConfig, config_sizes(config), {"attention_backend": "unfused"}
        ).attention_backend.name,
        config.disable_bf16_reduced_precision_matmul,
        optimizer.chunks[0].ddp_config.grad_reduce_in_fp32,
        optimizer.optimizer.chained_optimizers[0].config.log_num_zeros_in_grad,
    )


def test_fields_reach_megatron_core(tiny_models: dict[str, TinyModel]) -> None:
    (result,) = run_on_ranks(Layout(), fields_on_rank, tiny_models["qwen3_tied"])
    assert result == ("fp32", "unfused", True, False, True)


def refused_on_rank(layout: Layout, model: TinyModel) -> str:
    with pytest.raises(ValueError, match="Megatron-Core refuses TransformerConfig with") as caught:
        make_engine(layout, model, megatron={"cpu_offloading": True, "cpu_offloading_num_layers": 99})
    return str(caught.value)


def test_what_megatron_core_refuses_is_told_with_the_fields(tiny_models: dict[str, TinyModel]) -> None:
    (text,) = run_on_ranks(Layout(), refused_on_rank, tiny_models["qwen3_tied"])
    assert "cpu_offloading_num_layers=99: " in text
