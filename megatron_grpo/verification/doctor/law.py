"""The distribution that tokens are drawn from, and the sequences whose tokens were drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_grpo.config.generation_schema import FILTERS, PENALTIES
from megatron_grpo.config.schema import Config

GREEDY = 1e-5
"""vLLM samples greedily below this temperature, and then does not divide the logits."""


LARGEST = 40.0
"""Differences are clipped to this size, as in the metrics of a step (docs/observing.md)."""


def compute_residual(recorded: Tensor, predicted: Tensor) -> Tensor:
    """Absolute differences, [tokens], float32; `LARGEST` where they are not finite."""
    return (recorded - predicted).nan_to_num(LARGEST, LARGEST, -LARGEST).abs().clamp(max=LARGEST)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A sequence, and those of its tokens whose log-probabilities are computed."""

    ids: Tensor
    """[tokens], int64."""
    chosen: Tensor
    """[chosen tokens], int64, ascending, above 0: positions of the tokens."""
    begins: Tensor
    """[chosen tokens], int64: position at which the response of each token begins; penalties count its tokens."""
    positions: Tensor | None = None
    """[tokens], int64: positions for the rotary embedding; None: 0, 1, 2 and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The distribution that tokens are drawn from: vLLM's options in vLLM's order."""

    temperature: float = 1.0
    top_k: int = 0
    """0: no filter."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    """Numbers that are added to logits, by token id; -inf: the token is never drawn."""
    banned: tuple[int, ...] = ()
    """Tokens that are never drawn among the first `banned_until` tokens of a response, such as its ends."""
    banned_until: int = 0
    cap: float | None = None
    """Largest logit, to which tanh bends them; None: no limit."""
    rounds_logits: bool = False
    """Whether logits are rounded to bfloat16."""

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens that came before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def has_filters(self) -> bool:
        """Whether unlikely tokens are removed."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def compute_logprobs(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """Compute log-probabilities of the chosen tokens.

        Args:
            logits: [chosen tokens, vocabulary], float32, before each chosen token.
            tokens: the sequence.

        Returns:
            [chosen tokens], float32; -inf for a token that a filter removes.
        """
        return self.compute_distribution(logits, tokens).gather(1, tokens.ids[tokens.chosen][:, None])[:, 0]

    def compute_distribution(self, logits: Tensor, tokens: Tokens) -> Tensor:
        """Compute log-probabilities of the vocabulary: [chosen tokens, vocabulary], float32.

        Arguments are those of `compute_logprobs`.
        """
        # The order is vLLM's: bias, penalties, temperature, then min_p, top_k and top_p.
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        if self.rounds_logits:
            logits = logits.bfloat16().float()
        for token, number in self.bias:
            logits = logits.index_add(1, torch.tensor([token]), torch.full((len(logits), 1), number))
        if self.banned_until:
            early = (tokens.chosen - tokens.begins < self.banned_until)[:, None]
            is_banned = torch.zeros(logits.shape[1], dtype=torch.bool)
            is_banned[list(self.banned)] = True
            logits = logits.masked_fill(early & is_banned, -torch.inf)
        if self.has_penalties:
            logits = self._apply_penalties(logits, tokens)
        if self.temperature > GREEDY:
            logits = logits / self.temperature
        if self.has_filters:
            logits = self._filter(logits)
        return logits.log_softmax(-1)

    def _apply_penalties(self, logits: Tensor, tokens: Tokens) -> Tensor:
        # The repetition penalty counts the prompt too, the others only the response.
        occurrences = torch.zeros(len(tokens.ids) + 1, logits.shape[1])
        occurrences[1:].scatter_(1, tokens.ids[:, None], 1.0)
        counts = occurrences.cumsum(0)  # of each token, how often it occurs before a position
        before, response_counts = counts[tokens.chosen], counts[tokens.chosen] - counts[tokens.begins]
        penalty = torch.where(before > 0, self.repetition_penalty, 1.0)
        logits = torch.where(logits > 0, logits / penalty, logits * penalty)
        return logits - self.frequency_penalty * response_counts - self.presence_penalty * (response_counts > 0)

    def _filter(self, logits: Tensor) -> Tensor:
        if self.min_p > 0:
            probabilities = logits.softmax(-1)
            logits = logits.masked_fill(probabilities < self.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
        # As in vLLM, tokens are removed from the low end of an ascending order: at ties another order keeps others.
        values, order = logits.sort(-1)
        if self.top_k:
            values = values.masked_fill(values < values[:, -min(self.top_k, values.shape[1])][:, None], -torch.inf)
        if self.top_p < 1:
            removed = values.softmax(-1).cumsum(-1) <= 1 - self.top_p
            removed[:, -1] = False  # the most likely token always stays
            values = values.masked_fill(removed, -torch.inf)
        return torch.empty_like(logits).scatter_(1, order, values)


OPTIONS = (*FILTERS, *(name for name in PENALTIES if name != "bad_words"))
"""Keys of generation that change the distribution, beside the temperature."""


def build_engine_law(config: Config) -> Law:
    """Build the distribution of the engines; vLLM ignores filters at temperature 0."""
    names = OPTIONS if config.generation.temperature > 0 else set(OPTIONS).difference(FILTERS)
    return _build_law(config, ("temperature", *names))


def build_training_law(config: Config) -> Law:
    """Build the distribution of the log-probabilities in training."""
    return _build_law(config, ("temperature", *(FILTERS if config.generation.has_training_filter else ())))


def _build_law(config: Config, names: Sequence[str]) -> Law:
    values = {name: getattr(config.generation, name) for name in names}
    return Law(**values | {"top_k": values.get("top_k") or 0})
