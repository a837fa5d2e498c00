"""Log-probabilities, entropies and gradients of one head by any kernel, and from whole logits in float64."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_grpo_kernels.logprob import linear_logprobs


@dataclass(frozen=True, slots=True)
class Case:
    """A head's problem, made from a seed; sizes that are not multiples of a kernel's tile, unless told otherwise."""

    dtype: str = "float32"
    tokens: int = 150
    hidden: int = 70
    vocab: int = 300
    padding: int = 20
    """Rows of the weight after the vocabulary."""
    scale: float = 1.4
    cap: float | None = None
    entropy: bool = True
    """Whether the entropy is in the loss."""
    start: int = 0
    """Vocabulary entry of the first row; those before it are nobody's, and take no part."""
    spread: float = 0.3
    """Standard deviation of the weight; logits get sqrt(hidden) times that."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """[tokens, hidden]; [vocab + padding, hidden]; targets, [tokens], int64; and [2, tokens]: the loss is the sum
        of these times log-probabilities and entropies."""
        generator = torch.Generator().manual_seed(3)
        dtype = getattr(torch, self.dtype)
        hidden = torch.randn(self.tokens, self.hidden, generator=generator).to(dtype)
        weight = (self.spread * torch.randn(self.vocab + self.padding, self.hidden, generator=generator)).to(dtype)
        targets = torch.randint(0, self.vocab, (self.tokens,), generator=generator) + self.start
        return hidden, weight, targets, torch.randn(2, self.tokens, generator=generator)


@dataclass(slots=True)
class Results:
    """What a kernel gives, on the host."""

    logprobs: Tensor
    entropy: Tensor
    of_hidden: Tensor
    """Gradient of the hidden states."""
    of_weight: Tensor
    """Gradient of the weight."""


def by_kernel(case: Case, kernel: str, device: str = "cpu") -> Results:
    """By the kernel of this name."""
    hidden, weight, targets, factors = (tensor.to(device) for tensor in case.tensors())
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = linear_logprobs(
        hidden, weight, targets, start=case.start, columns=case.vocab, scale=case.scale, cap=case.cap, kernel=kernel
    )
    return _results(case, hidden, weight, factors, logprobs, entropy)


def by_float64(case: Case) -> Results:
    """By torch's categorical distribution over whole logits."""
    hidden, weight, targets, factors = (
        tensor.double() if tensor.is_floating_point() else tensor for tensor in case.tensors()
    )
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight[: case.vocab].t()
    logits = logits if case.cap is None else case.cap * torch.tanh(logits / case.cap)
    distribution = torch.distributions.Categorical(logits=logits * case.scale)
    logprobs, entropy = distribution.log_prob(targets - case.start), distribution.entropy()
    return _results(case, hidden, weight, factors, logprobs, entropy)


def by_ranks(rank: int, case: Case, kernel: str, store_file: str, columns: tuple[int, int]) -> Results:
    """As two gloo ranks find it, this rank's rows of the weight's gradient and its part of the hidden states'.

    Args:
        rank: of the calling process.
        store_file: path of a new file, by which the ranks find each other.
        columns: vocabulary entries of each; a rank has as many padding rows as the case says.
    """
    hidden, weight, targets, factors = case.tensors()
    start = sum(columns[:rank])
    part = weight[start : start + columns[rank] + case.padding].clone().requires_grad_()
    hidden.requires_grad_()
    store = dist.FileStore(store_file, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        logprobs, entropy = linear_logprobs(
            hidden,
            part,
            targets,
            start=start,
            columns=columns[rank],
            group=dist.group.WORLD,
            scale=case.scale,
            cap=case.cap,
            kernel=kernel,
        )
        return _results(case, hidden, part, factors, logprobs, entropy)
    finally:
        dist.destroy_process_group()


def expect_equal(actual: Results, expected: Results, case: Case) -> None:
    """Values to float32's rounding of a logit; gradients, relative to their norm, to that of the case's dtype."""
    rounding = torch.finfo(torch.float32).eps * 4 * case.scale * case.spread * case.hidden**0.5
    for name in ("logprobs", "entropy"):
        actual_value = getattr(actual, name)
        assert actual_value.dtype == torch.float32
        torch.testing.assert_close(actual_value.double(), getattr(expected, name), atol=2e-5 + rounding, rtol=1e-5)
    # bfloat16 rounds the gradient of the logits and of the results; the interpreter cuts off instead.
    tolerance = {"float32": 2e-5, "bfloat16": 6e-3}[case.dtype]
    for name in ("of_hidden", "of_weight"):
        actual_value, expected_value = getattr(actual, name), getattr(expected, name)
        assert actual_value.dtype == getattr(torch, case.dtype)
        error = (actual_value.double() - expected_value).norm() / expected_value.norm()
        assert error < tolerance, f"{name}: relative error {error:.1e}"


def _results(case: Case, hidden: Tensor, weight: Tensor, factors: Tensor, logprobs: Tensor, entropy: Tensor) -> Results:
    loss = (factors[0] * logprobs).sum()
    if case.entropy:
        loss = loss + (factors[1] * entropy).sum()
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight))
    return Results(*(tensor.detach().cpu() for tensor in (logprobs, entropy, of_hidden, of_weight)))


CASES = {
    "float32": Case(),
    "bfloat16": Case(dtype="bfloat16"),
    "whole tiles": Case(dtype="bfloat16", tokens=256, hidden=128, vocab=384, padding=0, scale=1.0),
    "smaller than a tile": Case(tokens=3, hidden=5, vocab=7, padding=0),
    "no entropy in the loss": Case(entropy=False, padding=0),
    "one token": Case(tokens=1, scale=0.5),
    "far apart": Case(spread=20.0),
    "capped": Case(cap=3.0),
    "capped bfloat16": Case(dtype="bfloat16", cap=3.0, entropy=False),
    "a start": replace(Case(), start=1000),
}
"""What every kernel is tried on, on every device."""
