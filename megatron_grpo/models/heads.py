"""Last layers of models: logits of the next token, values, or scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Head:
    """The last layer of a model: many logits, or a number, a token."""

    label: str  # of the model, for messages
    role: Literal["policy", "value"]  # part of a run that the model plays
    field: Literal["prev_logprobs", "values"]  # its output, in a batch
    distance: int  # tokens from the position of an output to the token that it is about
    is_scalar: bool
    has_bias: bool = False


LOGITS = Head(label="policy", role="policy", field="prev_logprobs", distance=1, is_scalar=False)
# A value is that of the tokens before the one that it is about.
VALUE = Head(label="value model", role="value", field="values", distance=1, is_scalar=True, has_bias=True)
# A score is that of the tokens up to the one that it is about, itself included, as transformers' sequence classifiers.
SCORE = Head(label="reward model", role="policy", field="values", distance=0, is_scalar=True)
# Heads of policies, by `Algorithm.head`.
POLICY_HEADS = {"logits": LOGITS, "score": SCORE}
