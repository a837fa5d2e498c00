"""Trainers that are wrong, and records that were changed after the run, for the doctor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_grpo.batch.rollout_files import locate_rollouts_file
from megatron_grpo.batch.trajectory import Span, Trajectory
from tests.support.planted import Case, Column, Plant, record, trainer
from tests.support.planted_engines import STALE, WEIGHTS, exchanged, old, scaled
from tests.support.recorded_runs import RecordedRun, alone

LAYOUT = frozenset({"layout", "packing", "layer", "staleness"})
RECORD = frozenset({"tokens", "record"})
PACK = 4
"""Sequences of each pack."""


def leaking(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Packed sequences that see those before them in their pack; positions begin anew in each."""
    logits: list[Tensor] = []
    for start in range(0, len(sequences), PACK):
        pack = sequences[start : start + PACK]
        ids = torch.tensor([token for one in pack for token in one])
        positions = torch.cat([torch.arange(len(one)) for one in pack])
        mask = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool).tril()
        whole = model(ids[None], position_ids=positions[None], attention_mask=mask).logits[0]
        logits += whole.split([len(one) for one in pack])
    return logits


def cut_contexts(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """The second context-parallel half of a sequence does not see the first."""
    found = []
    for ids in sequences:
        middle, positions = len(ids) // 2, torch.arange(len(ids))[None]
        mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
        mask[middle:, :middle] = False
        found.append(model(torch.tensor([ids]), position_ids=positions, attention_mask=mask[None, None]).logits[0])
    return found


def shards_exchanged(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Logits of the two halves of the vocabulary in each other's place."""
    found = []
    for logits in alone(model, sequences):
        half = (logits.shape[-1] + 1) // 2
        padded = torch.nn.functional.pad(logits, (0, 2 * half - logits.shape[-1]), value=-30.0)
        found.append(padded.roll(half, -1)[:, : logits.shape[-1]])
    return found


def with_dropout(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """A pass in which attention drops a tenth of its weights."""
    torch.manual_seed(0)
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    return alone(model, sequences)


def shifted(column: Column) -> Column:
    """Each token has the log-probability of the next one."""
    return [np.roll(one, -1) for one in column]


OF_TRAINER = "trainer"
TRAINERS: Sequence[Case] = (
    Case("packed sequences leak", "llama", trainer(recorded=False, forward=leaking), LAYOUT, ("layout|pack", "replay")),
    Case(
        "packed sequences leak, recorded",
        "llama",
        trainer(recorded=True, forward=leaking),
        LAYOUT,
        (OF_TRAINER, "layout|pack", "replay"),
    ),
    Case(
        "context-parallel halves",
        "llama",
        trainer(recorded=False, forward=cut_contexts),
        LAYOUT,
        ("layout|pack", "replay"),
    ),
    Case(
        "shards of the vocabulary exchanged",
        "dense",
        trainer(recorded=False, forward=shards_exchanged),
        LAYOUT,
        ("layout|pack", "replay"),
    ),
    Case(
        "shards of experts exchanged",
        "experts",
        trainer(recorded=False, edit=exchanged("mlp.experts.0.", "mlp.experts.2.")),
        LAYOUT,
        ("layout|pack", "replay"),
    ),
    Case(
        "stage of the trainer a version behind",
        "dense",
        trainer(recorded=True, edit=old(".layers.2.", ".layers.3.", "model.norm", "lm_head"), stale=True),
        STALE,
        (OF_TRAINER, r"stage|layers 2|layers\.2", "version 1"),
        r"layers\.[23]\.|model\.norm|lm_head",
    ),
    Case(
        "a matrix of the trainer, in its layout alone",
        "dense",
        trainer(recorded=False, edit=scaled(1.2, "layers.1.mlp.up_proj")),
        LAYOUT,
        ("layout|pack", "replay"),
    ),
    Case(
        "stale head of the trainer",
        "dense",
        trainer(recorded=True, edit=old("lm_head"), stale=True),
        WEIGHTS,
        (OF_TRAINER, "lm_head", "version 1"),
        "lm_head",
    ),
    Case(
        "log-probabilities of the next token",
        "dense",
        trainer(recorded=True, change=shifted),
        RECORD | {"layer", "layout"},
        (OF_TRAINER, "next|shift|one token|by one"),
        must=False,
    ),
    Case(
        "temperature not applied, not recorded",
        "colder",
        trainer(recorded=False, temperature=1.0),
        LAYOUT | {"sampling"},
        ("replay|temperature",),
    ),
    Case("dropout", "dense", trainer(recorded=True, forward=with_dropout), LAYOUT, (OF_TRAINER,), must=False),
    Case(
        "trainer in bfloat16 in a run of float32",
        "dense",
        trainer(recorded=True, dtype=torch.bfloat16),
        frozenset({"precision"}),
        (OF_TRAINER, "bfloat16|precision"),
    ),
)
"""Wrong trainers."""


def of_row(number: int, change: Callable[[Trajectory], Trajectory]) -> Callable[[list[Trajectory]], list[Trajectory]]:
    """The rollouts with one of them changed."""
    return lambda rollouts: [change(one) if place == number else one for place, one in enumerate(rollouts)]


def other_token(one: Trajectory) -> Trajectory:
    """The sampled token at index 5 is another."""
    ids = one.token_ids.copy()
    ids[one.spans[0].start + 5] = 30 + (ids[one.spans[0].start + 5] - 29) % 60
    return replace(one, token_ids=ids)


def other_logprob(one: Trajectory) -> Trajectory:
    """The log-probability of the sampled token at index 5 is another."""
    logprobs = one.logprobs.copy()
    logprobs[5] -= 0.7
    return replace(one, logprobs=logprobs)


def shifted_row(one: Trajectory) -> Trajectory:
    return replace(one, logprobs=np.roll(one.logprobs, 1))


def other_prompt(one: Trajectory) -> Trajectory:
    ids = one.token_ids.copy()
    ids[3:6] = ids[6:9]
    return replace(one, token_ids=ids)


def exchanged_logprobs(rollouts: list[Trajectory]) -> list[Trajectory]:
    """Rollouts of row 0 and of row 3, sample 1 of each, with each other's log-probabilities."""
    one, other = rollouts[1], rollouts[7]
    changed = list(rollouts)
    shorter = min(len(one.logprobs), len(other.logprobs))
    for place, to, source in ((1, one, other), (7, other, one)):
        logprobs = to.logprobs.copy()
        logprobs[:shorter] = source.logprobs[:shorter]
        changed[place] = replace(to, logprobs=logprobs)
    return changed


def exchanged_prev(column: Column) -> Column:
    """The trainer's values of the same two rollouts in each other's place."""
    changed = list(column)
    changed[1], changed[7] = column[7], column[1]
    return changed


def two_digits(rollouts: list[Trajectory]) -> list[Trajectory]:
    return [replace(one, logprobs=one.logprobs.round(2)) for one in rollouts]


def of_version_before(rollouts: list[Trajectory]) -> list[Trajectory]:
    spans = [[Span(span.start, span.end, span.version - 1) for span in one.spans] for one in rollouts]
    return [replace(one, spans=own) for one, own in zip(rollouts, spans, strict=True)]


def cut_file(run: RecordedRun) -> None:
    """The file of the newest step ends in its middle."""
    record(lambda rollouts: rollouts)(run)
    file = locate_rollouts_file(run.run_dir, len(run.versions))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _record(
    name: str,
    edit: Callable[[list[Trajectory]], list[Trajectory]],
    *words: str,
    must: bool = True,
    causes: Any = RECORD,
) -> Case:
    plant: Plant = record(edit)
    return Case(name, "dense", plant, frozenset(causes), words, "$^", must)


ROW = r"prompt {}, sample {}".format
RECORDS: Sequence[Case] = (
    _record("a token edited", of_row(4, other_token), ROW(2, 0), "token [56]"),
    _record("a log-probability edited", of_row(4, other_logprob), ROW(2, 0), "token [56]"),
    _record("log-probabilities of two rollouts exchanged", exchanged_logprobs, ROW(0, 1), ROW(3, 1)),
    Case(
        "the trainer's log-probabilities of two rollouts exchanged",
        "dense",
        trainer(recorded=True, change=exchanged_prev),
        RECORD,
        (ROW(0, 1), ROW(3, 1)),
        "$^",
    ),
    _record("log-probabilities rounded to two digits", two_digits, "round|digits|decimal"),
    _record("log-probabilities of a rollout shifted", of_row(4, shifted_row), ROW(2, 0)),
    _record("a prompt edited", of_row(4, other_prompt), ROW(2, 0)),
    _record("a rollout missing", lambda rollouts: rollouts[:-1], "7 of |missing|lack"),
    _record("version of the spans", of_version_before, "version 2", causes={"staleness", *RECORD}),
    Case("file cut off", "dense", cut_file, RECORD, (r"step_3\.parquet", "damaged|end|truncated|cut")),
)
"""Records that were changed."""
