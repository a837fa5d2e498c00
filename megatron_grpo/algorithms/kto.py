"""Kahneman-Tversky Optimization (Ethayarajh et al. 2024): the policy learns which single responses are desirable.

The steps are DPO's (dpo.py). The loss compares each response's gain over the reference policy with a reference point,
the mean gain of responses to other prompts, never below 0. Each prompt gets the response of the row before it for that,
over all rows of the step and before they are shared out: the point is one number, whatever the layout and microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_grpo.algorithms.dpo import PreferenceRun, dpo_step
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.supervised import make_batch
from megatron_grpo.algorithms.token_functions import sum_over_sampled
from megatron_grpo.config.loop_schema import KTOConfig
from megatron_grpo.data.processors import DatumSpec, Message
from megatron_grpo.data.supervised_rows import ASSISTANT
from megatron_grpo.losses.preference import PreferenceLoss, compute_label_loss

__all__ = ["KTORun", "kto_train"]


class KTORun(PreferenceRun):
    """A run that learns from labelled responses, or pairs."""

    def compute_loss(
        self, outputs: Sequence[Tensor], tokens: Tensor, weights: Tensor, rows: Sequence[DatumSpec]
    ) -> PreferenceLoss:
        """Compute the loss of responses and labels."""
        loop = self.config.loop
        assert isinstance(loop, KTOConfig)
        labels = torch.tensor([[True, False] if "rejected" in row else [row["label"]] for row in rows])
        point = self.measure_reference_point([rows[number] for number in weights.nonzero()[:, 0].tolist()])
        policy, reference = outputs
        return compute_label_loss(policy, reference, labels, weights, point, loop)

    def measure_reference_point(self, rows: Sequence[DatumSpec]) -> float:
        """Measure the mean gain of responses to other prompts.

        0 without other rows.
        """
        if len(rows) < 2:
            return 0.0
        longest, replicas = self.config.policy.max_total_sequence_length, self.config.policy.parallel.data
        earlier_rows = [rows[-1], *rows[:-1]]
        exchanged = [exchange_responses(*pair, longest) for pair in zip(rows, earlier_rows, strict=True)]
        # Every replica has a sequence: the first row is repeated for those without, and not counted again.
        padding = exchanged[:1] * (-len(rows) % replicas)
        batch, check = make_batch(self, exchanged + padding)
        gains = torch.zeros(len(batch), dtype=torch.float64)
        for field, sign in zip(self.outputs, (1, -1), strict=True):
            check.require_finite(field, self.policy.add_field(batch, field), batch)
            sums = self.rollouts.compute(sum_over_sampled, batch, ("sampled", field), field)
            gains += sign * torch.from_numpy(sums)
        return max(0.0, gains.view(len(exchanged + padding), -1)[: len(rows)].mean().item())


def kto_train(run: KTORun) -> None:
    """Train until a limit or the data's end."""
    train_steps(run, dpo_step)


def exchange_responses(row: DatumSpec, source: DatumSpec, longest: int) -> DatumSpec:
    """Give a row another's responses, cut at `longest` tokens."""
    exchanged: DatumSpec = {**row, "message_log": _join(row["message_log"], source["message_log"], longest)}
    if "rejected" in row:
        exchanged["rejected"] = _join(row["rejected"], source["rejected"], longest)
    return exchanged


def _join(conversation: Sequence[Message], source: Sequence[Message], longest: int) -> list[Message]:
    prompt, response = conversation[: _find_response(conversation)], source[_find_response(source) :]
    return list(_cut([*prompt, *response], longest))


def _find_response(conversation: Sequence[Message]) -> int:
    return next(number for number, message in enumerate(conversation) if message["role"] == ASSISTANT)


def _cut(messages: Sequence[Message], longest: int) -> Iterator[Message]:
    for message in messages:
        if longest > 0:
            yield {**message, "token_ids": message["token_ids"][:longest]}
        longest -= len(message["token_ids"])
