"""Defects of packed runs, turns, asynchronous runs and latent attention, and changes of columns, for the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_grpo.batch.rollout_files import locate_rollouts_file
from megatron_grpo.batch.trajectory import Span, Trajectory
from tests.support.planted import Case, Column, Tensors, changed_folder, engine, record, trainer, write
from tests.support.planted_engines import (
    LAYER,
    OF_MODEL,
    SAMPLING,
    STALE,
    WEIGHTS,
    exchanged,
    halves_exchanged,
    likeliest,
    old,
    scaled,
)
from tests.support.planted_healthy import FIRST, with_answer
from tests.support.planted_more import ones
from tests.support.planted_others import LAYOUT, RECORD, ROW, leaking, of_row
from tests.support.recorded_runs import RecordedRun, sampled, scored


def gate_and_up_mixed(now: Tensors, _: Tensors) -> Tensors:
    """The second halves of gate and up, one tensor-parallel rank's share, in each other's place in layer 1."""
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    (first, second), (third, fourth) = now[gate].chunk(2), now[up].chunk(2)
    return now | {gate: torch.cat([first, fourth]), up: torch.cat([third, second])}


def stale_in_second_version(run: RecordedRun) -> None:
    """Weights change within each response, and the engine keeps one matrix of the earlier version."""
    version = len(run.versions) - 1
    wrong = changed_folder(run, old("layers.2.mlp.down_proj"), None)
    later = AutoModelForCausalLM.from_pretrained(wrong, dtype=torch.float32).eval()

    def forward(model: Any, ids: list[int], prompt: int) -> Tensor:
        logits: Tensor = (model if len(ids) - prompt < FIRST else later)(torch.tensor([ids])).logits[0, -1].float()
        return logits

    def in_two(one: Trajectory) -> Trajectory:
        ((start, end, _),) = one.spans
        middle = min(start + FIRST, end)
        spans = [Span(start, middle, version - 1), Span(middle, end, version)]
        return replace(one, spans=[span for span in spans if span.end > span.start])

    drawn = [in_two(one) for one in sampled(run.versions[version - 1], run.prompts(), forward=forward)]
    write(run, drawn, scored(run.versions[version], drawn), recorded=False, stale=True)


def stale_in_turns(run: RecordedRun) -> None:
    """Two turns in each response, from an engine whose head is a version behind."""
    version = len(run.versions) - 1
    wrong = changed_folder(run, old("lm_head"), None)
    drawn = with_answer(run, wrong, version)
    write(run, drawn, scored(run.versions[version], drawn), recorded=False, stale=True)


def shifted_row_of_trainer(column: Column) -> Column:
    return [np.roll(one, 1) if row == 3 else one for row, one in enumerate(column)]


def other_numbers(one: Trajectory) -> Trajectory:
    """Every sampled token has the next number, as with another vocabulary."""
    ids, start = one.token_ids.copy(), one.spans[0].start
    ids[start:] = np.minimum(ids[start:] + 1, 97)
    return replace(one, token_ids=ids)


def clipped(rollouts: list[Trajectory]) -> list[Trajectory]:
    return [replace(one, logprobs=np.maximum(one.logprobs, -4.0)) for one in rollouts]


def exchanged_tokens(one: Trajectory) -> Trajectory:
    """Two neighbouring tokens in each other's place."""
    ids, start = one.token_ids.copy(), one.spans[0].start
    first = next(at for at in range(start + 3, len(ids) - 1) if ids[at] != ids[at + 1])
    ids[first], ids[first + 1] = ids[first + 1], ids[first]
    return replace(one, token_ids=ids)


def not_a_number(one: Trajectory) -> Trajectory:
    logprobs = one.logprobs.copy()
    logprobs[4] = np.nan
    return replace(one, logprobs=logprobs)


def rotated(rollouts: list[Trajectory]) -> list[Trajectory]:
    """Every rollout of 12 tokens has the log-probabilities of the next such one."""
    whole = [place for place, one in enumerate(rollouts) if len(one.logprobs) == 12]
    changed = list(rollouts)
    for place, source in zip(whole, [*whole[1:], whole[0]], strict=True):
        changed[place] = replace(rollouts[place], logprobs=rollouts[source].logprobs)
    return changed


def of_base_ten(rollouts: list[Trajectory]) -> list[Trajectory]:
    return [replace(one, logprobs=one.logprobs / np.float32(np.log(10))) for one in rollouts]


def repeated(rollouts: list[Trajectory]) -> list[Trajectory]:
    """The last rollout is the one before it again."""
    return [*rollouts[:-1], rollouts[-2]]


def late_spans(one: Trajectory) -> Trajectory:
    """The span begins a token late, and the prompt is a token longer."""
    ((start, end, version),) = one.spans
    return replace(one, spans=[Span(start + 1, end, version)], logprobs=one.logprobs[:-1])


def empty_file(run: RecordedRun) -> None:
    record(lambda rollouts: rollouts)(run)
    locate_rollouts_file(run.run_dir, len(run.versions)).write_bytes(b"")


