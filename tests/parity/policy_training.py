"""Training the policy on ranks, and the same step in transformers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.schema import LossConfig, ModelConfig, OptimizerConfig, PolicyConfig, ReferenceConfig
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.trainer.messages import PolicyDistillation, RankSettings
from megatron_grpo.trainer.rank import PolicyRank
from megatron_grpo.verification.tolerances import LEAST_SHARE
from tests.parity.ranks import Layout
from tests.parity.training import (
    LENGTHS,
    fetch,
    merge,
    parameters_of,
    random_mask,
    rank_share,
    step_counts,
    whole_tensors,
)
from tests.support.tiny_models import VOCAB, TinyModel

OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_beta2=0.95, adam_eps=1e-2, warmup_steps=2)
"""A large epsilon keeps the update a smooth function of the gradient, so that rounding does not flip its sign."""
MAX_GRAD_NORM = 0.5


def make_batch(lengths: list[int] = LENGTHS, mask: Tensor | None = None, seed: int = 3) -> TokenBatch:
    """Sequences with random advantages and sampling log-probabilities; the usual eight have random masks, too."""
    generator = torch.Generator().manual_seed(seed)
    mask, total = random_mask(generator) if mask is None else mask, sum(lengths)
    tokens = TokenFields(
        token_ids=torch.randint(0, VOCAB, (total,), generator=generator).int(),
        loss_mask=mask,
        advantages=torch.randn(total, generator=generator),
        generation_logprobs=-torch.rand(total, generator=generator),
    )
    return TokenBatch(lengths, tokens)


def make_engine(
    layout: Layout,
    model: TinyModel,
    *,
    distributed: bool = True,
    precision: str = "float32",
    optimizer: OptimizerConfig = OPTIMIZER,
    packing: bool = True,
    distillation: PolicyDistillation | None = None,
    reference: ReferenceConfig | None = None,
    **settings: Any,
) -> PolicyRank:
    """The policy's part on this rank; `settings` are further keys of policy.*."""
    config = PolicyConfig(
        model=ModelConfig(path=str(model.path)),
        parallel=layout.parallel,
        precision=precision,
        optimizer=replace(optimizer, distributed=distributed),
        packing=packing,
        **({"max_grad_norm": MAX_GRAD_NORM} | settings),
    )
    return PolicyRank(
        RankSettings(
            config=config,
            shape=model.shape,
            folder=str(model.path),
            temperature=0.8,
            decay_steps=100,
            distillation=distillation,
            reference=reference,
        )
    )


def train_arguments(layout: Layout) -> tuple[TokenBatch, list[list[int]], ClippedPGLossFn, GlobalCounts]:
    """This rank's share of `make_batch`, its microbatches, a loss without KL, and the counts of the whole step."""
    share, microbatches, _ = rank_share(make_batch(), layout)
    loss_fn = ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0))
    return share, microbatches, loss_fn, step_counts(make_batch())


def whole_gradients(engine: PolicyRank) -> dict[str, Tensor]:
    """Gradients under the names and in the shapes of transformers: exported the way weights are."""
    trained = [parameter for parameter in parameters_of(engine) if parameter.requires_grad]
    weights = [parameter.detach().clone() for parameter in trained]
    with torch.no_grad():
        for parameter in trained:
            parameter.copy_(parameter.main_grad)
        gradients = whole_tensors(engine)
        for parameter, weight in zip(trained, weights, strict=True):
            parameter.copy_(weight)
    return gradients


def gradients_on_rank(
    layout: Layout, models: list[TinyModel], packing: bool = True, settings: dict[str, Any] | None = None
) -> list[tuple[dict[str, Tensor], float]]:
    """Gradients and their norm of every model; `settings` are further keys of the policy."""
    results = []
    for model in models:
        engine = make_engine(layout, model, distributed=False, packing=packing, **(settings or {}))
        share, microbatches, loss_fn, counts = train_arguments(layout)
        engine.compute_gradients(fetch(engine, share, loss_fn), microbatches, loss_fn, counts)
        gradients = whole_gradients(engine)
        results.append((gradients, engine.optimizer.compute_grad_norm()))
    return results


def hf_loss(model: torch.nn.Module) -> Tensor:
    """The policy-gradient loss at ratio 1, one sequence at a time."""
    batch = make_batch()
    tokens, total = batch.fields, torch.zeros(())
    columns = (tokens.token_ids.long(), tokens.loss_mask, tokens.advantages)
    for ids, mask, advantages in zip(*(column.split(batch.lengths) for column in columns), strict=True):
        logits = model(ids[None], use_cache=False).logits[0, :-1] / 0.8
        logprobs = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total - (logprobs * advantages[1:] * mask[1:]).sum()
    return total / tokens.loss_mask.sum()


def expect_gradients_of_transformers(
    by_rank: list[list[tuple[dict[str, Tensor], float]]],
    models: list[TinyModel],
    tolerance: float,
    loss: Callable[[torch.nn.Module], Tensor] = hf_loss,
) -> None:
    """What `gradients_on_rank` returned on every rank against backward() in transformers, relative to each norm."""
    for index, tiny in enumerate(models):
        model = tiny.load()
        loss(model).backward()
        # transformers stacks experts, and its files, whose names `actual` has, do not.
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if ".indexer." not in name}
        expected = revert_weight_conversion(model, gradients)
        actual = merge([results[index][0] for results in by_rank])
        # Biases of expert selection and indexers are exported, and have no gradient.
        without = {name for name in actual if name.endswith("e_score_correction_bias") or ".indexer." in name}
        without |= dict(model.named_buffers()).keys()
        assert actual.keys() - without == expected.keys()
        norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
        for name, gradient in expected.items():
            error = (actual[name] - gradient).norm() / gradient.norm().clamp(min=LEAST_SHARE * norm)
            assert error < tolerance, f"{tiny.name} {name}: relative error {error:.1e}"
        for results in by_rank:
            assert results[index][1] == pytest.approx(norm, rel=tolerance), tiny.name
