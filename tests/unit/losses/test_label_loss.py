"""KTO's loss and gradient against TRL's trainer in float64, and the reference point against its definition."""

from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.algorithms.kto import exchange_responses
from megatron_grpo.config.loop_schema import KTOConfig
from megatron_grpo.losses.preference import compute_label_loss


def compute_with_trl(logprobs: Tensor, reference: Tensor, kl: Tensor, labels: Tensor, config: KTOConfig) -> Tensor:
    """`KTOTrainer`'s loss of responses whose log-probabilities are known: [rows], float64."""
    from trl.trainer.kto_trainer import KTOTrainer

    count = len(logprobs)

    def make_model(values: Tensor) -> Any:
        # One token of the response has its whole log-probability.
        outputs = SimpleNamespace(
            log_probs=values[:, None], entropy=torch.zeros(count, 1), mean_logits=torch.zeros(count, 1)
        )
        return lambda **_: outputs

    batch = {
        "input_ids": torch.zeros(count, 2, dtype=torch.long),
        "completion_mask": torch.ones(count, 2),
        "attention_mask": torch.ones(count, 2),
        "label": labels,
    }
    gathered = SimpleNamespace(device="cpu", gather_for_metrics=lambda value: value)
    trainer: Any = SimpleNamespace(
        model=torch.nn.Module(),
        ref_model=make_model(reference),
        accelerator=gathered,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        calculate_KL=True,
        loss_type="kto",
        beta=config.reference_policy_kl_penalty,
        desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight,
        args=SimpleNamespace(gradient_checkpointing=False, gradient_checkpointing_kwargs=None),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer.model.is_gradient_checkpointing = False
    # The policy's log-probabilities of the exchanged responses less the reference's are `kl`.
    trainer._compute_kl_logps = lambda model, _: torch.zeros_like(kl) if model is trainer.ref_model else kl
    return KTOTrainer._compute_loss(trainer, make_model(logprobs), batch, return_outputs=False)


NUMBERS = st.floats(-30, 30).map(lambda value: round(value, 3))


@settings(max_examples=40)
@given(
    rows=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, st.booleans()), min_size=1, max_size=6),
    weights=st.tuples(st.sampled_from([0.0, 0.5, 1.33]), st.sampled_from([0.3, 1.0])),
)
def test_loss_and_gradient_are_those_of_trl(
    rows: Sequence[tuple[float, float, float, bool]], weights: tuple[float, float]
) -> None:
    config = KTOConfig(reference_policy_kl_penalty=0.3, desirable_weight=weights[0], undesirable_weight=weights[1])
    logprobs, reference, kl = torch.tensor([row[:3] for row in rows], dtype=torch.float64).T
    labels = torch.tensor([row[3] for row in rows])
    logprobs = logprobs.clone().requires_grad_()
    expected = compute_with_trl(logprobs, reference, kl, labels, config)
    (gradient,) = torch.autograd.grad(expected, logprobs)
    point = max(0.0, kl.mean().item())
    columns = [column[:, None] for column in (logprobs.detach(), reference, labels)]
    result = compute_label_loss(*columns, torch.ones(len(rows)).double(), point, config)
    assert result.loss == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(result.gradient[:, 0], gradient, atol=1e-12, rtol=0)
    assert result.metrics["desirable_share"] == pytest.approx(labels.double().mean().item())
    assert ("rewards_chosen_mean" in result.metrics) == bool(labels.any())


def test_pairs_are_two_rows_each_and_weights_are_of_rows() -> None:
    config, generator = KTOConfig(), torch.Generator().manual_seed(3)
    logprobs, reference = torch.randn(2, 3, 2, generator=generator, dtype=torch.float64)
    labels, weights = torch.tensor([[True, False]] * 3), torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
    whole = compute_label_loss(logprobs, reference, labels, weights, 0.2, config)
    flat = [values.reshape(-1, 1) for values in (logprobs, reference, labels)]
    apart = compute_label_loss(*flat, weights.repeat_interleave(2), 0.2, config)
    assert whole.loss == pytest.approx(apart.loss)
    torch.testing.assert_close(whole.gradient.flatten(), apart.gradient.flatten())
    assert torch.equal(whole.gradient[2], torch.zeros(2).double())


def make_log(*parts: tuple[str, list[int]]) -> list[Any]:
    return [{"role": role, "content": "", "token_ids": ids} for role, ids in parts]


def test_a_prompt_gets_all_that_follows_in_the_other_row_and_is_cut_at_the_limit() -> None:
    row: Any = {"idx": 1, "message_log": make_log(("user", [1, 2, 3]), ("assistant", [4]))}
    other: Any = {"message_log": make_log(("user", [9]), ("assistant", [5, 6]), ("user", [7]), ("assistant", [8, 8]))}
    for longest, expected in (
        (9, [[1, 2, 3], [5, 6], [7], [8, 8]]),
        (6, [[1, 2, 3], [5, 6], [7]]),
        (4, [[1, 2, 3], [5]]),
    ):
        exchanged = exchange_responses(row, other, longest)
        assert [message["token_ids"] for message in exchanged["message_log"]] == expected
        assert exchanged["idx"] == 1
