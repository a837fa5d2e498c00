"""Memory of a GPU and arithmetic of a layout before any dry run, against dry runs."""

from collections import Counter

import numpy as np
import pytest

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import measure_tensors
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning.device_memory import GIB, GRAPHS_GIB, RankMemory, build_rank_memory
from megatron_grpo.planning.dry_run import DryReport, run_dry
from megatron_grpo.planning.engine_shards import assume_boxes
from megatron_grpo.planning.estimates import (
    count_host_bytes,
    count_replayed_bytes,
    count_static_bytes,
    estimate_activation_bytes,
    estimate_step_s,
)
from megatron_grpo.planning.generation_cost import find_lengths
from megatron_grpo.planning.trace import RankTrace
from megatron_grpo.planning.whole import Plan
from megatron_grpo.platform.hardware import load_hardware
from megatron_grpo.preflight.refit_memory import NCCL_SENDING, estimate_nccl_bytes
from megatron_grpo.weight_sync.boxes import to_slices
from tests.support.engine_configs import ENGINE_CONFIGS
from tests.support.hf_configs import QWEN3_MOE
from tests.unit.planning.test_dry_run import DENSE, EXPERTS, needs_no_gpu, small_run
from tests.unit.planning.test_layouts import recipe

H100 = load_hardware("h100")


def make_trace(
    moments: dict[str, dict[str, int]], stage: int = 0, per_layer: dict[str, int] | None = None
) -> RankTrace:
    """A trace with one moment in each phase, in GiB."""
    sizes = {phase: {kind: size * GIB for kind, size in amounts.items()} for phase, amounts in moments.items()}
    phases = {phase: sum(amounts.values()) for phase, amounts in sizes.items()}
    worst = max(phases, key=phases.__getitem__)
    report = DryReport(
        peak_bytes=phases[worst],
        phases=phases,
        end_bytes={"offload": GIB},
        holders=sizes[worst],
        moments={(phase, "linear", "aten::empty"): amounts for phase, amounts in sizes.items()},
        work=Counter(),
        passes=Counter(),
    )
    return RankTrace(stage, 0, 4, 1.0, report, per_layer or {})


def on_gpus(**parallel: int) -> Config:
    config = Config()
    config.cluster.gpus_per_node, config.cluster.gpu = 8, "h100"
    for name, value in parallel.items():
        setattr(config.policy.parallel, name, value)
    return config


STEP = {
    "first step": {"weights": 10, "optimizer": 20},
    "logprobs": {"weights": 10, "optimizer": 20, "linear": 3},
    "train": {"weights": 10, "gradients": 5, "optimizer": 20, "linear": 8, "attention": 2},
}


def memory(config: Config, moments: dict[str, dict[str, int]] = STEP, **trace_options: dict[str, int]) -> RankMemory:
    return build_rank_memory(config, make_trace(moments, **trace_options), H100)


def test_a_peak_is_the_fullest_phase_and_an_explicit_reserve() -> None:
    config = on_gpus()
    rank_memory = memory(config)
    nccl = estimate_nccl_bytes(config, 1, NCCL_SENDING)
    reserve = int(H100.reserve_gib * GIB) + int(H100.fragmentation * 45 * GIB) + nccl
    assert (rank_memory.phase, rank_memory.reserve, rank_memory.peak) == ("train", reserve, 45 * GIB + reserve)
    assert rank_memory.static == 35 * GIB
    assert rank_memory.parts["train"] == {
        "weights": 10 * GIB,
        "gradients": 5 * GIB,
        "optimizer": 20 * GIB,
        "other tensors": 10 * GIB,
    }


def test_a_sleeping_engine_takes_its_context_and_graphs_beside_the_policy() -> None:
    separate, colocated = on_gpus(), on_gpus()
    colocated.generation.placement = "colocated"
    nccl = estimate_nccl_bytes(separate, 1, NCCL_SENDING)
    engine = int((H100.reserve_gib + GRAPHS_GIB) * GIB)
    assert memory(colocated).reserve == memory(separate).reserve - nccl + engine
    colocated.generation.engine.enforce_eager = True
    assert memory(colocated).reserve == memory(separate).reserve - nccl + int(H100.reserve_gib * GIB)


def test_a_refit_to_engines_on_the_same_gpu_has_both_weights_and_nothing_of_the_optimizer() -> None:
    config = on_gpus()
    config.generation.placement = "colocated"
    everything = {"weights": 10, "gradients": 5, "optimizer": 20}
    trace = make_trace({**STEP, "onload": everything, "refit": {**everything, "other": 1}})
    trace.report.end_bytes["onload"] = 35 * GIB
    rank_memory = build_rank_memory(config, trace, H100, engine_weights=15 * GIB)
    assert rank_memory.phases["refit"] == (10 + 1 + 15) * GIB


def test_holders_say_what_a_layer_adds() -> None:
    holders = memory(on_gpus(), per_layer={"optimizer": 4 * GIB}).holders
    assert [holder.kind for holder in holders] == ["optimizer", "weights", "linear", "gradients", "attention"]
    assert holders[0].as_dict() == {"kind": "optimizer", "gib": 20.0, "layers": 4, "gib_per_layer": 4.0}
    assert memory(on_gpus()).holders[0].as_dict() == {"kind": "optimizer", "gib": 20.0}


def test_a_value_model_on_the_same_gpu_is_counted_in_the_reserve() -> None:
    config = on_gpus()
    config.generation.placement = "colocated"
    alone, beside = memory(config), build_rank_memory(config, make_trace(STEP), H100, beside=7 * GIB)
    assert beside.peak == alone.peak + 7 * GIB
    value = build_rank_memory(on_gpus(), make_trace(STEP), H100, model="value model")
    assert memory(on_gpus()).reserve - value.reserve == estimate_nccl_bytes(on_gpus(), 1, NCCL_SENDING)


