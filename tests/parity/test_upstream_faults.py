"""Faults of Megatron-Core that are mended here: the mends, and the faults, so that a version without them tells."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from torch import Tensor

from megatron_grpo.config.schema import OptimizerConfig
from megatron_grpo.platform.device import Platform
from megatron_grpo.platform.megatron_on_cpu import build_cpu_torch
from megatron_grpo.trainer.model.layers import ExpertRowParallelLinear, HeadNorm, RMSNorm
from megatron_grpo.trainer.model.megatron_config import DecoderSettings
from megatron_grpo.trainer.rank import PolicyRank
from tests.parity.policy_training import make_engine, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.support.tiny_models import TinyModel

HIDDEN, HEADS, HEAD_DIM, TOKENS = 16, 4, 8, 6


def settings_of(layout: Layout, **fields: Any) -> TransformerConfig:
    return DecoderSettings(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=layout.tensor,
        sequence_parallel=layout.sequence,
        activation_func=F.silu,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,
        cuda_graph_modules=[],
        platform=Platform("cpu", torch.device("cpu"), "gloo"),
        **fields,
    )


def delta_net(layout: Layout, norm: type) -> torch.nn.Module:
    """Megatron-Core's delta net with torch's functions; each parameter is the same part of a whole one."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common, gdn

    common.HAVE_FLA, common.l2norm = True, lambda vectors: F.normalize(vectors, dim=-1)
    common.torch = gdn.torch = build_cpu_torch()
    settings = settings_of(
        layout,
        linear_num_key_heads=HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=HEAD_DIM,
        linear_value_head_dim=HEAD_DIM,
        linear_conv_kernel_dim=3,
        deterministic_mode=True,  # the rule in torch
    )
    parts = GatedDeltaNetSubmodules(ColumnParallelLinear, norm, RowParallelLinear)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    net: torch.nn.Module = GatedDeltaNet(settings, parts, layer_number=1, pg_collection=groups)
    sections = {"in_proj.weight": net.in_proj_split_sections, "conv1d.weight": [HEADS * HEAD_DIM // layout.tensor] * 3}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            axis = {"out_norm.weight": None, "out_proj.weight": 1}.get(name, 0)
            lengths = sections.get(name, [parameter.shape[axis or 0]])
            for part in parameter.split(list(lengths), dim=axis or 0):
                size = list(part.shape)
                size[axis or 0] *= layout.tensor if axis is not None else 1
                full = torch.randn(size, generator=generator) * 0.5
                part.copy_(full if axis is None else full.chunk(layout.tensor, axis)[groups.tp.rank()])
    return net


def norm_gradient_on_rank(layout: Layout, norm: type) -> Tensor:
    """The gradient of the output norm's weight after all that Megatron-Core sums."""
    net = delta_net(layout, norm)
    wrapped = DistributedDataParallel(net.config, DistributedDataParallelConfig(), net)
    hidden = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(5))
    if layout.sequence:
        hidden = hidden.chunk(layout.tensor)[ProcessGroupCollection.use_mpu_process_groups().tp.rank()]
    wrapped.zero_grad_buffer()
    output, _ = wrapped(hidden, None)
    output.square().sum().backward()
    finalize_model_grads([wrapped], None)
    gradient: Tensor = net.out_norm.weight.main_grad
    return gradient.clone()


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(tensor=2, sequence=True)], ids=str)
def test_gradients_of_a_delta_nets_output_norm_are_summed_over_tensor_parallel_ranks(layout: Layout) -> None:
    (expected,) = run_on_ranks(Layout(), norm_gradient_on_rank, HeadNorm)
    for gradient in run_on_ranks(layout, norm_gradient_on_rank, HeadNorm):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_without_the_mend_each_rank_has_the_gradient_of_its_own_heads() -> None:
    (expected,) = run_on_ranks(Layout(), norm_gradient_on_rank, RMSNorm)
    first, second = run_on_ranks(Layout(tensor=2), norm_gradient_on_rank, RMSNorm)
    torch.testing.assert_close(first + second, expected, rtol=1e-4, atol=1e-6)
    assert (first - expected).norm() > 0.1 * expected.norm()


FFN = 12


