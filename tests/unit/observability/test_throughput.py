"""Floating-point operations against torch's count; figures of a step by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_grpo.models.families import read_model_shape
from megatron_grpo.observability.timing import compute_throughput, count_forward_flops, find_peak_tflops


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
    shape = read_model_shape(tmp_path)
    model, lengths = Qwen3ForCausalLM(config).eval(), [5, 17, 9]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        for length in lengths:
            model(torch.zeros(1, length, dtype=torch.int64))
    squares_beyond_pairs = sum(n * n - n * (n + 1) // 2 for n in lengths)
    expected = counter.get_total_flops() - 4 * 3 * 4 * 12 * squares_beyond_pairs
    assert count_forward_flops(shape, lengths) == expected


def test_throughput_does_not_depend_on_how_sequences_are_laid_out(tmp_path: Path) -> None:
    Qwen3Config(architectures=["Qwen3ForCausalLM"], hidden_size=64, vocab_size=100).save_pretrained(tmp_path)
    shape = read_model_shape(tmp_path)
    timing = {"train": 0.5, "total": 2.0}
    figures = compute_throughput(shape, [10, 30], timing, passes=1, devices=4, peak=2.0)
    assert (figures["samples_per_s"], figures["tokens_per_s"]) == (1.0, 20.0)
    tflops = 3 * (count_forward_flops(shape, [10]) + count_forward_flops(shape, [30])) / 1e12
    assert figures["train_tflops_per_device"] == pytest.approx(tflops / 0.5 / 4)
    assert figures["model_flop_utilization"] == pytest.approx(tflops / 0.5 / 4 / 2.0)
    twice = compute_throughput(shape, [30, 10], timing, passes=2, devices=4, peak=None)
    assert twice["train_tflops_per_device"] == pytest.approx(2 * figures["train_tflops_per_device"])
    assert "model_flop_utilization" not in twice


@pytest.mark.parametrize(
    ("device", "precision", "configured", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", None, 989.0),
        ("NVIDIA H100 PCIe", "bfloat16", None, 756.0),
        ("NVIDIA H100 NVL", "bfloat16", None, 835.0),
        ("NVIDIA H200 NVL", "bfloat16", None, 835.0),
        ("NVIDIA GB200", "bfloat16", None, 2500.0),
        ("NVIDIA B200", "bfloat16", None, 2250.0),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", None, 312.0),
        ("NVIDIA H100 80GB HBM3", "float32", None, None),
        ("cpu", "bfloat16", None, None),
        ("cpu", "float32", 0.2, 0.2),
    ],
)
def test_the_longest_name_that_fits_counts(
    device: str, precision: str, configured: float | None, expected: float | None
) -> None:
    assert find_peak_tflops(device, precision, configured) == expected
