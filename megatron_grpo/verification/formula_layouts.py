"""Problems that show whether an objective, correction or advantages depend on the layout of a step."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields, require_field
from megatron_grpo.config.errors import RunError, suggest_name
from megatron_grpo.config.formulas import ADVANTAGES, CORRECTIONS, LOWER, OBJECTIVES, UPPER
from megatron_grpo.config.loss_schema import AdvantageEstimatorConfig
from megatron_grpo.config.paths import list_import_folders
from megatron_grpo.config.schema import GRPOConfig, LossConfig
from megatron_grpo.losses.advantages import make_estimator, response_advantages
from megatron_grpo.losses.formula_trials import find_advantages_problem, find_objective_problem
from megatron_grpo.losses.named_formula import NamedFormula, load_formula
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.selections import mark_selected
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.verification.problem import SequenceLoss, Truth, compute_truth, count_tokens, make_loss

SAMPLES = 4  # responses of a prompt, of which groups of advantages are made
SMALL_SHIFT = 1e-6  # of a log-probability, for derivatives in float64
SHIFT = 0.3  # standard deviation of log-probabilities from those of the model
# Values of keys at which a formula changes some of the drawn tokens, and not all.
_LIMITS: dict[str, Any] = {
    LOWER: 0.8,
    UPPER: 1.3,
    "sequence_mask_min": 0.95,
    "sequence_mask_max": 1.05,
    "off_policy_mask_threshold": 0.0,
    "divergence_mask_threshold": 0.1,
    "divergence_clip_min": 0.01,
    "divergence_clip_max": 0.01,
    "fipo_half_life": 4.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaProblem:
    """A loss with the formula, and what else it needs of a step."""

    name: str
    loss: ClippedPGLossFn
    estimator: NamedFormula | None
    """Function from rewards to advantages; None: advantages are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A loss of a batch, with the results of transformers."""

    formula: str = ""
    """Name of the loss's formula; empty: the loss that shows the model."""
    batch: TokenBatch
    loss: ClippedPGLossFn
    reference: Truth


def list_formulas(names: Sequence[str]) -> list[str]:
    """List the names, with those of all built-in formulas in place of `all`."""
    built_in = [*OBJECTIVES, *CORRECTIONS, *ADVANTAGES]
    return [formula for name in names for formula in (built_in if name == "all" else [name])]


def make_subjects(
    model: Path,
    shape: ModelShape,
    batch: TokenBatch,
    problems: Sequence[FormulaProblem],
    seed: int,
    store: Path | None = None,
) -> list[Subject]:
    """Compute a model's results in transformers with the loss of each problem.

    Without problems the loss is that of `make_loss`. `store`: of the images that sequences have; None: they have none.
    RunError: transformers cannot load or compute the model.
    """
    reference = compute_truth(model, batch, store=store, shape=shape)
    if not problems:
        return [Subject(batch=batch, loss=make_loss(), reference=reference)]
    subjects = []
    for problem in problems:
        drawn = draw_fields(problem, batch, reference.logprobs, seed)
        rectangles = make_rectangle_loss(problem.loss, drawn)
        exact = compute_truth(model, drawn, rectangles, store, shape)
        if any("responses" in formula.inputs for formula in (problem.loss.objective, *problem.loss.corrections)):
            exact = replace(exact, sensitivity=measure_sensitivity(rectangles, exact.logprobs, drawn.lengths))
        subjects.append(Subject(formula=problem.name, batch=drawn, loss=problem.loss, reference=exact))
    return subjects


def make_formula_problem(name: str, options: Mapping[str, Any]) -> FormulaProblem:
    """Make the loss of a built-in formula, or of the user's function.

    It is tried on a small step first.

    Raises:
        ValueError: there is no such formula, or it has other options.
        RunError: a trial fails, and the text says which.
    """
    folders, config = list_import_folders(), LossConfig(reference_policy_kl_penalty=0.0)
    try:
        if name in CORRECTIONS:
            keys: dict[str, Any] = {"corrections": [name], **{key: _LIMITS[key] for key in CORRECTIONS[name].reads}}
            config = replace(config, **keys)
            return FormulaProblem(name=name, loss=ClippedPGLossFn(config), estimator=None)
        if name in ADVANTAGES or ("." in name and _takes_rewards(name, folders)):
            settings = AdvantageEstimatorConfig(name=name, options=dict(options))
            estimator = make_estimator(GRPOConfig(adv_estimator=settings), folders)
            problem = find_advantages_problem(estimator, SAMPLES) if settings.entry is None else None
            loss = ClippedPGLossFn(config)
        elif name in OBJECTIVES or "." in name:
            entry = OBJECTIVES.get(name)
            by_token = entry is None or not entry.averages_responses
            keys = {} if entry is None else {key: _LIMITS[key] for key in entry.reads & _LIMITS.keys()}
            config = replace(config, objective=name, objective_options=dict(options), token_level_loss=by_token, **keys)
            loss, estimator = ClippedPGLossFn(config, folders), None
            problem = find_objective_problem(loss.objective)
        else:
            names = list_formulas(["all"])
            text = suggest_name(name, names, otherwise=f"; it is one of {', '.join(names)}, or module.function")
            raise ValueError(f"loss={name} is not known{text}")
    except RunError as error:
        raise ValueError(f"loss={name}: {error}") from None
    if problem is not None:
        raise RunError(f"loss={name} {problem}")
    return FormulaProblem(name=name, loss=loss, estimator=estimator)


