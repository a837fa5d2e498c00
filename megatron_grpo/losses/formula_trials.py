"""Trials of formulas on small random steps: numbers, gradients, and whether layouts change them.

A function that passes gives every token the same loss wherever it lies. `python -m megatron_grpo.verify loss=NAME`
shows the same on ranks of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Barrier, Thread

import torch
from torch import Tensor

from megatron_grpo.config.errors import RunError
from megatron_grpo.losses.advantages import response_advantages
from megatron_grpo.losses.loss import Segments
from megatron_grpo.losses.named_formula import NamedFormula
from megatron_grpo.losses.objectives import Responses, token_loss

LENGTHS = (5, 3, 8, 1)  # sampled tokens of the responses
PROMPT, WIDTH = 2, 12  # tokens before each response, and of a row with its padding
_ROWS = range(len(LENGTHS))
TOLERANCE = 1e-5
SAMPLING_SHIFT = 0.05  # of log-probabilities, less than any clipping
SELECTED = 0.3  # share of tokens that a rule of the step has chosen


@dataclass(slots=True)
class _Results:
    """Loss and gradient of each token, [responses, WIDTH]; NaN outside the loss."""

    loss: Tensor = field(default_factory=lambda: torch.full((len(LENGTHS), WIDTH), torch.nan))
    gradient: Tensor = field(default_factory=lambda: torch.full((len(LENGTHS), WIDTH), torch.nan))

    def is_close(self, reference: _Results) -> bool:
        """True if both have the same numbers, but for rounding."""
        return all(
            torch.allclose(values, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
            for values, expected in ((self.loss, reference.loss), (self.gradient, reference.gradient))
        )


def find_objective_problem(objective: NamedFormula) -> str | None:
    """Find what is wrong with an objective; None: nothing."""
    try:
        step = _draw_step()
        packed = _Results()
        _try_packed(objective, step, packed)
        if not packed.gradient.nan_to_num().any():
            return "returned a loss whose gradient is 0 at every token: no operation leads back to logprobs"
        for text, measure in _TRIALS.items():
            results = _Results()
            measure(objective, step, results)
            if not results.is_close(packed):
                return text
        return _find_wrong_sign(objective, step)
    except RunError as error:
        return str(error).removeprefix(f"{objective.setting} ")


def find_advantages_problem(estimator: NamedFormula, samples: int) -> str | None:
    """Find what is wrong with a function from rewards to advantages; None: nothing.

    `samples`: of each prompt.
    """
    draw = torch.Generator().manual_seed(1)
    rewards = torch.randint(0, 2, (4, samples), generator=draw).float()
    rewards[0], rewards[1, 0], rewards[1, 1:] = 1.0, 1.0, 0.0  # all equal; a lone success
    missing = rewards.clone()
    missing[2, 0], missing[3] = torch.nan, torch.nan
    lengths = torch.randint(1, 9, (4, samples), generator=draw)
    try:
        for table in (rewards, missing):
            response_advantages(estimator, table, lengths)
    except RunError as error:
        return str(error).removeprefix(f"{estimator.setting} ")
    return None


def _draw_step() -> dict[str, Tensor]:
    """Draw per-token values of all responses, [responses, WIDTH], 0 outside the loss."""
    draw = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), WIDTH)
    logprobs = -torch.rand(shape, generator=draw) - 0.1
    step = {
        "logprobs": logprobs,
        "old_logprobs": logprobs + 0.3 * torch.randn(shape, generator=draw),
        "sampling_logprobs": logprobs + 0.3 * torch.randn(shape, generator=draw),
        "advantages": torch.randn(shape, generator=draw),
    }
    positions = torch.arange(WIDTH) - PROMPT
    mask = (positions >= 0) & (positions < torch.tensor(LENGTHS)[:, None])
    selected = mask & (torch.rand(shape, generator=draw) < SELECTED)
    return {name: torch.where(mask, values, 0.0) for name, values in step.items()} | {
        "mask": mask,
        "selected": selected,
    }


def _measure(
    objective: NamedFormula,
    step: dict[str, Tensor],
    results: _Results,
    positions: tuple[Tensor, Tensor],
    is_token: Tensor,
    segments: Segments | None,
) -> None:
    """Compute the loss of tokens at `positions`, rows and columns.

    They stand where `is_token` is true; the other tokens of its shape are padding.
    """
    values = {}
    for name, field_values in step.items():
        values[name] = torch.zeros(is_token.shape, dtype=field_values.dtype)
        values[name][is_token] = field_values[positions]
    values["logprobs"].requires_grad_()
    mask, log_ratio = values["mask"], values["logprobs"] - values["old_logprobs"]
    loss, _ = token_loss(objective, **values, log_ratio=log_ratio, responses=Responses(mask, segments))
    if not loss[mask].isfinite().all():
        raise RunError("returned a loss that is not finite for log-probabilities of the usual size")
    total = torch.where(mask, loss, 0.0).sum()
    (gradient,) = torch.autograd.grad(total, values["logprobs"], allow_unused=True, materialize_grads=True)
    in_loss = mask[is_token]
    rows, columns = positions[0][in_loss], positions[1][in_loss]
    results.loss[rows, columns] = loss.detach()[mask].float()
    results.gradient[rows, columns] = gradient[mask]


def _try_packed(
    objective: NamedFormula, step: dict[str, Tensor], results: _Results, rows: range = _ROWS, padding: int = 0
) -> None:
    """Lay rows end to end, with padding behind them."""
    counts = torch.tensor([PROMPT + LENGTHS[row] for row in rows])
    index = torch.arange(len(rows)).repeat_interleave(counts)
    columns = torch.cat([torch.arange(int(count)) for count in counts])
    is_token = torch.arange(len(index) + padding) < len(index)
    sizes = torch.tensor([float(LENGTHS[row]) for row in rows])
    padded_index = torch.cat([index, index.new_full((padding,), len(rows) - 1)])
    _measure(objective, step, results, (index + rows.start, columns), is_token, Segments(padded_index, sizes))


def _try_padding(objective: NamedFormula, step: dict[str, Tensor], results: _Results) -> None:
    _try_packed(objective, step, results, padding=9)


def _try_rectangle(objective: NamedFormula, step: dict[str, Tensor], results: _Results) -> None:
    rows, columns = torch.meshgrid(torch.arange(len(LENGTHS)), torch.arange(WIDTH), indexing="ij")
    is_token = torch.ones(rows.shape, dtype=torch.bool)
    _measure(objective, step, results, (rows.flatten(), columns.flatten()), is_token, None)


def _try_microbatches(objective: NamedFormula, step: dict[str, Tensor], results: _Results) -> None:
    for row in range(len(LENGTHS)):
        _try_packed(objective, step, results, range(row, row + 1))


def _try_context(objective: NamedFormula, step: dict[str, Tensor], results: _Results) -> None:
    """Give every second token to one of two ranks, which are threads here."""
    barrier, sums = Barrier(2, timeout=60), [torch.zeros(0)] * 2
    errors: list[RunError] = []

    def measure_rank(rank: int) -> None:
        def sum_over_ranks(values: Tensor) -> Tensor:
            sums[rank] = values
            barrier.wait()
            total = sums[0] + sums[1]
            barrier.wait()
            return total

        try:
            is_token = (torch.arange(WIDTH) % 2 == rank).expand(len(LENGTHS), WIDTH)
            rows, columns = is_token.nonzero(as_tuple=True)
            lengths = torch.tensor(LENGTHS)
            order = (lengths.cumsum(0) - lengths)[rows] + columns - PROMPT
            segments = Segments(rows, lengths.float(), sum_over_ranks, order, sum(LENGTHS))
            flat = torch.ones(len(rows), dtype=torch.bool)
            _measure(objective, step, results, (rows, columns), flat, segments)
        except RunError as error:
            errors.append(error)
            barrier.abort()

    threads = [Thread(target=measure_rank, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def divides_by_sampling(objective: NamedFormula) -> bool:
    """True if gradients grow as sampling probabilities fall."""
    if "sampling_logprobs" not in objective.inputs:
        return False
    step = _draw_step()
    gradients = [_compute_gradient(objective, step, shift)[step["mask"]] for shift in (0.0, SAMPLING_SHIFT)]
    factor = float((gradients[1] / gradients[0]).nanmedian())
    return factor > 1 + SAMPLING_SHIFT / 2


def _compute_gradient(objective: NamedFormula, step: dict[str, Tensor], shift: float = 0.0) -> Tensor:
    """Compute the gradient of one policy, whose log-probabilities the engine has lower by `shift`."""
    logprobs, results = step["logprobs"], _Results()
    sampling = torch.where(step["mask"], logprobs - shift, 0.0)
    _try_packed(objective, {**step, "old_logprobs": logprobs, "sampling_logprobs": sampling}, results)
    return results.gradient


def _find_wrong_sign(objective: NamedFormula, step: dict[str, Tensor]) -> str | None:
    """Explain a loss that makes tokens of positive advantage less likely."""
    directions = (_compute_gradient(objective, step) * step["advantages"])[step["mask"]]
    if (directions >= 0).all() and directions.any():
        return "makes tokens of positive advantage less likely: return what is minimised, minus the objective"
    return None


_Trial = Callable[[NamedFormula, dict[str, Tensor], _Results], None]
# By the message if results differ from those of one packed microbatch.
_TRIALS: dict[str, _Trial] = {
    "depends on padding: tokens outside the mask change the loss of others; leave them out by mask": _try_padding,
    "depends on its microbatch: other responses change the loss of a token; take no mean or sum over the tensors, "
    "since the run averages over the whole step; responses.mean is the mean over a response": _try_microbatches,
    "gives rectangles, [responses, tokens], another loss than tokens laid end to end; use responses.sum and "
    "responses.mean in place of sums along a dimension": _try_rectangle,
    "depends on context parallelism: the ranks that share a response compute another loss; sum over a response with "
    "responses.sum": _try_context,
}
