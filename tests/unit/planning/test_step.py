"""The seconds of a step, from ranks with known work, and those that others have measured."""

import math
import re
import statistics
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_grpo.config.generation_schema import GenerationParallelConfig
from megatron_grpo.config.schema import Config, ParallelConfig
from megatron_grpo.models.families.reading import parse_model_shape, read_model_shape
from megatron_grpo.planning.dry_run import list_phases
from megatron_grpo.planning.generation_cost import Lengths, find_lengths, make_log_normal_lengths
from megatron_grpo.planning.step import StepTimes, _Model, _time_generation, build_step_times, find_overlap
from megatron_grpo.planning.trace import RankTrace
from megatron_grpo.platform.hardware import load_hardware
from megatron_grpo.preflight.load import compose_config
from tests.unit.planning.test_costs import H100, work

SHAPE = read_model_shape("tests/data/hf_configs/qwen3_0_6b")
SECOND = int(3.35e12)
"""Bytes that an ideal H100 moves in a second."""


def rank(stage: int, forward: float, backward: float, *, update: float = 0.0, gradients: int = 0) -> RankTrace:
    """A stage whose passes of two microbatches each take this many seconds, in training and other forward passes."""
    work_counts: Counter[Any] = Counter()
    phases = ("train", "logprobs", "reference", "teacher")
    for phase in phases:
        work_counts[work(phase=phase, nbytes=int(forward * SECOND))] += 2
    work_counts[work(is_backward=True, nbytes=int(backward * SECOND))] += 2
    work_counts[work(chunk=None, nbytes=int(update * SECOND))] += 1
    ring = {"kind": "collective", "name": "reduce_scatter_tensor_coalesced_", "ranks": (0, 1)}
    work_counts[work(chunk=None, nbytes=gradients, **ring)] += 1
    passes = Counter({(phase, 0): 2 for phase in phases})
    report: Any = SimpleNamespace(
        work=work_counts, passes=passes, end_bytes={"train": 300 * 10**9, "offload": 50 * 10**9}
    )
    return RankTrace(stage, stage, 1, 1.0, report, {})


def run_config(pipeline: int = 1, data: int = 1) -> Config:
    config = Config()
    config.policy.parallel = ParallelConfig(pipeline=pipeline, data=data)
    config.policy.max_total_sequence_length = config.policy.microbatch_tokens = 1000
    config.loss_fn.reference_policy_kl_penalty = 0.0
    config.grpo.num_prompts_per_step, config.grpo.num_generations_per_prompt = 4, 4
    config.generation.parallel = GenerationParallelConfig(data=2)
    return config


def full(samples: int) -> Lengths:
    return Lengths(0.0, np.full(samples, 1000.0), "full")


def test_a_training_step_is_its_microbatches_and_the_update() -> None:
    ranks = [rank(0, 1.0, 2.0, update=0.5)]
    times = build_step_times(run_config(data=2), SHAPE, ranks, H100, full(8), workload="pretrain")
    assert times.phase_s == pytest.approx({"train": 4 * 3.0, "optimizer": 0.5})
    assert times.step_s == pytest.approx(12.5)
    assert times.tokens_per_s_per_gpu == pytest.approx(8000 / 12.5 / 2)


def test_shorter_samples_take_fewer_microbatches_and_less_attention() -> None:
    half = Lengths(0.0, np.full(8, 500.0), "half")
    times = build_step_times(run_config(), SHAPE, [rank(0, 1.0, 2.0)], H100, half, workload="pretrain")
    assert times.phase_s["train"] == pytest.approx(4 * 3.0)  # two samples fill a microbatch


def test_optimizer_steps_of_a_batch_learn_from_equally_many_tokens() -> None:
    config = run_config()
    config.plan.expert_skew = 1.0
    lengths = Lengths(0.0, np.repeat([100.0, 900.0], 8), "short ones first")
    seconds = {}
    for samples in (None, 4):  # one optimizer step, or four
        config.policy.train_global_batch_samples = samples
        seconds[samples] = build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], H100, lengths).phase_s["train"]
    assert seconds[4] == pytest.approx(seconds[None], rel=0.02)


def test_samples_of_different_lengths_are_slower() -> None:
    config, seconds = run_config(), []
    for unequal in (1.0, 0.5):
        gpu = replace(H100, efficiency=replace(H100.efficiency, unequal=unequal))
        mixed = Lengths(0.0, np.array([500.0, 501.0] * 8), "mixed")
        seconds.append(build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], gpu, mixed).phase_s["train"])
        alike = build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], gpu, full(8), workload="pretrain")
        assert alike.phase_s["train"] == pytest.approx(8 * 3.0)
    assert seconds[1] == pytest.approx(2 * seconds[0])


