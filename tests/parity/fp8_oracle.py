"""FP8 numerics written a second time, and a step of a policy whose layers round their operands."""

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import LossConfig, ReferenceConfig
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from tests.parity.on_rank import TEMPERATURE, expect_gradients
from tests.parity.policy_training import make_batch, make_engine, whole_gradients
from tests.parity.ranks import Layout
from tests.parity.training import merge, step_counts
from tests.support.tiny_models import TinyModel, logprobs_of_logits

Scales = Callable[[Tensor], Tensor]
"""From a matrix, [rows, columns], to the scale of each of its numbers."""

SHARED = {name: names for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) for name in names}
"""Matrices that are one in Megatron-Core, and have one scale when a whole tensor has."""


def e4m3(values: Tensor) -> Tensor:
    """Values within 448 to the nearest number of 3 bits of mantissa and exponents from -6 on, ties to even."""
    exponent = values.abs().clamp(min=2.0**-20).log2().floor().clamp(min=-6)
    step = 2.0 ** (exponent - 3)
    return (values / step).round() * step


def block_scales(values: Tensor, rows: int, columns: int, power_of_two: bool) -> Tensor:
    """The scale of the block of every number.

    Multiplied by it: the largest power of two that keeps the block within 448. Else divided by it: the block's largest
    number / 448.
    """
    scales = torch.ones_like(values)
    for top, begin in product(range(0, values.shape[0], rows), range(0, values.shape[1], columns)):
        block = (slice(top, top + rows), slice(begin, begin + columns))
        largest = values[block].abs().max()
        if largest:
            scales[block] = 2.0 ** math.floor(math.log2(448 / largest.item())) if power_of_two else largest / 448
    return scales


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, scale: Tensor, divides: bool) -> Tensor:
        return e4m3(values / scale) * scale if divides else e4m3(values * scale) / scale

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient, None, None


def round_matrix(values: Tensor, recipe: str, weight: bool, shared: list[Tensor]) -> Tensor:
    """A matrix, [rows, columns], as the recipe rounds it; `shared` are all matrices that have its scale."""
    if recipe == "tensorwise":
        largest = max(matrix.detach().abs().max().item() for matrix in shared)
        scale = torch.full_like(values, 448 / torch.tensor(largest).item())
    else:
        side = 32 if recipe == "mxfp8" else 128
        rows = side if weight and recipe == "blockwise" else 1
        scale = block_scales(values.detach(), rows, side, power_of_two=recipe == "mxfp8")
    return _Rounded.apply(values, scale, recipe == "blockwise")


def simulate(model: torch.nn.Module, recipe: str, layers: list[int]) -> torch.nn.Module:
    """A transformers model whose linear layers compute with rounded operands; changes it.

    Args:
        model: a decoder of two-dimensional linear layers without biases in `model.layers`.
        recipe: tensorwise, blockwise or mxfp8.
        layers: numbers of the layers that do.
    """
    for number in layers:
        for parent, name, linear in list(_linears(model.model.layers[number])):
            mates = [getattr(parent, mate).weight for mate in SHARED.get(name, (name,))]

            def forward(values: Tensor, linear: torch.nn.Linear = linear, mates: list[Tensor] = mates) -> Tensor:
                flat = values.flatten(0, -2)
                inputs = round_matrix(flat, recipe, weight=False, shared=[flat])
                weight = round_matrix(linear.weight, recipe, weight=True, shared=mates)
                return F.linear(inputs, weight).unflatten(0, values.shape[:-1])

            linear.forward = forward
    return model


def _linears(layer: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    for parent in layer.modules():
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.Linear):
                yield parent, name, child


LENGTHS = [6, 8, 4]
"""Even, so that sequence parallelism adds no padding, which would take part in a tensor's largest value."""
Measured = tuple[Tensor | None, Tensor | None, dict[str, Tensor]]


def make_short_batch() -> TokenBatch:
    mask = torch.ones(sum(LENGTHS))
    mask[torch.tensor([0, *LENGTHS]).cumsum(0)[:-1]] = 0
    return make_batch(LENGTHS, mask, seed=4)


def measure_on_rank(
    layout: Layout, model: TinyModel, settings: dict[str, Any], has_reference: bool = False
) -> Measured:
    """Log-probabilities of all tokens under policy and reference, on the output rank, and gradients."""
    reference = ReferenceConfig() if has_reference else None
    rank = make_engine(layout, model, distributed=False, reference=reference, **settings)
    microbatches = [[index] for index in range(len(LENGTHS))]
    tokens = TokenBatch(LENGTHS, TokenFields(token_ids=make_short_batch().fields.token_ids))
    logprobs = rank.compute_logprobs(tokens, microbatches)
    of_reference = rank.compute_reference_logprobs(tokens, microbatches) if has_reference else None
    loss = ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0))
    rank.compute_gradients(make_short_batch(), microbatches, loss, step_counts(make_short_batch()))
    return logprobs, of_reference, whole_gradients(rank)


def measure_in_transformers(model: torch.nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The log-probabilities and the gradients of a model of transformers."""
    tokens, logprobs_of_all, loss = make_short_batch().fields, [], torch.zeros(())
    columns = (tokens.token_ids.long(), tokens.loss_mask, tokens.advantages)
    for ids, mask, advantages in zip(*(column.split(LENGTHS) for column in columns), strict=True):
        logprobs = logprobs_of_logits(model(ids[None]).logits / TEMPERATURE, ids[None])[0]
        logprobs_of_all.append(logprobs.detach())
        loss = loss - (logprobs * advantages * mask).sum()
    (loss / tokens.loss_mask.sum()).backward()
    return torch.cat(logprobs_of_all), {name: parameter.grad for name, parameter in model.named_parameters()}


def expect_equal(by_rank: list[Measured], logprobs: Tensor, gradients: dict[str, Tensor]) -> None:
    (reported,) = [part for part, _, _ in by_rank if part is not None]
    torch.testing.assert_close(reported, logprobs, atol=2e-5 / TEMPERATURE, rtol=0)
    expect_gradients(merge([part for _, _, part in by_rank]), gradients)
