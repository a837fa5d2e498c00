"""Measures log-probabilities of the tokens in the loss by every way through the head; prints JSON.

    python benchmarks/logprob.py [--tokens 8192] [--vocab 151936] [--hidden 1024] [--in-loss 0.3] [--dtype float32]

Each way runs forward and backward in a process of its own: `peak_gib` is what its memory grew by.

- `materialised` makes logits of every token and takes the logarithm of their softmax, as a plain implementation does.
- `chunked` and `fused` are the kernels (policy.logprob_kernel), which give entropies too.
- `compiled` is torch.compile's cross-entropy of the tokens in the loss alone, without entropies.
- `products` is the floor: the matrix products alone that a way without all logits makes, four as the logits are made
  twice, of the tokens in the loss, by the vendor's library.

The last three are timed on a CUDA device, and null elsewhere.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from clock import seconds
from header import header
from torch import Tensor

from megatron_grpo_kernels.logprob import linear_logprobs

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""[tokens, hidden], [vocab, hidden], any float type, targets [tokens], int64, mask [tokens], bool; to the loss, []."""


def compute_materialised(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    logprobs = (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    return -(logprobs * mask).sum()


def compute_chunked(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return -linear_logprobs(hidden[mask], weight, targets[mask], kernel="chunked")[0].sum()


def compute_fused(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return -linear_logprobs(hidden[mask], weight, targets[mask], kernel="fused")[0].sum()


@torch.compile
def _cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="sum")


def compute_compiled(hidden: Tensor, weight: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    loss: Tensor = _cross_entropy(hidden[mask], weight, targets[mask])
    return loss


WAYS: dict[str, Loss] = {
    "materialised": compute_materialised,
    "chunked": compute_chunked,
    "fused": compute_fused,
    "compiled": compute_compiled,
}
ON_CUDA = {
    "fused": "Triton compiles for GPUs alone, and the time of its interpreter says nothing",
    "compiled": "what the fused kernel is compared with, so where that is",
    "products": "the floor of the fused kernel, so where that is",
}
"""Ways that are measured on a CUDA device alone, and why."""


COMPARED = (
    ("chunked", "materialised"),
    ("fused", "materialised"),
    ("fused", "chunked"),
    ("fused", "compiled"),
    ("fused", "products"),
)


def measure(way: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds and memory of one forward and backward pass, and what it found."""
    device = _device()
    hidden, weight, targets, mask = _problem(options, device)
    if way == "products":
        rows, head = hidden[mask].detach(), weight.detach()
        grad = torch.ones(len(rows), options.vocab, device=device, dtype=rows.dtype)
        return {"seconds": seconds(lambda: _time_products(rows, head, grad), device)}
    figures: dict[str, Tensor] = {}

    def step() -> None:
        loss = WAYS[way](hidden, weight, targets, mask)
        gradients = torch.autograd.grad(loss, (hidden, weight))
        figures["loss"], figures["grad_norm"] = (
            loss.detach(),
            torch.stack([gradient.float().norm() for gradient in gradients]).norm(),
        )

    before = _memory(device)
    time = seconds(step, device)
    return {
        "seconds": time,
        "peak_gib": (_memory(device) - before) / 2**30,
        **{name: value.item() for name, value in figures.items()},
    }


def _problem(options: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states and the head's weight, targets, and which tokens are in the loss."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(options.tokens, options.hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = (0.02 * torch.randn(options.vocab, options.hidden, generator=generator)).to(device, dtype).requires_grad_()
    targets = torch.randint(0, options.vocab, (options.tokens,), generator=generator).to(device)
    return hidden, weight, targets, (torch.rand(options.tokens, generator=generator) < options.in_loss).to(device)


def _time_products(hidden: Tensor, weight: Tensor, grad: Tensor) -> None:
    """Logits twice, and what a gradient of them, [tokens, vocab], becomes for the hidden states and for the weight."""
    for _ in range(2):
        hidden @ weight.t()
    grad @ weight
    grad.t() @ hidden


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _memory(device: torch.device) -> float:
    """Bytes that were taken at most until now."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"tokens": 8192, "vocab": 151_936, "hidden": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--in-loss", type=float, default=0.3)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    answer: dict[str, Any] = {}
    left_out = {} if _device().type == "cuda" else ON_CUDA
    for way in (*WAYS, "products"):
        if way in left_out:
            answer[way] = None
            continue
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            answer[way] = pool.apply(measure, (way, options))
    ratios = {
        f"{form}_to_{other_form}": {
            name: answer[form][name] / answer[other_form][name] for name in answer[form].keys() & answer[other_form]
        }
        for form, other_form in COMPARED
        if answer[form] and answer[other_form]
    }
    result = {**header("logprob"), **vars(options), **answer, "ratios": ratios, "not_measured": left_out}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
