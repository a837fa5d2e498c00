"""Divergences of whole distributions in float64, as their definitions have them; autograd makes the gradients."""

from __future__ import annotations

import torch
from torch import Tensor


def kullback_leibler(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of log-probabilities over the last dimension; 0 log 0 is 0."""
    terms = first.exp() * (first - second)
    return torch.where(first.isneginf(), torch.zeros_like(terms), terms).sum(dim=-1)


def expected_divergence(student: Tensor, teacher: Tensor, name: str, forward_weight: float) -> Tensor:
    """Divergence of log-probabilities [..., entries]."""
    if name == "reverse":
        return kullback_leibler(student, teacher)
    if name == "forward":
        return kullback_leibler(teacher, student)
    if name == "mixed":
        forward, reverse = kullback_leibler(teacher, student), kullback_leibler(student, teacher)
        return forward_weight * forward + (1 - forward_weight) * reverse
    if forward_weight in (0, 1):
        return expected_divergence(student, teacher, "forward" if forward_weight else "reverse", 0.5)
    mixture = ((1 - forward_weight) * teacher.exp() + forward_weight * student.exp()).log()
    of_teacher, of_student = kullback_leibler(teacher, mixture), kullback_leibler(student, mixture)
    return (1 - forward_weight) * of_teacher + forward_weight * of_student


def with_tail(logprobs: Tensor, chosen: Tensor) -> Tensor:
    """Log-probabilities [tokens, k + 1] of chosen entries, [tokens, k], and of all other entries together."""
    others = torch.ones_like(logprobs, dtype=torch.bool).scatter(-1, chosen, value=False)
    tail = torch.where(others, logprobs, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, chosen), tail], dim=-1)
