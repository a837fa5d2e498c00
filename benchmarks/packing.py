"""Packs long-tailed batches for several replicas, beside first-fit decreasing and plain padding; prints JSON.

    python benchmarks/packing.py [--sequences 10000] [--replicas 8] [--microbatch-tokens 16384] [--multiple 8]

`padding_fraction` is the share of computed tokens that are padding; `imbalance` how much longer than the average the
replica computes that has most to do, by the floating-point operations of an 8B model (attention is quadratic);
`microbatch_imbalance` the same where every microbatch waits for all replicas (expert parallelism over them).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from header import header
from numpy.typing import NDArray

from megatron_grpo.batch.packing import Cost, SequencePacker, SequencePadder

LAYERS, HIDDEN, FFN, QUERIES, KEYS_VALUES, VOCAB = 36, 4096, 12288, 4096, 2048, 151_936
COST = Cost(
    per_token=2.0 * (LAYERS * HIDDEN * (2 * QUERIES + KEYS_VALUES + 3 * FFN) + HIDDEN * VOCAB),
    per_pair=4.0 * LAYERS * QUERIES,
)
"""Of Qwen3-8B."""

Lengths = NDArray[np.int64]
Plan = list[list[list[int]]]
"""For each replica its microbatches, as indices into all lengths."""


def lengths_of(spread: str, sequences: int, longest: int) -> Lengths:
    """Made-up lengths of responses with their prompts."""
    draw = np.random.default_rng(0)
    if spread == "lognormal":
        return np.clip(draw.lognormal(7.0, 0.9, sequences), 32, longest).astype(np.int64)
    short = draw.integers(200, 1000, sequences * 4 // 5)
    return np.concatenate([short, draw.integers(longest // 2, longest, sequences - len(short))])


def packed(lengths: Lengths, options: argparse.Namespace) -> Plan:
    """As the project does."""
    bins = SequencePacker(options.microbatch_tokens, options.multiple, COST)
    shares = [np.array(share) for share in bins.assign_to_replicas(lengths, options.replicas)]
    plans = bins.make_microbatches([lengths[share] for share in shares])
    return [[share[one].tolist() for one in plan] for share, plan in zip(shares, plans, strict=True)]


def rectangles(lengths: Lengths, options: argparse.Namespace) -> Plan:
    """As the project does with policy.packing=false: sequences of like length together, padded to the longest."""
    planner = SequencePadder(options.microbatch_tokens, options.multiple)
    shares = [np.array(share) for share in planner.assign_to_replicas(lengths, options.replicas)]
    plans = planner.make_microbatches([lengths[share] for share in shares])
    return [[share[one].tolist() for one in plan] for share, plan in zip(shares, plans, strict=True)]


def first_fit_decreasing(lengths: Lengths, options: argparse.Namespace) -> Plan:
    """The longest first, each into the first bin with room; bins dealt out in turn."""
    bins: list[list[int]] = []
    room = np.empty(len(lengths), dtype=np.int64)
    widths = -(-lengths // options.multiple) * options.multiple
    for index in np.argsort(-lengths, kind="stable"):
        fits = np.flatnonzero(room[: len(bins)] >= widths[index])
        if len(fits):
            bins[fits[0]].append(int(index))
            room[fits[0]] -= widths[index]
        else:
            room[len(bins)] = options.microbatch_tokens - widths[index]
            bins.append([int(index)])
    return [bins[replica :: options.replicas] for replica in range(options.replicas)]


def plain_padding(lengths: Lengths, options: argparse.Namespace) -> Plan:
    """As they come, equally many to each replica; as many to a microbatch as fit if all are as long as the longest."""
    each = max(1, options.microbatch_tokens // int(lengths.max()))
    shares = np.array_split(np.random.default_rng(1).permutation(len(lengths)), options.replicas)
    return [[share[start : start + each].tolist() for start in range(0, len(share), each)] for share in shares]


def measure(plan_of: Callable[..., Plan], lengths: Lengths, options: argparse.Namespace, pad: str) -> dict[str, Any]:
    """One way of planning; `pad` is what sequences are padded to: "multiple", "longest" of the microbatch, or "all"."""
    began = time.perf_counter()
    plan = plan_of(lengths, options)
    seconds = time.perf_counter() - began

    def width(microbatch: list[int]) -> Lengths:
        own = lengths[microbatch]
        goal = {"multiple": own, "longest": np.full_like(own, own.max()), "all": np.full_like(own, lengths.max())}[pad]
        return -(-goal // options.multiple) * options.multiple

    work = [[float(COST.compute(width(one)).sum()) for one in microbatches] for microbatches in plan]
    replicas = [sum(one) for one in work]
    steps = [max(one[step] for one in work if step < len(one)) for step in range(max(map(len, work)))]
    computed = sum(int(width(one).sum()) for microbatches in plan for one in microbatches)
    mean = sum(replicas) / len(replicas)
    return {
        "seconds": round(seconds, 4),
        "microbatches": sum(map(len, plan)),
        "padding_fraction": round(1 - int(lengths.sum()) / computed, 5),
        "imbalance": round(max(replicas) / mean - 1, 5),
        "microbatch_imbalance": round(sum(steps) / mean - 1, 5),
        "work": sum(replicas),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"sequences": 10_000, "replicas": 8, "microbatch-tokens": 16_384, "multiple": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    ways: dict[str, tuple[Callable[..., Plan], str]] = {
        "packed": (packed, "multiple"),
        "rectangles": (rectangles, "longest"),
        "first_fit_decreasing": (first_fit_decreasing, "multiple"),
        "plain_padding": (plain_padding, "all"),
    }
    spreads = {}
    for spread in ("lognormal", "bimodal"):
        lengths = lengths_of(spread, options.sequences, options.microbatch_tokens // 2)
        spreads[spread] = {name: measure(plan, lengths, options, pad) for name, (plan, pad) in ways.items()}
        for figures in spreads[spread].values():
            figures["work_ratio"] = round(figures.pop("work") / float(COST.compute(lengths).sum()), 3)
    print(json.dumps({**header("packing"), **vars(options), "spreads": spreads}, indent=2))


if __name__ == "__main__":
    main()
