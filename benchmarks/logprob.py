"""Measures log-probabilities of the tokens in the loss, in chunks and from logits that are held whole; prints JSON.

    python benchmarks/logprob.py [--tokens 8192] [--vocab 151936] [--hidden 1024] [--in-loss 0.3] [--dtype float32]

Each way runs forward and backward in a process of its own: `peak_gib` is what its memory grew by. `materialised` makes
logits of every token and takes the logarithm of their softmax, as a plain implementation does.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from typing import Any

import torch
from header import header

from megatron_grpo_kernels.logprob import linear_logprobs

WAYS = ("materialised", "chunked")


def measure(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds and memory of one forward and backward pass."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = (0.02 * torch.randn(options.vocab, options.hidden, generator=generator)).to(device, dtype).requires_grad_()
    targets = torch.randint(0, options.vocab, (options.tokens,), generator=generator).to(device)
    mask = (torch.rand(options.tokens, generator=generator) < options.in_loss).to(device)
    _synchronize(device)
    before, began = _memory(device), time.perf_counter()
    if way == "materialised":
        logprobs = (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        loss = -(logprobs * mask).sum()
    else:
        loss = -linear_logprobs(hidden[mask], weight, targets[mask])[0].sum()
    loss.backward()
    _synchronize(device)
    seconds = time.perf_counter() - began
    assert hidden.grad is not None
    assert weight.grad is not None
    return {
        "seconds": seconds,
        "peak_gib": (_memory(device) - before) / 2**30,
        "loss": loss.item(),
        "grad_norm": float(torch.stack([hidden.grad.float().norm(), weight.grad.float().norm()]).norm()),
    }


def _memory(device: torch.device) -> float:
    """Bytes that were taken at most until now."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 8192, "vocab": 151_936, "hidden": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--in-loss", type=float, default=0.3)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for way in WAYS:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[way] = pool.apply(measure, (way, options))
    plain, chunked = found["materialised"], found["chunked"]
    ratios = {f"{name}_ratio": chunked[name] / plain[name] for name in ("seconds", "peak_gib", "loss", "grad_norm")}
    print(json.dumps({**header("logprob"), **vars(options), **found, **ratios}, indent=2))


if __name__ == "__main__":
    main()