def test_padding_to_the_longest_sample_is_computed_too() -> None:
    config, gpu = run_config(data=2), replace(H100, efficiency=replace(H100.efficiency, unequal=1.0))
    config.policy.microbatch_tokens, config.policy.packing = 2500, False
    lengths = Lengths(0.0, np.array([800.0, 200.0, 500.0, 500.0] * 4), "mixed")
    # Three samples of 800 tokens are a microbatch of 2,400 of 2,500; eight of each replica take three microbatches, of
    # 8 x 800 padded tokens together. The traced microbatch has 2 x 1,000 tokens and takes 1 + 2 seconds.
    times = build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], gpu, lengths)
    assert times.phase_s["train"] == pytest.approx(3.0 * 8 * 800 / 2000)
    assert [times.train.seconds] == [times.phase_s["train"]]


def test_teachers_compute_one_after_the_other_what_their_tasks_have_sampled() -> None:
    teachers = [(run_config(), [rank(0, 1.0, 0.0)]), (run_config(data=2), [rank(0, 3.0, 0.0)])]
    for chosen, seconds in ((teachers[:1], 16 * 1.0), (teachers, 8 * 1.0 + 4 * 3.0), ([], None)):
        times = build_step_times(run_config(), SHAPE, [rank(0, 1.0, 2.0)], H100, full(16), teachers=chosen)
        assert times.phase_s.get("teachers") == (None if seconds is None else pytest.approx(seconds))


def test_a_pipeline_waits_for_its_slowest_stage() -> None:
    ranks = [rank(0, 1.0, 2.0), rank(2, 2.0, 4.0)]  # stages 0 and 1 are alike
    times = build_step_times(run_config(pipeline=3), SHAPE, ranks, H100, full(10), workload="pretrain")
    assert times.train.busy == pytest.approx((30.0, 30.0, 60.0))
    assert times.phase_s["train"] == pytest.approx(60.0 + 2 * 3.0)


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [
        ((), 0),
        (("+variant=high_entropy",), 1),
        (("+variant=otb",), 2),
        (("+variant=otb", "loss_fn.corrections=[high-entropy]", "policy.train_global_batch_samples=128"), 4),
        (("+variant=clip_cov",), 1),
    ],
)
def test_passes_before_learning_are_counted(overrides: tuple[str, ...], passes: int) -> None:
    """high_entropy needs entropies, otb two passes more, and several optimizer steps log-probabilities."""
    config = compose_config(["+exp=quickstart", "loss_fn.reference_policy_kl_penalty=0.0", *overrides])
    small = run_config()
    config.policy.parallel, config.generation.parallel = small.policy.parallel, small.generation.parallel
    config.policy.max_total_sequence_length = config.policy.microbatch_tokens = 1000
    assert ("logprobs" in list_phases(config)) == (passes > 0)
    lengths = Lengths(100.0, np.full(8, 900.0), "full")
    phase_s = build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], H100, lengths).phase_s
    assert phase_s.get("logprobs", 0.0) == pytest.approx(passes * 8 * 1.0)


def test_demonstrations_are_learnt_beside_samples() -> None:
    config = compose_config(["+exp=quickstart_chord", "chord.rows_per_step=4"])
    small = run_config()
    config.policy.parallel, config.generation.parallel = small.policy.parallel, small.generation.parallel
    config.policy.max_total_sequence_length = config.policy.microbatch_tokens = 1000
    lengths = Lengths(100.0, np.full(8, 900.0), "full")
    times = build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], H100, lengths)
    assert times.phase_s["train"] == pytest.approx((8 + 4) * 3.0)
    assert times.tokens == 8 * 1000, "throughput counts samples"
    assert "4 demonstrations a step, as long as the samples" in times.assumptions


def test_gradients_are_reduced_behind_the_last_backward_pass() -> None:
    nbytes = 1800 * 10**9  # two seconds of NVLink, half of which each of two ranks sends
    config, ranks = run_config(), [rank(0, 1.0, 1.5, gradients=nbytes)]
    step = {}
    for overlapped in (True, False):
        config.policy.overlap_grad_reduce = overlapped
        step[overlapped] = build_step_times(config, SHAPE, ranks, H100, full(1), workload="pretrain").step_s
    assert step == pytest.approx({False: 2.5 + 2.0, True: 2.5 + 0.5})


