"""The life of a rank of the policy on CUDA, with Transformer Engine's layers, for every family and option.

Numbers mean nothing here; shapes, dtypes, devices, memory and the absence of errors do.
"""

import gc
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import (
    Fp8Config,
    LoraConfig,
    MoeConfig,
    OptimizerConfig,
    ParallelConfig,
    PolicyConfig,
    ReferenceConfig,
)
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.trainer.checkpoint import _METADATA, build_sharded_state, build_sharded_weights
from megatron_grpo.trainer.model.build import DecoderModel, build_model
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.weight_sync.pieces import lay_out_pieces, split_messages
from megatron_grpo.weight_sync.shard_sender import ShardSender
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages
from tests.cuda.null.kernels import SELECTIONS, host_waits
from tests.cuda.null.trial import LENGTHS, Trial, make_trial
from tests.support.engine_table import table_boxes

TOKENS = sum(map(sum, LENGTHS))


@dataclass(frozen=True)
class Case:
    """A rank of a model: keys of `policy`, the rank's number, and settings of its reference."""

    family: str = "qwen3"
    policy: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    reference: ReferenceConfig | None = None


def fp8(recipe: str, **keys: Any) -> dict[str, Any]:
    """The key of `policy` for products in FP8."""
    return {"fp8": Fp8Config(format="hybrid", recipe=recipe, **keys)}


def layout(**sizes: Any) -> dict[str, Any]:
    """The key of `policy` for the layout."""
    return {"parallel": ParallelConfig(**sizes)}


SPLIT = layout(tensor=2, pipeline=2, data=2, sequence=True)
LOSSES = {"moe": MoeConfig(aux_loss_coeff=1e-3, z_loss_coeff=1e-3)}

CASES = {
    "qwen3": Case(),
    "qwen2": Case("qwen2"),
    "llama": Case("llama"),
    "gemma3": Case("gemma3"),
    "qwen3_moe": Case("qwen3_moe", LOSSES),
    "mixtral": Case("mixtral"),
    "deepseek_v3": Case("deepseek_v3", {"moe": MoeConfig(bias_update_rate=1e-3)}),
    "latent, uncompressed": Case("deepseek_v3, full queries"),
    "latent, float32": Case("deepseek_v3", {"precision": "float32"}),
    "latent, context": Case("deepseek_v3", layout(context=2, data=2), number=1),
    "latent, first stage": Case("deepseek_v3", SPLIT),
    "latent, last stage": Case("deepseek_v3", SPLIT | fp8("blockwise"), number=7),
    "latent, experts shared": Case("deepseek_v3", layout(data=2, expert=2), number=1),
    "latent, fp8 delayed": Case("deepseek_v3", fp8("delayed")),
    "latent, fp8 tensorwise": Case("deepseek_v3", fp8("tensorwise", parameters=True)),
    "latent, fp8 blockwise": Case("deepseek_v3", fp8("blockwise", first_layers_bf16=1, last_layers_bf16=1)),
    "latent, fp8 parameters": Case("deepseek_v3", fp8("blockwise", parameters=True), reference=ReferenceConfig()),
    "latent, simulated fp8": Case("deepseek_v3", fp8("blockwise", simulate=True)),
    "sparse": Case("deepseek_v32"),
    "sparse, first stage": Case("glm_moe_dsa", SPLIT),
    "sparse, context, fp8": Case("glm_moe_dsa", layout(context=2, data=2) | fp8("blockwise"), number=1),
    "sparse, recomputed": Case("glm_moe_dsa", {"activation_checkpointing": True}),
    "latent, adapters": Case(
        "deepseek_v3", {"lora": LoraConfig(rank=8, target_modules=["linear_proj"])}, reference=ReferenceConfig()
    ),
    "latent, recomputed": Case("deepseek_v3", fp8("blockwise") | {"activation_checkpointing": True}),
    "latent, recomputed parts": Case(
        "deepseek_v3", fp8("blockwise") | {"recompute_modules": ["core_attn", "layernorm", "moe", "mla_up_proj"]}
    ),
    "float32": Case(policy={"precision": "float32"}),
    "unpacked": Case(policy={"packing": False}),
    "fused head": Case(policy={"logprob_kernel": "fused"}),
    "context": Case(policy=layout(context=2)),
    "context, second rank": Case(policy=layout(context=2, data=2), number=1),
    "first stage": Case(policy=SPLIT),
    "last stage": Case(policy=SPLIT, number=7),
    "last stage, fp8": Case(policy=SPLIT | fp8("tensorwise", parameters=True), number=7),
    "virtual pipeline": Case(policy=layout(pipeline=2, virtual_pipeline=2), number=1),
    "experts shared": Case("qwen3_moe", LOSSES | layout(data=2, expert=2), number=1),
    "experts split": Case("qwen3_moe", LOSSES | layout(tensor=2, expert_tensor=2, sequence=True), number=1),
    "experts, fp8 delayed": Case("qwen3_moe", fp8("delayed")),
    "experts, fp8 tensorwise": Case("qwen3_moe", fp8("tensorwise")),
    "experts, fp8 blockwise": Case("qwen3_moe", fp8("blockwise", parameters=True)),
    "delayed": Case(policy=fp8("delayed")),
    "delayed, parameters": Case(policy=fp8("delayed", parameters=True)),
    "tensorwise": Case(policy=fp8("tensorwise")),
    "tensorwise, parameters": Case(policy=fp8("tensorwise", parameters=True)),
    "tensorwise, outer layers": Case(
        policy=fp8("tensorwise", parameters=True, first_layers_bf16=1, last_layers_bf16=1)
    ),
    "blockwise": Case(policy=fp8("blockwise")),
    "blockwise, parameters": Case(policy=fp8("blockwise", parameters=True)),
    "simulated fp8": Case(policy=fp8("tensorwise", simulate=True)),
    "adapters of experts": Case("qwen3_moe", {"lora": LoraConfig(rank=8)}, reference=ReferenceConfig()),
    "adapters of experts, shared out": Case(
        "qwen3_moe", {"lora": LoraConfig(rank=8)} | layout(data=2, expert=2), number=1
    ),
    "adapters": Case(policy={"lora": LoraConfig(rank=8)}, reference=ReferenceConfig()),
    "reference": Case(reference=ReferenceConfig()),
    "reference, fp8": Case(policy=fp8("tensorwise", parameters=True), reference=ReferenceConfig()),
    "reference on the host": Case(reference=ReferenceConfig(offload=True)),
    "reference on the host, fp8": Case(
        policy=fp8("tensorwise", parameters=True), reference=ReferenceConfig(offload=True)
    ),
    "recomputed": Case(policy={"activation_checkpointing": True}),
    "recomputed, fp8": Case(policy=fp8("delayed") | {"activation_checkpointing": True}),
    "recomputed parts": Case(policy={"recompute_modules": ["core_attn", "mlp", "layernorm"]}),
    "recomputed experts": Case("qwen3_moe", {"recompute_modules": ["moe_act", "moe"]}),
    "deterministic": Case(policy={"deterministic": True}),
    "overlap": Case(policy=layout(data=2)),
    "not fused": Case(policy={"gradient_accumulation_fusion": False}),
    "optimizer on the host": Case(policy={"optimizer": OptimizerConfig(cpu_offload=1.0)}),
    "optimizer of Transformer Engine": Case(policy={"optimizer": OptimizerConfig(precision_aware=True)}),
    "optimizer not distributed": Case(policy={"optimizer": OptimizerConfig(distributed=False)}),
}


