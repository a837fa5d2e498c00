"""Blockwise FP8 and divergences of whole distributions, by their definitions."""

import bisect
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 128
"""Rows and columns that share a scale."""
TABLE = [mantissa / 8 * 2.0**-6 for mantissa in range(8)] + [
    (1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)
][:-1]
"""Sizes by their bits, from 0 to 448: 1111 111 is NaN."""


def nearest(size: float) -> int:
    """Bits of the number nearest to 0 to 448, or a little more; even bits if two are as near."""
    above = bisect.bisect_left(TABLE, size)
    if above == len(TABLE):
        return above - 1
    below = max(above - 1, 0)
    distance = (size - TABLE[below], TABLE[above] - size)
    if distance[0] == distance[1]:
        return below if below % 2 == 0 else above
    return below if distance[0] < distance[1] else above


def quantise(values: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Bits of [rows, columns], -1 for NaN, and scales by block, NaN for one that holds what is not finite."""
    array = values.float().numpy()
    rows, columns = array.shape
    bits = np.zeros(array.shape, np.int64)
    scales = np.zeros((math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)), np.float32)
    for down, across in np.ndindex(*scales.shape):
        top, begin = down * BLOCK, across * BLOCK
        part = array[top : top + BLOCK, begin : begin + BLOCK]
        target = bits[top : top + BLOCK, begin : begin + BLOCK]
        if not all(math.isfinite(value) for value in part.flat):
            scales[down, across], target[:] = np.nan, -1
            continue
        scale = np.float32(max(abs(value) for value in part.flat)) / np.float32(448)
        scale = scale if scale >= 2.0**-126 else np.float32(1)
        scales[down, across] = scale
        for index in np.ndindex(*part.shape):
            sign = 0x80 if math.copysign(1, part[index]) < 0 else 0
            target[index] = nearest(abs(float(part[index] / scale))) | sign
    return bits, scales


def dequantise(bits: NDArray[np.int64], scales: NDArray[np.float32]) -> Tensor:
    """[rows, columns], float32."""
    values = np.zeros(bits.shape, np.float32)
    for index in np.ndindex(*bits.shape):
        scale = scales[index[0] // BLOCK, index[1] // BLOCK]
        code = int(bits[index])
        size = math.nan if code == -1 or code & 0x7F == 0x7F else TABLE[code & 0x7F]
        values[index] = np.float32(-size if code & 0x80 else size) * scale
    return torch.from_numpy(values)


def bits_of(quantised: Tensor) -> NDArray[np.int64]:
    """Bits of float8_e4m3fn numbers, -1 for NaN of either sign."""
    bits = quantised.cpu().view(torch.uint8).long()
    return torch.where(bits & 0x7F == 0x7F, -1, bits).numpy()


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
    is_other = torch.ones_like(logprobs, dtype=torch.bool).scatter(-1, chosen, value=False)
    tail = torch.where(is_other, logprobs, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([logprobs.gather(-1, chosen), tail], dim=-1)