def test_the_phases_of_a_synchronous_step_follow_each_other() -> None:
    config = run_config()
    config.loss_fn.reference_policy_kl_penalty = 0.1
    config.policy.train_global_batch_samples = 8  # two optimizer steps, which need log-probabilities before them
    ranks = [rank(0, 1.0, 2.0, update=0.25)]
    times = build_step_times(
        config, SHAPE, ranks, load_hardware("h100"), make_log_normal_lengths(300.0, 0.5, 16, 900, 100.0)
    )
    assert list(times.phase_s) == ["generation", "logprobs", "reference", "train", "optimizer", "refit"]
    assert all(seconds > 0 for seconds in times.phase_s.values())
    assert times.step_s == times.synchronous_s == pytest.approx(sum(times.phase_s.values()))
    assert times.asynchronous_s is None
    assert times.gpus == 1 + 2
    assert times.refit_bytes == pytest.approx(2 * 2 * 0.6e9, rel=0.05)  # bfloat16, to each of two engines
    assert times.tokens == pytest.approx(16 * 400, rel=0.05)


def test_a_step_that_samples_ahead_takes_as_long_as_the_slower_side() -> None:
    config = run_config()
    config.grpo.async_grpo.enabled = True
    lengths = make_log_normal_lengths(300.0, 0.5, 16, 900, 100.0)
    slow = build_step_times(config, SHAPE, [rank(0, 10.0, 20.0)], H100, lengths)
    learning = slow.synchronous_s - slow.phase_s["generation"]
    assert slow.step_s == slow.asynchronous_s == pytest.approx(learning)
    fast = build_step_times(config, SHAPE, [rank(0, 1e-6, 1e-6)], H100, lengths)
    assert fast.asynchronous_s is not None
    assert fast.phase_s["generation"] / 2 <= fast.asynchronous_s <= fast.phase_s["generation"] + fast.refit_s


def test_shared_gpus_move_the_policy_to_the_host_and_back() -> None:
    config = run_config(data=2)
    config.generation.placement = "colocated"
    times = build_step_times(
        config, SHAPE, [rank(0, 1.0, 2.0)], H100, make_log_normal_lengths(300.0, 0.5, 16, 900, 100.0)
    )
    moved = 250e9  # of the policy; the engines' weights come with the refit
    assert times.phase_s["offload"] == times.phase_s["onload"] == pytest.approx(moved / 50e9, rel=1e-3)
    assert times.gpus == 2


def test_engines_in_turn_that_sample_ahead_do_not_wait_for_the_longest_response() -> None:
    config = run_config(data=2)
    config.generation.placement = "colocated"
    config.grpo.async_grpo.enabled = True
    lengths = make_log_normal_lengths(300.0, 1.0, 64, 4000, 100.0)
    times = build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], H100, lengths)
    assert times.asynchronous_s is not None
    assert not times.samples_beside
    others_s = times.synchronous_s - times.phase_s["generation"]
    assert others_s < times.step_s < times.synchronous_s, "the phases follow each other, and the tail is shorter"
    # Every response in flight loses the cache of its prompt and of what it has so far: of all tokens of the batches
    # that engines work on together, less than half, because a part is not begun and a part is complete.
    (text,) = [text for text in times.assumptions if "in flight again" in text]
    tokens = float(re.findall(r"computes ([\d,]+) tokens", text)[0].replace(",", ""))
    assert 0 < tokens < lengths.totals.sum() / 2
    config.grpo.async_grpo.max_trajectory_age_steps = 0
    alone = build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], H100, lengths)
    assert alone.step_s == alone.synchronous_s


def test_an_engine_without_room_is_named() -> None:
    small = replace(H100, memory_gib=1.0)
    with pytest.raises(
        ValueError, match=r"generation\.parallel\.tensor=1 has no room for a sequence: weights 1\.1 GiB"
    ):
        build_step_times(
            run_config(), SHAPE, [rank(0, 1.0, 2.0)], small, make_log_normal_lengths(300.0, 0.5, 16, 900, 100.0)
        )


def test_overlaps_are_those_of_the_configuration() -> None:
    config = Config()
    assert (find_overlap(config).gradients, find_overlap(config).tensor) == (True, False)
    config.policy.overlap_grad_reduce = False
    config.policy.megatron = {"tp_comm_overlap": True}
    overlap = find_overlap(config)
    assert (overlap.gradients, overlap.parameters, overlap.tensor) == (False, False, True)


def test_a_step_has_only_the_phases_of_the_run() -> None:
    config, lengths = run_config(), make_log_normal_lengths(300.0, 0.5, 16, 900, 100.0)
    assert list(build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], H100, lengths).phase_s) == [
        *("generation", "train", "optimizer", "refit")
    ]
    config.generation.server.urls = ["http://server:8000"]
    times = build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], H100, lengths)
    assert list(times.phase_s) == ["train", "optimizer", "refit"]
    assert times.gpus == 1
    config.generation.server.urls, config.debug.rollouts_from = [], "run"
    times = build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], H100, lengths)
    assert list(times.phase_s) == ["train", "optimizer"]