def test_a_plain_training_step_counts_neither_log_probabilities_nor_the_refit() -> None:
    config = on_gpus()
    config.plan.workload, config.debug.rollouts_from = "pretrain", "none"
    rank_memory = memory(config, {**STEP, "logprobs": {"weights": 70}})
    assert rank_memory.phase == "train"
    assert rank_memory.reserve == int(H100.reserve_gib * GIB) + int(H100.fragmentation * 45 * GIB)


def test_the_fullest_rank_is_the_one_with_the_highest_peak() -> None:
    ranks = [build_rank_memory(on_gpus(), make_trace(moments), H100) for moments in (STEP, {"train": {"weights": 50}})]
    assert Plan(on_gpus(), DENSE, H100, ranks, None, None, [], 0.0).fullest is ranks[1]


@needs_no_gpu
@pytest.mark.parametrize(
    ("shape", "parallel", "precision", "optimizer"),
    [
        (DENSE, {"tensor": 2, "sequence": True, "data": 4}, "bfloat16", "adamw"),
        (DENSE, {"data": 2}, "float32", "adamw"),
        (EXPERTS, {"expert": 2, "data": 4}, "bfloat16", "adamw"),
        (DENSE, {"pipeline": 2}, "bfloat16", "adamw"),
        (DENSE, {"tensor": 2, "sequence": True}, "bfloat16", "muon"),
        (EXPERTS, {"expert": 2, "data": 2}, "bfloat16", "muon"),
    ],
)
def test_static_bytes_are_those_of_a_dry_run(
    shape: ModelShape, parallel: dict[str, int | bool], precision: str, optimizer: str
) -> None:
    config = small_run(**parallel)
    config.policy.precision = precision  # type: ignore[assignment]
    config.policy.optimizer.name = optimizer  # type: ignore[assignment]
    holders = run_dry(config, shape, 0, moves=False).holders
    counted = sum(holders.get(kind, 0) for kind in ("weights", "gradients", "optimizer"))
    assert count_static_bytes(config, shape) == pytest.approx(counted, rel=0.06)  # norms and padding are left out


def test_adapters_have_no_reference_of_their_own() -> None:
    config = small_run()
    config.policy.lora.rank = 8
    alone = count_static_bytes(config, DENSE)
    config.loss_fn.reference_policy_kl_penalty = 0.1
    assert count_static_bytes(config, DENSE) == alone


def test_activations_shrink_with_recomputation_context_and_tensor_parallel_ranks() -> None:
    config = small_run(data=4)
    plain = estimate_activation_bytes(config, DENSE)
    for changed in (small_run(context=2, data=2), small_run(tensor=2, sequence=True, data=2)):
        assert estimate_activation_bytes(changed, DENSE) < plain
    config.policy.activation_checkpointing = True
    assert estimate_activation_bytes(config, DENSE) < plain


def test_host_memory_is_what_is_kept_off_the_gpus() -> None:
    config = small_run(data=4)
    assert count_host_bytes(config, DENSE) == 0
    numbers = count_static_bytes(small_run(), DENSE) / 18
    config.policy.optimizer.cpu_offload = 1.0
    assert count_host_bytes(config, DENSE) == pytest.approx(16 * numbers)  # of all replicas together
    config.loss_fn.reference_policy_kl_penalty, config.reference.offload = 0.1, True
    assert count_host_bytes(config, DENSE) == pytest.approx((16 + 4 * 2) * numbers)
    config.generation.placement, config.generation.parallel.data = "colocated", 2
    assert count_host_bytes(config, DENSE) == pytest.approx((16 + 4 * 2 + 4 * 2 + 2 * 2) * numbers)


def test_host_memory_has_the_experts_of_replayed_tokens() -> None:
    config, shape = small_run(data=4), parse_model_shape({**QWEN3_MOE, "num_hidden_layers": 4})
    before = count_host_bytes(config, shape)
    config.policy.moe.replay_routing = True
    added = count_host_bytes(config, shape) - before
    assert added == count_replayed_bytes(config, shape) > 0
    tokens = find_lengths(config).totals.mean() * config.samples_per_step
    assert added == pytest.approx(4 * tokens * 3), "a byte a layer: rollouts, partitions, ranks"
    config.plan.workload = "pretrain"
    assert count_replayed_bytes(config, shape) == 0


def test_estimates_grow_with_recomputation_and_bubbles() -> None:
    config, gpu = recipe(), load_hardware("h100")
    config.policy.parallel.data, config.policy.parallel.pipeline = 2, 4
    plain = estimate_step_s(config, DENSE, gpu)
    config.policy.activation_checkpointing = True
    assert estimate_step_s(config, DENSE, gpu) > plain
    config.policy.activation_checkpointing = False
    config.policy.parallel.data, config.policy.parallel.pipeline = 8, 1
    assert estimate_step_s(config, DENSE, gpu) < plain


LAYOUTS = [
    GenerationParallelConfig(tensor=2, expert=2),
    GenerationParallelConfig(tensor=4),
    GenerationParallelConfig(tensor=2, pipeline=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["expert parallel", "more ranks than keys", "pipeline"])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss", "qwen3_moe"])
def test_an_engines_ranks_hold_every_number(family: str, layout: GenerationParallelConfig) -> None:
    shape = parse_model_shape(ENGINE_CONFIGS[family])
    covered = {name: np.zeros(size, bool) for name, size in measure_tensors(shape).items()}
    for boxes in assume_boxes(shape, layout):
        for box in boxes:
            covered[box.tensor][to_slices(box.layout.tensor)] = True
    assert [name for name, numbers in covered.items() if not numbers.all()] == []
