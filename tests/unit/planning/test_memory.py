"""Memory of a GPU: phases, reserve, holders."""

from __future__ import annotations

from collections import Counter

from megatron_grpo.config.schema import Config
from megatron_grpo.planning.device_memory import GIB, GRAPHS_GIB, RankMemory, build_rank_memory
from megatron_grpo.planning.dry_run import DryReport
from megatron_grpo.planning.trace import RankTrace
from megatron_grpo.planning.whole import Plan
from megatron_grpo.platform.hardware import load_hardware
from megatron_grpo.preflight.refit_memory import NCCL_SENDING, estimate_nccl_bytes
from tests.unit.planning.test_dry_run import DENSE

H100 = load_hardware("h100")


def traced(moments: dict[str, dict[str, int]], stage: int = 0, per_layer: dict[str, int] | None = None) -> RankTrace:
    """A trace with one moment in each phase, in GiB."""
    sizes = {phase: {kind: size * GIB for kind, size in one.items()} for phase, one in moments.items()}
    phases = {phase: sum(one.values()) for phase, one in sizes.items()}
    worst = max(phases, key=phases.__getitem__)
    report = DryReport(
        peak_bytes=phases[worst],
        phases=phases,
        end_bytes={"offload": GIB},
        holders=sizes[worst],
        moments={(phase, "linear", "aten::empty"): one for phase, one in sizes.items()},
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


def memory(config: Config, moments: dict[str, dict[str, int]] = STEP, **more: dict[str, int]) -> RankMemory:
    return build_rank_memory(config, traced(moments, **more), H100)


def test_a_peak_is_the_fullest_phase_and_an_explicit_reserve() -> None:
    config = on_gpus()
    found = memory(config)
    nccl = estimate_nccl_bytes(config, 1, NCCL_SENDING)
    reserve = int(H100.reserve_gib * GIB) + int(H100.fragmentation * 45 * GIB) + nccl
    assert (found.phase, found.reserve, found.peak) == ("train", reserve, 45 * GIB + reserve)
    assert found.static == 35 * GIB
    assert found.parts["train"] == {
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
    trace = traced({**STEP, "onload": everything, "refit": {**everything, "other": 1}})
    trace.report.end_bytes["onload"] = 35 * GIB
    found = build_rank_memory(config, trace, H100, engine_weights=15 * GIB)
    assert found.phases["refit"] == (10 + 1 + 15) * GIB


def test_holders_say_what_a_layer_adds() -> None:
    holders = memory(on_gpus(), per_layer={"optimizer": 4 * GIB}).holders
    assert [one.kind for one in holders] == ["optimizer", "weights", "linear", "gradients", "attention"]
    assert holders[0].as_dict() == {"kind": "optimizer", "gib": 20.0, "layers": 4, "gib_per_layer": 4.0}
    assert memory(on_gpus()).holders[0].as_dict() == {"kind": "optimizer", "gib": 20.0}


def test_a_value_model_on_the_same_gpu_is_counted_in_the_reserve() -> None:
    config = on_gpus()
    config.generation.placement = "colocated"
    alone, beside = memory(config), build_rank_memory(config, traced(STEP), H100, beside=7 * GIB)
    assert beside.peak == alone.peak + 7 * GIB
    value = build_rank_memory(on_gpus(), traced(STEP), H100, model="value model")
    assert memory(on_gpus()).reserve - value.reserve == estimate_nccl_bytes(on_gpus(), 1, NCCL_SENDING)


def test_a_plain_training_step_counts_neither_log_probabilities_nor_the_refit() -> None:
    config = on_gpus()
    config.plan.workload, config.debug.rollouts_from = "pretrain", "none"
    found = memory(config, {**STEP, "logprobs": {"weights": 70}})
    assert found.phase == "train"
    assert found.reserve == int(H100.reserve_gib * GIB) + int(H100.fragmentation * 45 * GIB)


def test_the_fullest_rank_is_the_one_with_the_highest_peak() -> None:
    ranks = [build_rank_memory(on_gpus(), traced(moments), H100) for moments in (STEP, {"train": {"weights": 50}})]
    assert Plan(on_gpus(), DENSE, H100, ranks, None, None, [], 0.0).fullest is ranks[1]