def test_the_value_model_learns_before_the_policy() -> None:
    config, lengths = run_config(), make_log_normal_lengths(300.0, 0.5, 16, 900, 100.0)
    config = replace(config, algorithm="ppo")
    assert config.ppo is not None
    config.ppo.num_prompts_per_step, config.ppo.num_generations_per_prompt = 4, 4
    value = rank(0, 0.5, 1.0)
    moved = Counter({replace_phase(entry): number for entry, number in value.report.work.items()})
    value.report.work.update(moved)
    value.report.passes["values", 0] = 2
    times = build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], H100, lengths, value_ranks=[value])
    assert list(times.phase_s)[-5:] == ["values", "train_value", "train", "optimizer", "refit"]
    assert times.phase_s["train_value"] == pytest.approx(times.phase_s["train"] / 2, rel=0.01)
    assert times.gpus == 1 + 1 + 2


def replace_phase(entry: Any) -> Any:
    """The work of log-probabilities as that of values."""
    return entry._replace(phase="values") if entry.phase == "logprobs" else entry._replace(phase="none")


def test_engines_that_share_samples_unevenly_wait_for_the_fullest() -> None:
    config, lengths = run_config(), full(16)
    seconds = {}
    for engines in (5, 6, 8):
        config.generation.parallel = GenerationParallelConfig(data=engines)
        step_times = build_step_times(config, SHAPE, [rank(0, 1.0, 2.0)], H100, lengths)
        seconds[engines] = step_times.phase_s["generation"]
    assert seconds[5] > seconds[6] > seconds[8]  # 4, 3 and 2 responses on the fullest engine


@pytest.mark.parametrize(
    ("lengths", "most_at_once", "text"),
    [
        (np.array([8000.0] + [100.0] * 15), 64, "the longest response, of 8000 tokens, takes "),
        (
            np.full(160, 100.0),
            2,
            "responses wait for generation.engine.max_num_seqs; the longest response, of 100 tokens",
        ),
    ],
)
def test_what_generation_and_the_step_wait_for_is_said(lengths: np.ndarray, most_at_once: int, text: str) -> None:
    config = run_config()
    config.generation.engine.max_num_seqs = most_at_once
    config.grpo.async_grpo.enabled = True
    lengths_ = Lengths(10.0, lengths, "made up")
    times = build_step_times(config, SHAPE, [rank(0, 1e-9, 2e-9)], H100, lengths_)
    step, *parts = times.limits
    assert step.startswith(("the step waits for engines", "the step waits for a batch's responses"))
    assert any(part.startswith("generation: ") and text in part for part in parts)
    # These passes have no attention.
    assert "train: attention takes 0% of the passes" in parts


BENCHMARKS = Path("benchmarks").resolve()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    import plan_rl_rows

    return plan_rl_rows


def test_published_seconds_of_generation(rows: Any) -> None:
    file, errors = yaml.safe_load((BENCHMARKS / "plan_rows.yaml").read_text()), []
    for row in file["rl_rows"]:
        if seconds := row["published"].get("generation"):
            config, shape = rows.build_config(row), rows.shape_of(row["model"], file["models"])
            hardware = load_hardware(row["gpu"])
            model = _Model(config, [], hardware, find_overlap(config))
            planned = _time_generation(config, shape, hardware, find_lengths(config), model).alone_s
            errors.append(abs(planned / seconds - 1))
    assert len(errors) >= 5
    assert statistics.median(errors) <= 0.1
    assert max(errors) <= 0.35


def _find_row(rows: Any, name: str) -> tuple[dict[str, Any], Any, Any]:
    """A row, its configuration and its model."""
    file = yaml.safe_load((BENCHMARKS / "plan_rows.yaml").read_text())
    (row,) = [row for row in file["rl_rows"] if row["id"] == name]
    return row, rows.build_config(row), rows.shape_of(row["model"], file["models"])


