"""Times of a step's phases, and its throughput."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from megatron_grpo.cluster.phases import THIS_PROCESS
from megatron_grpo.models.flops import count_forward_flops
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.observability.run_files import TOTAL


class StepTimer:
    """Times the phases of a step, which begins when the timer is made."""

    def __init__(self) -> None:
        self._phases: dict[str, float] = {}
        self._started = time.perf_counter()
        self._current: str | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the body's time to a phase, also when the body raises."""
        # Phases do not nest, so that they add up.
        assert self._current is None, f"phase {name} inside phase {self._current}"
        self._current = name
        token = THIS_PROCESS.enter(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - start
            self._current = None
            THIS_PROCESS.leave(token)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far, and "total" since the timer was made."""
        return {**self._phases, TOTAL: time.perf_counter() - self._started}


# Dense bfloat16 TFLOP/s by part of the device's name, from NVIDIA's data sheets; the first match counts.
PEAK_TFLOPS_BF16 = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "L40S": 362.0,
    "A100": 312.0,
}


def find_peak_tflops(device_name: str, precision: str, configured: float | None) -> float | None:
    """Find the configured or published peak of a device, TFLOP/s; None: unknown."""
    if configured is not None or precision != "bfloat16":
        return configured
    return next((peak for part, peak in PEAK_TFLOPS_BF16.items() if part in device_name), None)


def compute_throughput(
    shape: ModelShape,
    lengths: Sequence[int],
    timing: Mapping[str, float],
    *,
    passes: float,
    devices: int,
    peak: float | None,
) -> dict[str, float]:
    """Compute throughput and utilisation of a step.

    Args:
        lengths: tokens of each sequence that was trained on, prompt included.
        timing: seconds by phase, "train" among them if there were passes, and "total".
        passes: forward and backward passes over all the sequences; a fraction for a pass over part of them.
        devices: ranks of the policy.
        peak: peak of one device, TFLOP/s.
    """
    # FLOPs that the model needs, not those of the machine: padding and recomputed activations must not look like
    # utilisation. The backward pass of a matrix product is two products, so both passes cost three forward passes.
    tflops = 3 * passes * count_forward_flops(shape, lengths) / 1e12
    figures = compute_rates(lengths, timing)
    figures["train_tflops_per_device"] = tflops / timing["train"] / devices if passes else 0.0
    if peak is not None:
        figures["model_flop_utilization"] = figures["train_tflops_per_device"] / peak
    return figures


def compute_rates(lengths: Sequence[int], timing: Mapping[str, float]) -> dict[str, float]:
    """Compute samples and tokens per second of a step with sequences of these lengths."""
    return {"samples_per_s": len(lengths) / timing[TOTAL], "tokens_per_s": sum(lengths) / timing[TOTAL]}
