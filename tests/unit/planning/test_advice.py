"""Advice for runs that do not fit, on a planner whose memory is arithmetic: it fits, and no smaller change does."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from megatron_grpo.config.errors import ConfigError, Problem
from megatron_grpo.config.schema import Config
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.planning import advice as advice_module
from megatron_grpo.planning.advice import with_advice
from megatron_grpo.planning.changes import (
    apply_changes,
    find_engine_changes,
    iterate_layout_changes,
    iterate_single_changes,
)
from megatron_grpo.planning.device_memory import GIB, Holder, RankMemory
from megatron_grpo.planning.estimates import count_static_bytes, estimate_activation_bytes
from megatron_grpo.planning.generation_cost import size_engine
from megatron_grpo.planning.policy_layouts import count_idle_gpus
from megatron_grpo.planning.whole import Advice, Plan
from megatron_grpo.platform.hardware import Hardware, load_hardware
from megatron_grpo.preflight.config_checks import find_problems

DENSE = read_model_shape("tests/data/hf_configs/qwen3_8b")
EXPERTS = read_model_shape("tests/data/hf_configs/qwen3_30b_a3b")
H100 = load_hardware("h100")


def make_plan(config: Config, shape: ModelShape, gpu: Hardware = H100) -> Plan:
    """A plan whose memory is that of the estimates; the log-probabilities' batches add to it."""
    static = count_static_bytes(config, shape)
    tokens = config.policy.logprob_microbatch_tokens or config.policy.microbatch_tokens
    other_bytes = int(estimate_activation_bytes(config, shape)) + 4000 * tokens
    holders = [Holder("weights", static, 1, None), Holder("linear", other_bytes, 1, None)]
    rank = RankMemory(0, 0, 1, 1.0, {"train": static + other_bytes}, {}, 3 * GIB, holders, 2 * GIB)
    return Plan(config, shape, gpu, [rank], size_engine(config, shape, gpu), None, [], 0.0)


def test_a_teacher_that_does_not_fit_is_split_and_nothing_is_searched() -> None:
    plan = make_plan(Config(), DENSE)
    large = RankMemory(0, 0, 1, 1.0, {"teacher": 90 * GIB}, {}, 3 * GIB, [], 0, model="teacher")
    (problem,) = with_advice(replace(plan, teacher_ranks=[large], ranks=[]), None).problems  # type: ignore[arg-type]
    assert problem.startswith(
        "rank 0 of the teacher (pipeline stage 0) takes 93.0 of 79.1 GiB in teacher; split it over"
    )


@dataclass
class Pending:
    plan: Plan

    def wait(self, deadline: float) -> Plan:
        return self.plan


@pytest.fixture(autouse=True)
def planner(monkeypatch: pytest.MonkeyPatch) -> dict[str, Hardware]:
    """Plans by `planned`, on the GPU of the entry "gpu"."""
    chosen = {"gpu": H100}

    def submit(config: Config, shape: ModelShape, pool: Any, *, brief: bool = False) -> Pending:
        return Pending(make_plan(config, shape, chosen["gpu"]))

    monkeypatch.setattr(advice_module, "submit_plan", submit)
    return chosen


def run(nodes: int = 1, **policy: Any) -> Config:
    config = Config()
    config.policy.model.path = "model"
    config.data.train_path = "rows.jsonl"
    config.cluster.num_nodes, config.cluster.gpus_per_node, config.cluster.gpu = nodes, 8, "h100"
    config.cluster.ray_address = "10.0.0.1:6379"
    config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt = 32, 8
    config.loss_fn.reference_policy_kl_penalty = 0.0
    config.policy.parallel.tensor, config.policy.parallel.sequence = 4, True
    config.generation.parallel.data = 4
    for name, value in policy.items():
        setattr(config.policy, name, value)
    return config


def lengthen_batches(config: Config) -> None:
    config.policy.microbatch_tokens = 262144


def keep_reference(config: Config) -> None:
    config.loss_fn.reference_policy_kl_penalty = 0.1
    config.policy.parallel.tensor, config.policy.parallel.sequence, config.policy.parallel.data = 2, True, 2


def keep_whole_optimizer(config: Config) -> None:
    config.policy.parallel.tensor, config.policy.parallel.sequence, config.policy.parallel.data = 2, True, 2
    config.policy.optimizer.distributed = False


def tighten_engine(config: Config) -> None:
    config.generation.engine.gpu_memory_utilization = 0.15


def lengthen_logprobs(config: Config) -> None:
    config.policy.logprob_microbatch_tokens = 16_000_000