def test_a_refit_that_gathers_every_weight_takes_what_links_and_ports_need(rows: Any) -> None:
    from moves_of_nemo_rl import count_bytes, time_gathered_refit

    _, config, shape = _find_row(rows, "nemo06_dsv3_h100")
    experts, other_bytes = count_bytes(shape)
    assert experts == 2 * 58 * 256 * 3 * 7168 * 2048  # of DeepSeek-V3's 671 billion parameters
    assert experts + other_bytes == pytest.approx(2 * 671.03e9, rel=1e-3)
    # 16 stages exchange a 16th of the experts, and all of the rest, over a port of 50 GB/s; then 16 ranks on two nodes
    # gather the experts over eight ports together, which are slower than NVLink at 450 GB/s.
    port, ports = 50e9 * 0.75, min(8 * 50e9 * 0.75, 450e9 * 0.7)
    seconds = 15 / 16 * (experts / 16 + other_bytes) / port + 15 / 16 * experts / ports
    assert time_gathered_refit(config, shape, load_hardware("h100")) == pytest.approx(seconds, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "published"),
    # NeMo RL, pull request 1379: refits of engines on other GPUs. Qwen3-235B has no such row here, so its layout is the
    # one of its row with shared GPUs.
    [("nemo07_dsv3_h100_async", 14.0), ("nemo07_qwen235b_h100", 5.5)],
)
def test_published_seconds_of_refits_that_gather_every_weight(rows: Any, name: str, published: float) -> None:
    from moves_of_nemo_rl import time_gathered_refit

    _, config, shape = _find_row(rows, name)
    config.generation.placement = "separate"
    seconds = time_gathered_refit(config, shape, load_hardware("h100"))
    assert 0.3 * published <= seconds <= published  # links alone; not the host's work for every tensor


def test_the_optimizers_state_goes_to_pageable_memory(rows: Any) -> None:
    from moves_of_nemo_rl import slow_moves

    _, config, shape = _find_row(rows, "nemo03_llama8b")
    hardware = load_hardware("h100")
    phases = {"train": 1.0, "offload": 10.0, "onload": 10.0}
    times = StepTimes(phases, 21.0, None, 1.0, 8, 0.0, 0, [], None)  # type: ignore[arg-type]
    state, engine = 12 * 8.03e9 / 8, 2 * 8.03e9  # engines there keep their weights on the host, with one rank each
    slow = slow_moves(times, config, shape, hardware).phase_s
    assert slow["offload"] == pytest.approx(10 + state / 1.8e9 - (state - engine) / 50e9, rel=1e-3)
    assert slow["onload"] == pytest.approx(10 + state / 16.1e9 - (state - engine) / 50e9, rel=1e-3)
    config.generation.placement = "separate"
    assert slow_moves(times, config, shape, hardware) is times


def test_two_published_means_of_a_model_tell_how_far_its_lengths_spread(rows: Any) -> None:
    short, long = (_find_row(rows, f"nemo07_qwen30b_{name}")[0] for name in ("h100", "40k"))
    sigma, normal = short["sigma"], NormalDist()
    assert sigma == long["sigma"]

    def find_mean(median: float, cut: float) -> float:  # E[min(L, c)] of a log-normal L in closed form
        quantile = math.log(cut / median) / sigma
        mean = median * math.exp(sigma**2 / 2)
        return mean * normal.cdf(quantile - sigma) + cut * (1 - normal.cdf(quantile))

    low, high = 100.0, 100_000.0
    for _ in range(60):
        median = math.sqrt(low * high)
        is_low = find_mean(median, short["longest"] - short["prompt"]) < short["response"]
        low, high = (median, high) if is_low else (low, median)
    assert find_mean(low, long["longest"] - long["prompt"]) == pytest.approx(long["response"], rel=1e-3)


def test_at_most_a_quarter_of_the_rows_has_a_fitted_constant() -> None:
    all_rows = yaml.safe_load((BENCHMARKS / "plan_rows.yaml").read_text())["rl_rows"]
    assert sum(row.get("fitted", False) for row in all_rows) <= len(all_rows) / 4


@pytest.mark.slow  # dry runs of about 40 layers
def test_published_seconds_of_steps(rows: Any) -> None:
    results = rows.evaluate_all()
    summary = rows.summarize(results)
    assert summary["step_all"]["rows"] == len(results)
    assert summary["step_all"]["median"] <= 0.25
    assert summary["step_held_out"]["median"] <= 0.25


def test_layers_of_each_kind_make_up_the_model(rows: Any) -> None:
    models = yaml.safe_load((BENCHMARKS / "plan_rows.yaml").read_text())["models"]
    shape = parse_model_shape(models["nemotron_3_super"])
    runs = rows.choose_runs(shape)
    assert sorted(map(len, runs.values())) == [3, 4, 4, 4]  # Mamba, attention and experts, and one more of each
    for kind, layers in runs.items():
        picked = rows.pick_layers(shape, layers)
        assert [picked.list_kinds(layer) for layer in range(picked.layers)] == [shape.list_kinds(n) for n in layers]
        assert kind is None or sum(shape.list_kinds(layer) == kind for layer in layers) == 2