def _takes_rewards(path: str, folders: tuple[str, ...]) -> bool:
    return "rewards" in inspect.signature(load_formula(path, folders)).parameters


def draw_fields(problem: FormulaProblem, batch: TokenBatch, logprobs: Tensor, seed: int) -> TokenBatch:
    """Draw log-probabilities near those of the model, [tokens], and advantages."""
    draw = torch.Generator().manual_seed(seed)

    def shift() -> Tensor:
        near = logprobs + SHIFT * torch.randn(len(logprobs), generator=draw)
        return torch.where(logprobs != 0, near, 0.0).float()

    fields = replace(batch.fields, prev_logprobs=shift(), generation_logprobs=shift())
    if problem.estimator is not None:
        fields.advantages = _estimate_advantages(problem.estimator, batch, draw)
    config = problem.loss.config
    if config.selection is not None:
        # Entropies are of the size of the log-probabilities.
        figures = require_field(fields.prev_logprobs).abs()
        is_candidate = require_field(fields.loss_mask) > 0
        wide = replace(config, clip_cov_share=0.3, kl_cov_share=0.3, clip_cov_min=-1.0)
        fields.selected = mark_selected(wide, figures, require_field(fields.advantages), is_candidate)
    return TokenBatch(batch.lengths, fields)


def measure_sensitivity(loss: SequenceLoss, logprobs: Tensor, lengths: list[int]) -> float:
    """Sum the sizes of the loss's derivatives by log-probabilities, [tokens], in float64.

    Differences, because factors without gradient change the loss, too.
    """

    def compute(values: Tensor) -> float:
        return float(loss([piece[1:] for piece in values.split(lengths)]))

    exact, total = compute(logprobs), 0.0
    for index in logprobs.nonzero()[:, 0].tolist():
        shifted = logprobs.clone()
        shifted[index] += SMALL_SHIFT
        total += abs(compute(shifted) - exact) / SMALL_SHIFT
    return total


def _estimate_advantages(estimator: NamedFormula, batch: TokenBatch, draw: torch.Generator) -> Tensor:
    """Estimate advantages of random rewards, at each token: [tokens]."""
    groups = -(-len(batch) // SAMPLES)
    lengths = torch.ones(groups * SAMPLES, dtype=torch.int64)  # the last group may have samples of no sequence
    masks = require_field(batch.fields.loss_mask).split(batch.lengths)
    lengths[: len(batch)] = torch.stack([mask.sum() for mask in masks]).long()
    shape = (groups, SAMPLES)
    rewards = torch.randint(0, 3, shape, generator=draw).float()
    lengths = lengths.view(shape)
    if "token_penalty" in estimator.inputs:
        sizes = torch.rand(int(lengths.sum()), generator=draw)
        by_token = estimator(rewards=rewards, lengths=lengths, token_penalty=None, score_sizes=sizes).float()
        advantages = torch.zeros(sum(batch.lengths))
        in_loss = require_field(batch.fields.loss_mask) > 0
        advantages[in_loss] = by_token[: int(in_loss.sum())]
        return advantages
    parts = torch.stack([rewards, torch.randint(0, 2, shape, generator=draw).float()])
    by_response = response_advantages(
        estimator,
        rewards,
        lengths,
        reward_parts=parts,
        reward_weights=torch.tensor([1.0, 0.5]),
        task_baselines=rewards / 2,
    ).flatten()[: len(batch)]
    return by_response.repeat_interleave(torch.tensor(batch.lengths))


def make_rectangle_loss(loss: ClippedPGLossFn, batch: TokenBatch) -> SequenceLoss:
    """Make the loss of one process, over rectangles: [sequences, longest], padded on the right."""

    def compute(logprobs: list[Tensor]) -> Tensor:
        dtype, fields = logprobs[0].dtype, {}
        for name, values in batch.fields.as_dict().items():
            rectangle = pad_sequence([*values.split(batch.lengths)], batch_first=True)
            fields[name] = rectangle.to(dtype) if rectangle.is_floating_point() else rectangle
        curr = pad_sequence([pad(values, (1, 0)) for values in logprobs], batch_first=True)
        total, _ = loss(curr, TokenFields(**fields), count_tokens(batch))
        return total

    return compute