def expert_on_rank(layout: Layout, row: Callable[..., torch.nn.Module]) -> list[Tensor]:
    """Output of an expert with biases, and the gradients of its parameters; none if autograd refuses."""
    expert = MLP(
        settings_of(layout, gated_linear_unit=True, add_bias_linear=True, ffn_hidden_size=FFN),
        MLPSubmodules(ColumnParallelLinear, row),
        is_expert=True,
        ffn_hidden_size=FFN,
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in expert.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden, weights = torch.randn(TOKENS, HIDDEN, generator=generator), torch.rand(TOKENS, generator=generator)
    try:
        output, bias = expert(hidden.requires_grad_(), weights)
    except RuntimeError as error:
        if "is being modified inplace" in str(error):
            return []
        raise
    assert bias is None
    output.square().sum().backward()
    fc1, bias1, fc2, bias2 = parameters = [parameter.detach().requires_grad_() for parameter in expert.parameters()]
    gate, up = F.linear(hidden.detach(), fc1, bias1).chunk(2, dim=-1)
    by_hand = F.linear(F.silu(gate) * up * weights[:, None], fc2) + bias2 * weights[:, None]
    by_hand.square().sum().backward()
    torch.testing.assert_close(output, by_hand)
    for parameter, twin in zip(expert.parameters(), parameters, strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad)
    return [output.detach(), *(parameter.grad for parameter in expert.parameters())]


def test_an_expert_adds_its_bias() -> None:
    (results,) = run_on_ranks(Layout(), expert_on_rank, ExpertRowParallelLinear)
    assert len(results) == 5


def test_without_the_mend_an_expert_with_biases_cannot_be_trained() -> None:
    assert run_on_ranks(Layout(), expert_on_rank, RowParallelLinear) == [[]]


Rates = tuple[float, float]
"""Learning rates of most matrices, and of the embeddings."""


def make_engine_with(layout: Layout, model: TinyModel, rates: Rates) -> PolicyRank:
    rate, of_embeddings = rates
    fields = {"decoupled_lr": of_embeddings, "decoupled_min_lr": of_embeddings}
    return make_engine(layout, model, optimizer=OptimizerConfig(lr=rate, min_lr=rate), megatron_optimizer=fields)


def save_on_rank(layout: Layout, model: TinyModel, folder: str, rates: Rates) -> None:
    engine = make_engine_with(layout, model, rates)
    engine.train(*train_arguments(layout))
    engine.checkpoint.save(folder)


def resumed_rates_on_rank(layout: Layout, model: TinyModel, folder: str, rates: Rates) -> Rates:
    engine = make_engine_with(layout, model, rates)
    engine.checkpoint.load(folder)
    engine.train(*train_arguments(layout))
    groups = engine.optimizer.optimizer.param_groups
    rate, of_embeddings = (
        {group["lr"] for group in groups if group["default_config"] is is_own} for is_own in (True, False)
    )
    return rate.pop(), of_embeddings.pop()


@pytest.mark.parametrize("rates", [(5e-3, 4e-3), (4e-3, 4e-3)], ids=["changed", "equal"])
def test_a_resume_takes_the_learning_rates_of_its_own_configuration(
    rates: Rates, tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    model = tiny_models["llama_untied"]
    run_on_ranks(Layout(), save_on_rank, model, str(tmp_path), (1e-2, 2e-3))
    assert run_on_ranks(Layout(), resumed_rates_on_rank, model, str(tmp_path), rates) == [pytest.approx(rates)]


def groups_are_lost_on_rank(layout: Layout, model: TinyModel) -> bool:
    optimizer = make_engine(layout, model).optimizer.optimizer.chained_optimizers[0]
    state = optimizer.state_dict()
    for group in state["optimizer"]["param_groups"]:
        group["max_lr"] *= 2
    try:
        optimizer.load_state_dict(state)
    except KeyError:
        return True
    return False


def test_without_the_mend_a_changed_learning_rate_loses_a_parameter_group(tiny_models: dict[str, TinyModel]) -> None:
    assert run_on_ranks(Layout(), groups_are_lost_on_rank, tiny_models["qwen3_tied"]) == [True]