LAST: Sequence[Case] = (
    Case(
        "another epsilon that engine_args say",
        "llama",
        engine(config={"rms_norm_eps": 1e-2}),
        OF_MODEL,
        (r"^(?!.*name_or_path).*hf_overrides\.rms_norm_eps",),
        "$^",
        overrides=("generation.engine_args.hf_overrides={rms_norm_eps: 0.01}",),
    ),
    Case(
        "matrix 2% off",
        "llama",
        engine(scaled(1.02, "layers.3.self_attn.q_proj")),
        WEIGHTS,
        (r"layers\.3\.self_attn\.[qk]_proj", r"1\.02|2(\.0)?%"),
        r"layers\.3\.self_attn\.[qk]_proj",  # queries and keys are multiplied
    ),
    Case(
        "stale norm after the feed-forward network",
        "gemma",
        engine(old("layers.1.post_feedforward_layernorm"), stale=True),
        WEIGHTS,
        (r"layers\.1\.post_feedforward_layernorm", "version 0"),
        r"layers\.1\.post_feedforward_layernorm",
    ),
    Case(
        "norms of all queries missing",
        "dense",
        engine(ones("q_norm")),
        OF_MODEL,
        ("q_norm|quer", "every|all|norm"),
        "[qk]_norm",
    ),
    Case(
        "shards of latent keys exchanged",
        "shared experts",
        engine(halves_exchanged("model.layers.2.self_attn.kv_b_proj.weight", 0)),
        WEIGHTS,
        ("kv_b_proj|heads", LAYER(2)),
        r"layers\.2\.self_attn",
        must=False,
    ),
    Case(
        "gate and up of one expert exchanged",
        "experts",
        engine(exchanged("layers.3.mlp.experts.1.gate_proj", "layers.3.mlp.experts.1.up_proj")),
        WEIGHTS,
        ("gate", "up", LAYER(3), r"\b1\b"),
        r"layers\.3\.mlp",
        must=False,
    ),
    Case(
        "biases of keys and values exchanged",
        "biases",
        engine(exchanged("layers.2.self_attn.k_proj.bias", "layers.2.self_attn.v_proj.bias")),
        WEIGHTS,
        ("bias|k_proj", LAYER(2)),
        r"layers\.2\.self_attn\.[kv]_proj",
        must=False,
    ),
    Case(
        "gate and up mixed by shards",
        "llama",
        engine(gate_and_up_mixed),
        WEIGHTS,
        ("gate|up|shard", LAYER(1)),
        r"layers\.1\.mlp",
        must=False,
    ),
    Case("top_k beside a temperature", "colder", engine(choose=likeliest(10)), SAMPLING, ("top_k",), "$^"),
    Case(
        "final norm missing in bfloat16",
        "bfloat16",
        engine(ones("model.norm")),
        OF_MODEL,
        (r"model\.norm",),
        r"model\.norm",
    ),
    Case(
        "stale matrix after a change of version",
        "dense",
        stale_in_second_version,
        WEIGHTS,
        (r"layers\.2\.mlp\.down_proj",),
    ),
    Case("stale head in two turns", "dense", stale_in_turns, WEIGHTS, ("lm_head", "version 1"), "lm_head"),
    Case(
        "packed sequences leak in bfloat16",
        "bfloat16",
        trainer(recorded=True, forward=leaking, dtype=torch.bfloat16),
        LAYOUT,
        ("trainer", "pack"),
    ),
    Case(
        "packed sequences of experts leak",
        "experts",
        trainer(recorded=False, forward=leaking),
        LAYOUT,
        ("pack|layout", "replay"),
    ),
    Case(
        "a rollout of the trainer shifted",
        "dense",
        trainer(recorded=True, change=shifted_row_of_trainer),
        RECORD | LAYOUT,
        ("trainer", ROW(1, 1)),
        "$^",
    ),
    Case("a rollout with other token numbers", "dense", record(of_row(6, other_numbers)), RECORD, (ROW(3, 0),), "$^"),
    Case("log-probabilities cut off at -4", "dense", record(clipped), RECORD, ("-4|clip|cut",), "$^", must=False),
    Case(
        "first layer of the trainer a version behind",
        "biases",
        trainer(recorded=True, edit=old(".layers.0."), stale=True),
        STALE,
        ("trainer", LAYER(0), "version 0"),
        r"layers\.0\.",
    ),
    Case("two tokens exchanged", "dense", record(of_row(2, exchanged_tokens)), RECORD, (ROW(1, 0),), "$^"),
    Case("a log-probability that is no number", "dense", record(of_row(6, not_a_number)), RECORD, (ROW(3, 0),), "$^"),
    Case(
        "log-probabilities of all rollouts rotated",
        "dense",
        record(rotated),
        RECORD,
        ("exchange|permut|(an)?other rollout|order",),
        "$^",
        must=False,
    ),
    Case(
        "log-probabilities of base ten",
        "dense",
        record(of_base_ten),
        RECORD | SAMPLING,
        ("base|scale|factor|log",),
        "$^",
        False,
    ),
    Case("a rollout twice", "dense", record(repeated), RECORD, ("(prompt|group) 3",), "$^"),
    Case("a span that begins late", "dense", record(of_row(3, late_spans)), RECORD, (ROW(1, 1),), "$^"),
    Case("empty file", "dense", empty_file, RECORD, (r"step_3\.parquet",)),
)