@pytest.mark.parametrize(
    ("change", "memory_gib"),
    [
        (lengthen_batches, 79.1),
        (keep_reference, 60.0),
        (keep_whole_optimizer, 79.1),
        (tighten_engine, 79.1),
        (lengthen_logprobs, 79.1),
        (lengthen_batches, 50.0),
        (keep_reference, 40.0),
    ],
)
def test_advice_fits_and_no_single_key_does_where_it_has_several(
    change: Callable[[Config], None], memory_gib: float, planner: dict[str, Hardware]
) -> None:
    config, gpu = run(), replace(H100, memory_gib=memory_gib)
    planner["gpu"] = gpu
    change(config)
    assert not find_problems(config, DENSE)
    plan = make_plan(config, DENSE, gpu)
    assert plan.shortages
    advice = with_advice(plan, None).advice  # type: ignore[arg-type]
    assert advice.overrides, advice.text
    assert not apply_advice(config, advice, gpu).shortages
    if len(advice.overrides) > 1:
        singles = [
            changes
            for changes in (*iterate_single_changes(plan), *iterate_layout_changes(plan, "policy", DENSE))
            if len(changes) == 1
        ]
        engine_changes = find_engine_changes(plan) or {}
        assert all(
            make_plan(apply_changes(config, changes | engine_changes), DENSE, gpu).shortages for changes in singles
        )


@pytest.mark.parametrize("refused", ["at once", "in full"])
def test_changes_that_cannot_be_planned_are_left_out(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run()
    lengthen_batches(config)
    plan = make_plan(config, DENSE)
    assert plan.shortages
    first = with_advice(plan, None).advice  # type: ignore[arg-type]
    assert first.overrides == ("policy.microbatch_tokens=2048",)

    def submit(config: Config, shape: ModelShape, pool: Any, *, brief: bool = False) -> Pending:
        is_first = config.policy.microbatch_tokens == 2048
        if is_first and not (brief and refused == "in full"):
            raise ConfigError([Problem("value.model.path=critic", "is not on this machine")])
        return Pending(make_plan(config, shape))

    monkeypatch.setattr(advice_module, "submit_plan", submit)
    advice = with_advice(plan, None).advice  # type: ignore[arg-type]
    assert advice.overrides
    assert advice.overrides != first.overrides
    assert not apply_advice(config, advice, H100).shortages


def apply_advice(config: Config, advice: Advice, gpu: Hardware, shape: ModelShape = DENSE) -> Plan:
    """The plan of a configuration with the overrides of advice."""
    values = {"true": True, "false": False, "null": None, "[]": []}

    def value(text: str) -> Any:
        return values[text] if text in values else float(text) if "." in text else int(text)

    changes = {}
    for override in advice.overrides:
        key, _, text = override.partition("=")
        changes[key] = text if key == "generation.placement" or "kernel" in key else value(text)
    changed_config = apply_changes(config, changes)
    assert not find_problems(changed_config, shape)
    assert count_idle_gpus(changed_config) >= 0
    return make_plan(changed_config, shape, gpu)


def test_of_single_keys_that_fit_the_one_that_frees_most_is_advised() -> None:
    config = run()
    keep_reference(config)
    plan = make_plan(config, DENSE, replace(H100, memory_gib=72.0))
    advice = with_advice(plan, None).advice  # type: ignore[arg-type]
    freed = {}
    for changes in (*iterate_single_changes(plan), *iterate_layout_changes(plan, "policy", DENSE)):
        changed_config = apply_changes(config, changes)
        if len(changes) == 1 and not find_problems(changed_config, DENSE):
            freed[next(iter(changes))] = make_plan(changed_config, DENSE).fullest.peak
    assert advice.overrides[0].startswith(min(freed, key=freed.__getitem__))


@pytest.mark.slow
def test_a_model_that_no_layout_holds_is_called_that_and_the_nodes_are_named(planner: dict[str, Hardware]) -> None:
    config, gpu = run(), replace(H100, memory_gib=9.0)
    config.generation.engine.gpu_memory_utilization = 0.6  # a refit takes 2.9 GB beside it
    planner["gpu"] = gpu
    plan = make_plan(config, EXPERTS, gpu)
    advice = with_advice(plan, None).advice  # type: ignore[arg-type]
    assert "nothing makes it fit on 1 x 8 h100: in every layout weights, gradients and optimizer state" in advice.text
    assert "cluster.num_nodes=" in " ".join(advice.overrides)
    assert not apply_advice(config, advice, gpu, EXPERTS).shortages


def test_too_little_memory_for_libraries_is_said() -> None:
    plan = make_plan(run(), DENSE, replace(H100, memory_gib=2.0))
    advice = with_advice(plan, None).advice  # type: ignore[arg-type]
    assert not advice.overrides
    assert "nothing makes it fit: CUDA and its libraries alone take 2.5 GiB of a GPU" in advice.text


def test_a_host_without_room_takes_less_of_the_optimizer() -> None:
    config = run(data=1)
    config.policy.optimizer.cpu_offload = 1.0
    config.plan.host_memory_gib = 150.0
    plan = make_plan(config, DENSE)
    assert "a node's host keeps" in plan.problems[0]
    advice = with_advice(plan, None).advice  # type: ignore[arg-type]
    assert advice.overrides[0].startswith("policy.optimizer.cpu_offload=")
    assert not apply_advice(config, advice, H100).shortages


def test_a_run_that_fits_needs_no_advice() -> None:
    plan = make_plan(run(), DENSE)
    assert with_advice(plan, None) is plan  # type: ignore[arg-type]
