"""Parts of Megatron-Core that only run on a CPU because of the compatibility layer, against plain torch."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_grpo.config.schema import PolicyConfig
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.hf_weights import iter_hf_tensors, load_hf_weights
from megatron_grpo.trainer.model.build import build_model
from megatron_grpo.trainer.model.packed_sequences import build_packed_sequences, lay_out
from tests.parity.ranks import Layout, run_on_ranks
from tests.support.tiny_models import VOCAB, TinyModel

HIDDEN, FFN, EXPERTS, TOPK = 16, 24, 4, 2


def expert_weights() -> tuple[Tensor, Tensor, Tensor]:
    """Router, gate and up, down: the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(EXPERTS, HIDDEN, generator=generator),
        torch.randn(EXPERTS, 2 * FFN, HIDDEN, generator=generator) * 0.3,
        torch.randn(EXPERTS, HIDDEN, FFN, generator=generator) * 0.3,
    )


def expert_tokens(rank: int) -> Tensor:
    """[length, sequences, HIDDEN]: different numbers on every rank, so that the split sizes differ."""
    return torch.randn(5, 2, HIDDEN, generator=torch.Generator().manual_seed(rank))


def experts_by_hand(hidden: Tensor) -> Tensor:
    """Every token through its top experts, weighted by the softmax over those experts' logits."""
    router, fc1, fc2 = expert_weights()
    weights, chosen = (hidden @ router.T).topk(TOPK, dim=-1)
    outputs = []
    for expert in range(EXPERTS):
        gate, up = (hidden @ fc1[expert].T).chunk(2, dim=-1)
        outputs.append((F.silu(gate) * up) @ fc2[expert].T)
    picked = torch.stack(outputs, dim=-2).gather(-2, chosen[..., None].expand(*chosen.shape, HIDDEN))
    return (picked * weights.softmax(dim=-1)[..., None]).sum(dim=-2)


def experts_on_rank(layout: Layout, dispatcher: str) -> tuple[Tensor, Tensor]:
    """Output and input gradient of the rank's own tokens."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="none",
        moe_ffn_hidden_size=FFN,
        moe_token_dispatcher_type=dispatcher,
        expert_model_parallel_size=layout.expert,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
    )
    experts = get_mlp_module_spec(use_te=False, num_experts=EXPERTS)(config=config)
    experts.router._apply_expert_bias = lambda *_, **__: None  # compiled, and there is no bias
    router, fc1, fc2 = expert_weights()
    with torch.no_grad():
        experts.router.weight.copy_(router)
        first = parallel_state.get_expert_model_parallel_rank() * (EXPERTS // layout.expert)
        for number, expert in enumerate(experts.experts.local_experts, start=first):
            expert.linear_fc1.weight.copy_(fc1[number])
            expert.linear_fc2.weight.copy_(fc2[number])
    hidden = expert_tokens(torch.distributed.get_rank()).requires_grad_()
    output, _ = experts(hidden)
    output.square().sum().backward()
    assert hidden.grad is not None
    return output.detach(), hidden.grad


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_experts_over_ranks(dispatcher: str) -> None:
    for rank, (output, grad) in enumerate(run_on_ranks(Layout(data=2, expert=2), experts_on_rank, dispatcher)):
        hidden = expert_tokens(rank).requires_grad_()
        expected = experts_by_hand(hidden)
        expected.square().sum().backward()
        torch.testing.assert_close(output, expected.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(grad, hidden.grad, atol=1e-4, rtol=1e-5)


TOKENS = torch.randint(0, VOCAB, (4, 10), generator=torch.Generator().manual_seed(5))
OPTIMIZER = {"lr": 0.01, "weight_decay": 0.1}


def step_on_rank(layout: Layout, folder: Path, distributed: bool) -> dict[str, Tensor]:
    """One AdamW step on the sum of squared logits of this replica's share of TOKENS; the new weights."""
    shape = read_model_shape(folder)
    (model,) = build_model(PolicyConfig(parallel=layout.parallel, precision="float32"), shape)
    load_hf_weights([model], shape, folder)
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), model
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", clip_grad=0.0, use_distributed_optimizer=distributed, **OPTIMIZER),
        [wrapped],
        use_gloo_process_groups=False,
    )
    wrapped.zero_grad_buffer()
    share = TOKENS.chunk(layout.data)[parallel_state.get_data_parallel_rank()]
    packed = build_packed_sequences(lay_out([share.shape[1]] * len(share)), transformer_engine=False)
    wrapped(share.view(1, -1), None, None, packed_seq_params=packed)[..., :VOCAB].square().sum().backward()
    finalize_model_grads([wrapped], num_tokens=torch.ones((), dtype=torch.int) * layout.data)
    assert optimizer.step()[0]
    return {name: tensor.clone() for name, tensor in iter_hf_tensors([model], shape) if tensor is not None}


@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "sharded"])
def test_optimizer_step(distributed: bool, tiny_models: dict[str, TinyModel]) -> None:
    model = tiny_models["llama_untied"]
    reference = model.load()
    optimizer = torch.optim.AdamW(reference.parameters(), betas=(0.9, 0.999), eps=1e-8, **OPTIMIZER)
    (reference(TOKENS).logits.square().sum() / 4).backward()
    optimizer.step()
    first, second = run_on_ranks(Layout(data=2), step_on_rank, model.path, distributed)
    assert not second, "the first replica speaks for all"
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(first[name], parameter.detach(), atol=2e-6, rtol=0, msg=lambda m, n=name: n + m)


def save_on_rank(layout: Layout, folder: Path, output: Path) -> None:
    shape = read_model_shape(folder)
    (model,) = build_model(PolicyConfig(parallel=layout.parallel, precision="float32"), shape)
    load_hf_weights([model], shape, folder)
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(output))


def load_on_rank(layout: Layout, folder: Path, checkpoint: Path) -> dict[str, Tensor]:
    shape = read_model_shape(folder)
    (model,) = build_model(PolicyConfig(parallel=layout.parallel, precision="float32"), shape)
    # Ranks of different replicas read different tensors and exchange them.
    strategy = FullyParallelLoadStrategyWrapper(
        get_default_load_sharded_strategy(str(checkpoint)), parallel_state.get_data_parallel_group()
    )
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint), strategy)
    model.load_state_dict(state["model"])
    return {name: tensor.clone() for name, tensor in iter_hf_tensors([model], shape) if tensor is not None}


def test_checkpoint_loads_in_another_layout(tiny_models: dict[str, TinyModel], tmp_path: Path) -> None:
    model = tiny_models["qwen3_untied"]
    run_on_ranks(Layout(pipeline=2), save_on_rank, model.path, tmp_path)
    result = run_on_ranks(Layout(tensor=2, data=2), load_on_rank, model.path, tmp_path)
    assert result[0].keys() == model.tensors().keys()
    for name, tensor in model.tensors().items():
        assert torch.equal(result[0][name], tensor), name