def trial_of(case: Case, models: Callable[[str], Path]) -> Trial:
    config = PolicyConfig(**({"logprob_kernel": "chunked"} | case.policy))
    return make_trial(models(case.family), config, case.number, case.reference)


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
def test_the_life_of_a_rank(case: Case, models: Callable[[str], Path], tmp_path: Path) -> None:
    trial = trial_of(case, models)
    rank = trial.rank
    outputs = [trial.logprobs()] + ([trial.reference_logprobs()] if case.reference else [])
    for output in outputs:
        assert (output is not None) is rank.is_output_rank
        assert output is None or (output.shape, output.dtype, output.device.type) == ((TOKENS,), torch.float32, "cpu")
    for _ in range(2):
        share = trial.train()
    assert share.grad_norm == 1.0
    assert (share.metrics is not None) is rank._has_loss
    assert share.metrics is None or len(share.metrics) == len(LENGTHS)
    send_weights(trial, case.number)
    with trial.answers:
        if rank.config.parallel.world_size == 1:
            rank.checkpoint.save(str(tmp_path))
            rank.checkpoint.load(str(tmp_path))
        else:  # the other ranks' parts would be missing
            build_sharded_state(rank, is_loading=False)
    del share, outputs
    offload(rank)
    trial.logprobs()
    trial.train()


def send_weights(trial: Trial, number: int) -> None:
    """Fill every message of a refit that goes to one engine of one GPU."""
    rank = trial.rank
    config, shape = rank.config, rank.shape
    shards, engine = split_policy(config.parallel, shape), table_boxes(GenerationParallelConfig(), shape)
    dtypes = choose_wire_dtypes(shape, config.precision, fp8_blocks=False)
    pieces = plan_messages(shape, shards, engine, 1, dtypes, 1 << 20)
    messages = split_messages(pieces[pieces["source"] == number])
    packed = [lay_out_pieces(message, [getattr(torch, dtype) for dtype in dtypes]) for message in messages]
    sizes = [size for _, size in packed]

    def send(fill: Callable[[int, torch.Tensor], None], version: int) -> None:
        for message, size in enumerate(sizes):
            fill(message, torch.empty(size, dtype=torch.uint8, device="cuda"))

    links: Any = SimpleNamespace(
        messages=messages,
        packed_pieces=[piece for piece, _ in packed],
        sizes=sizes,
        is_relayed=[False] * len(messages),
        send=send,
    )
    with torch.no_grad():
        sent = ShardSender(rank, shards[number], links).send(1)
    assert sent == (sum(sizes), len(pieces[pieces["source"] == number]), len(messages))


