"""Metrics of trajectories against numpy and by hand; a trajectory survives JSON; floating-point operations counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_grpo.config.model_shape import ModelShape
from megatron_grpo.observability.throughput import forward_flops, peak_tflops, throughput
from megatron_grpo.rollouts.metrics import length_metrics, outcome_metrics, reward_function_metrics
from megatron_grpo.rollouts.trajectory import Span, StopReason, Trajectory


def trajectory(tokens: int = 2, correct: bool = False, stop: StopReason = "stop", **parts: float) -> Trajectory:
    return Trajectory(
        prompt_idx=0,
        group=0,
        sample=0,
        token_ids=list(range(tokens + 1)),
        spans=[Span(1, tokens + 1, 0)],
        logprobs=[-1 / 3] * tokens,
        response="",
        stop_reason=stop,
        correct=correct,
        reward_parts=parts,
    )


def test_length_percentiles_and_endings() -> None:
    lengths = [3, 50, 7, 7, 12, 31, 4]
    metrics = length_metrics([trajectory(n, stop="length" if n > 30 else "stop") for n in lengths])
    for percentile in (50, 90, 99):
        expected = float(np.percentile(lengths, percentile))
        assert metrics[f"response_length_p{percentile}"] == pytest.approx(expected, rel=1e-6)
    assert metrics["natural_termination_rate"] == pytest.approx(5 / 7)


def test_outcomes_by_group() -> None:
    right = [[False, False], [True, False], [True, True], [False, True]]
    metrics = outcome_metrics([trajectory(correct=one) for group in right for one in group], samples_per_prompt=2)
    assert metrics == {"groups_all_wrong": 0.25, "groups_mixed": 0.5, "groups_all_right": 0.25}


def test_rewards_by_function_leave_out_what_a_function_did_not_score() -> None:
    metrics = reward_function_metrics([trajectory(a=1.0, b=2.0), trajectory(a=0.0), trajectory(a=0.5, b=4.0)])
    assert metrics == {
        "reward/a": 0.5,
        "reward_std/a": pytest.approx(float(np.std([1.0, 0.0, 0.5]))),
        "reward/b": 3.0,
        "reward_std/b": 1.0,
    }


def test_a_trajectory_survives_json() -> None:
    one = trajectory(3, correct=True, stop="length", a=1 / 3)
    assert Trajectory.from_row(json.loads(json.dumps(one.to_row()))) == one


@pytest.mark.parametrize("tied", [True, False])
def test_forward_flops_are_those_that_torch_counts(tied: bool, tmp_path: Path) -> None:
    """torch counts attention over whole squares; ours over the pairs that a causal model needs."""
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=61,
        tie_word_embeddings=tied,
        attn_implementation="eager",
    )
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    shape = ModelShape.from_folder(tmp_path)
    model, lengths = Qwen3ForCausalLM(config).eval(), [5, 17, 9]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for length in lengths:
            model(torch.zeros(1, length, dtype=torch.int64))
    squares_beyond_pairs = sum(n * n - n * (n + 1) // 2 for n in lengths)
    expected = counter.get_total_flops() - 4 * 3 * 4 * 12 * squares_beyond_pairs
    assert forward_flops(shape, lengths) == expected


def test_throughput_does_not_depend_on_how_sequences_are_laid_out(tmp_path: Path) -> None:
    Qwen3Config(architectures=["Qwen3ForCausalLM"], hidden_size=64, vocab_size=100).save_pretrained(tmp_path)
    shape = ModelShape.from_folder(tmp_path)
    timing = {"train": 0.5, "total": 2.0}
    figures = throughput(shape, [10, 30], timing, passes=1, devices=4, peak=2.0)
    assert (figures["samples_per_s"], figures["tokens_per_s"]) == (1.0, 20.0)
    tflops = 3 * (forward_flops(shape, [10]) + forward_flops(shape, [30])) / 1e12
    assert figures["train_tflops_per_device"] == pytest.approx(tflops / 0.5 / 4)
    assert figures["model_flop_utilization"] == pytest.approx(tflops / 0.5 / 4 / 2.0)
    twice = throughput(shape, [30, 10], timing, passes=2, devices=4, peak=None)
    assert twice["train_tflops_per_device"] == pytest.approx(2 * figures["train_tflops_per_device"])
    assert "model_flop_utilization" not in twice


@pytest.mark.parametrize(
    ("device", "precision", "configured", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", None, 989.0),
        ("NVIDIA H100 PCIe", "bfloat16", None, 756.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", None, 312.0),
        ("NVIDIA H100 80GB HBM3", "float32", None, None),
        ("cpu", "bfloat16", None, None),
        ("cpu", "float32", 0.2, 0.2),
    ],
)
def test_known_peaks(device: str, precision: str, configured: float | None, expected: float | None) -> None:
    assert peak_tflops(device, precision, configured) == expected
