"""Forward passes of wrong trainers, and changes of the log-probabilities that a trainer computes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.planted.plants import Column
from tests.support.recorded_runs import alone

PACK = 4
"""Sequences of each pack."""


def leaking(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Packed sequences that see those before them in their pack; positions begin anew in each."""
    logits: list[Tensor] = []
    for start in range(0, len(sequences), PACK):
        pack = sequences[start : start + PACK]
        ids = torch.tensor([token for sequence in pack for token in sequence])
        positions = torch.cat([torch.arange(len(sequence)) for sequence in pack])
        mask = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool).tril()
        full_logits = model(ids[None], position_ids=positions[None], attention_mask=mask).logits[0]
        logits += full_logits.split([len(sequence) for sequence in pack])
    return logits


def cut_contexts(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """The second context-parallel half of a sequence does not see the first."""
    results = []
    for ids in sequences:
        middle, positions = len(ids) // 2, torch.arange(len(ids))[None]
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        mask[middle:, :middle] = False
        results.append(model(torch.tensor([ids]), position_ids=positions, attention_mask=mask[None, None]).logits[0])
    return results


def shards_exchanged(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Logits of the two halves of the vocabulary in each other's place."""
    results = []
    for logits in alone(model, sequences):
        half = (logits.shape[-1] + 1) // 2
        padded = torch.nn.functional.pad(logits, (0, 2 * half - logits.shape[-1]), value=-30.0)
        results.append(padded.roll(half, -1)[:, : logits.shape[-1]])
    return results


def with_dropout(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """A pass in which attention drops a tenth of its weights."""
    torch.manual_seed(0)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return alone(model, sequences)


def gap_in_positions(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Responses, here the last 12 tokens, have positions as if padding stood before them."""
    results = []
    for ids in sequences:
        positions = torch.arange(len(ids))
        positions[max(len(ids) - 12, 0) :] += 9
        mask = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool).tril()
        results.append(model(torch.tensor([ids]), position_ids=positions[None], attention_mask=mask).logits[0])
    return results


def odd_rows_off(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """One replica of two computes a layer otherwise."""
    right = alone(model, sequences)
    model.model.layers[1].mlp.down_proj.weight.data.mul_(0.8)
    return [right[row] if row % 2 == 0 else wrong for row, wrong in enumerate(alone(model, sequences))]


def shift_tokens(column: Column) -> Column:
    """Each token has the log-probability of the next one."""
    return [np.roll(array, -1) for array in column]


def exchanged_prev(column: Column) -> Column:
    """The trainer's values of the same two rollouts in each other's place."""
    changed = list(column)
    changed[1], changed[7] = column[7], column[1]
    return changed


def shifted_row_of_trainer(column: Column) -> Column:
    return [np.roll(array, 1) if row == 3 else array for row, array in enumerate(column)]