def offload(rank: PolicyRank) -> None:
    """Give the device up and take it back: little stays, and as much comes back."""
    rank.optimizer.zero_grad()
    gc.collect()
    before = torch.cuda.memory_allocated()
    rank.memory.offload(weights=False)
    rank.memory.offload(weights=True)
    gc.collect()
    remaining = torch.cuda.memory_allocated()
    assert remaining < 2 * 2**20, (
        f"{remaining / 2**20:.2f} MiB of {before / 2**20:.2f} stay"
    )  # histories of scales, small tables
    rank.memory.onload()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


def test_fp8_blocks_have_the_scales_that_engines_receive() -> None:
    """Transformer Engine reads the variable when it is imported, which was before this test."""
    code = (
        "from megatron_grpo.trainer.actor import choose_fp8_scales; choose_fp8_scales()\n"
        "from transformer_engine.common.recipe import Float8BlockScaling\n"
        "print(Float8BlockScaling().fp8_quant_fwd_weight.power_2_scale)"
    )
    output = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert output.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("sizes", [{}, {"expert": 2}, {"expert_tensor": 2}], ids=str)
def test_every_rank_counts_its_own_experts_in_the_gradient_norm(
    sizes: dict[str, int], models: Callable[[str], Path]
) -> None:
    """The second of two tensor-parallel ranks leaves out what both hold: norms and routers."""
    rank = trial_of(Case("qwen3_moe", layout(tensor=2, sequence=True, **sizes), number=1), models).rank
    counted = {
        id(parameter)
        for optimizer in rank.optimizer.optimizer.chained_optimizers
        for parameter in optimizer.get_parameters()
        if param_is_not_tensor_parallel_duplicate(parameter, optimizer.tp_group, optimizer.expert_tp_group)
    }
    named = [pair for chunk in rank.chunks for pair in chunk.named_parameters()]
    # Each of the ranks that hold equal experts updates some of them, and counts these.
    updated = [(name, parameter.main_param) for name, parameter in named if parameter.main_param is not None]
    left_out = {name for name, copy in updated if id(copy) not in counted}
    assert left_out == {name for name, _ in updated if "norm" in name or "router" in name}
    assert any(".experts." in name for name, _ in updated)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [(Case(), (64, 64)), (Case("deepseek_v3"), (192, 128)), (Case("deepseek_v3", layout(context=2)), (192, 128))],
    ids=["qwen3", "deepseek_v3", "deepseek_v3, context"],
)
def test_packed_attention_is_fused_and_without_padding(
    case: Case, sizes: tuple[int, int], models: Callable[[str], Path]
) -> None:
    trial = trial_of(case, models)
    trial.train()
    assert len(SELECTIONS) > 0
    for parameters, is_fused in SELECTIONS:
        assert is_fused
        assert parameters.qkv_layout == "thd_thd_thd"
        assert not parameters.pad_between_seqs
        assert (parameters.head_dim_qk, parameters.head_dim_v) == sizes
        assert parameters.context_parallel == (case.policy != {})


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v3, full queries"])
def test_layers_of_both_kinds_read_each_others_checkpoints(family: str, models: Callable[[str], Path]) -> None:
    """Torch's layers and Transformer Engine's give a tensor the same name, shape and parts."""
    rank = trial_of(Case(family), models).rank
    engine, torch_layers = (
        entries(rank.chunks),
        entries(build_model(replace(rank.config, precision="float32"), rank.shape)),
    )
    assert engine == torch_layers
    assert len(engine) > 10


def entries(chunks: list[DecoderModel]) -> dict[str, Any]:
    """The tensors of a checkpoint: shape of each, and the part that this rank has."""
    tensors = [
        value
        for value in nested_values(build_sharded_weights(chunks, dict(_METADATA)))
        if isinstance(value, ShardedTensor)
    ]
    return {f"{tensor.key} {tensor.global_offset}": (tensor.global_shape, tensor.local_shape) for tensor in tensors}


@pytest.mark.parametrize(("family", "limit"), [("qwen3", 10), ("qwen3_moe", 61), ("deepseek_v3", 61)])
def test_a_step_seldom_waits_for_the_device(family: str, limit: int, models: Callable[[str], Path]) -> None:
    """Twice a microbatch, for the norm and for the metrics; and where tokens are counted that go to experts."""
    trial = trial_of(Case(family), models)
    trial.train()
    before = host_waits()
    trial.answers.waits.clear()
    trial.train()
    in_layers = {site for _, site in trial.answers.waits if "/model/" in site}
    assert host_waits() - before <= limit
    assert all("experts.py" in site for site in in_layers)
