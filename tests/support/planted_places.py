"""Defects of weights and settings in single places that other cases leave out, for the doctor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support.planted import Case, Edit, Tensors, engine, trainer
from tests.support.planted_engines import LAYER, OF_MODEL, STALE, WEIGHTS, adapters_times, old, scaled
from tests.support.planted_more import both
from tests.support.planted_orders import EMBED, PARTS_OF, exchanged_rows, prepared, reordered
from tests.support.planted_others import LAYOUT
from tests.support.planted_parts import head_times

HEAD = "lm_head.weight"
UNTIED = {"tie_word_embeddings": False}


def untied(edit: Edit) -> Edit:
    """An engine that copied the tied weights before one of the two went wrong."""

    def change(now: Tensors, before: Tensors) -> Tensors:
        return edit(now | {HEAD: now[EMBED].clone()}, before)

    return change


def with_norm_epsilon(path: str, epsilon: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.get_submodule(path).variance_epsilon = epsilon

    return change


def rows_zeroed(name: str, rows: slice) -> Edit:
    def edit(now: Tensors, _: Tensors) -> Tensors:
        value = now[name].clone()
        value[rows] = 0.0
        return now | {name: value}

    return edit


def shard_of_before(name: str, rank: int, size: int) -> Edit:
    def edit(now: Tensors, before: Tensors) -> Tensors:
        shards = list(now[name].chunk(size))
        shards[rank] = before[name].chunk(size)[rank]
        return now | {name: torch.cat(shards)}

    return edit


def layers_in_circle(numbers: Sequence[int]) -> Edit:
    def edit(now: Tensors, _: Tensors) -> Tensors:
        changed = dict(now)
        for place, source in zip(numbers, [*numbers[1:], numbers[0]], strict=True):
            for name in now:
                if f".layers.{place}." in name:
                    changed[name] = now[name.replace(f".layers.{place}.", f".layers.{source}.")]
        return changed

    return edit


PLACES: Sequence[Case] = (
    Case(
        "three rows of the embedding in a circle",
        "llama",
        engine(exchanged_rows(EMBED, [(72, 87), (87, 80)])),
        WEIGHTS,
        ("rows", "embed_tokens"),
        "embed_tokens",
        must=False,
    ),
    Case(
        "eight blocks of a matrix in any order",
        "llama",
        engine(reordered(PARTS_OF(1, "mlp.down_proj"), (3, 0, 6, 1, 7, 2, 5, 4))),
        WEIGHTS,
        ("block|row", r"layers\.1\.mlp\.down_proj"),
        r"layers\.1\.mlp\.down_proj",
        must=False,
    ),
    Case(
        "eight blocks of columns of an output projection in any order",
        "dense",
        engine(reordered(PARTS_OF(1, "self_attn.o_proj"), (3, 0, 6, 1, 7, 2, 5, 4), 1)),
        WEIGHTS,
        ("block|column", r"layers\.1\.self_attn\.o_proj"),
        r"layers\.1\.self_attn\.o_proj",
        must=False,
    ),
    Case(
        "one value head at 60%",
        "dense",
        engine(head_times(0.6, PARTS_OF(1, "self_attn.v_proj"), 1, heads=2)),
        WEIGHTS,
        ("head 1", r"layers\.1\.self_attn\.v_proj", r"0\.6"),
        r"layers\.1\.self_attn\.v_proj",
    ),
    Case(
        "sign of the output projections of a stage",
        "llama",
        engine(both(scaled(-1.0, "layers.2.self_attn.o_proj"), scaled(-1.0, "layers.3.self_attn.o_proj"))),
        WEIGHTS,
        ("sign|-1", "o_proj|v_proj", "stage 1 of 2"),
        r"self_attn\.[ov]_proj",
    ),
    Case(
        "epsilon of the norm of queries of one layer",
        "dense",
        prepared(with_norm_epsilon("model.layers.2.self_attn.q_norm", 0.1)),
        OF_MODEL,
        (r"layers\.2\.self_attn\.[qk]_norm|layer 2", r"epsilon of 0\.1|\d"),
        r"layers\.2\.self_attn\.[qk]_(norm|proj)",
    ),
    Case(
        "epsilon of the last norm",
        "llama",
        prepared(with_norm_epsilon("model.norm", 0.02)),
        OF_MODEL,
        (r"model\.norm", r"0\.02"),
        r"model\.norm",
    ),
    Case(
        "matrix two versions back",
        "dense",
        engine(old("layers.3.mlp.gate_proj"), against=-3, stale=True),
        WEIGHTS,
        (r"layers\.3\.mlp\.gate_proj", "version 0"),
        r"layers\.3\.mlp\.gate_proj",
    ),
    Case(
        "adapters of one layer a version behind",
        "adapters",
        engine(old(".layers.2."), stale=True),
        STALE,
        (LAYER(2), "version 1|adapter"),
        r"layers\.2\.",
    ),
    Case(
        "adapters of one projection of one layer twice",
        "adapters",
        engine(adapters_times(2, "layers.1.mlp.down_proj"), against=0),
        WEIGHTS,
        ("adapter", r"layers\.1\.mlp\.down_proj", r"\b2\b"),
        r"layers\.1\.mlp\.down_proj",
    ),
    Case(
        "tied head untied and 10% off",
        "tied",
        engine(untied(scaled(1.1, "lm_head")), config=UNTIED),
        WEIGHTS | {"sampling"},
        ("head", r"1\.1|0\.909"),
        "lm_head|embed_tokens|model.norm",
    ),
    Case(
        "two rows of a tied embedding alone",
        "tied",
        engine(untied(exchanged_rows(EMBED, [(72, 87)])), config=UNTIED),
        WEIGHTS,
        ("rows", "embed_tokens"),
        "embed_tokens",
        must=False,
    ),
    Case(
        "two rows of a tied embedding and its head",
        "tied",
        engine(exchanged_rows(EMBED, [(72, 87)])),
        WEIGHTS,
        ("rows", "embed_tokens"),
        "embed_tokens",
        must=False,
    ),
    Case(
        "two channels of the embedding",
        "llama",
        engine(exchanged_rows(EMBED, [(5, 30)], 1)),
        WEIGHTS,
        ("columns", "embed_tokens", "30 in the place of 5"),
        "embed_tokens",
        must=False,
    ),
    Case(
        "two channels of the head",
        "dense",
        engine(exchanged_rows(HEAD, [(5, 30)], 1)),
        WEIGHTS,
        ("columns", "lm_head", "30 in the place of 5"),
        "lm_head",
        must=False,
    ),
    Case(
        "two channels of a norm",
        "llama",
        engine(exchanged_rows("model.layers.2.input_layernorm.weight", [(3, 40)])),
        WEIGHTS,
        (r"layers\.2\.input_layernorm",),
        r"layers\.2\.input_layernorm",
        must=False,
    ),
    Case(
        "biases of two query heads",
        "biases",
        engine(reordered("model.layers.1.self_attn.q_proj.bias", (0, 2, 1, 3))),
        WEIGHTS,
        (r"layers\.1\.self_attn\.q_proj\.bias",),
        r"layers\.1\.self_attn\.q_proj",
        must=False,
    ),
    Case(
        "last eighth of a matrix empty",
        "llama",
        engine(rows_zeroed(PARTS_OF(2, "mlp.up_proj"), slice(-12, None))),
        WEIGHTS,
        (r"layers\.2\.mlp\.(up|gate|down)_proj",),
        r"layers\.2\.mlp\.(up|gate|down)_proj",
    ),
    Case(
        "a rank's quarter of a matrix a version behind",
        "dense",
        engine(shard_of_before(PARTS_OF(1, "mlp.gate_proj"), 2, 4), stale=True),
        WEIGHTS,
        ("rank 2 of 4", r"layers\.1\.mlp\.gate_proj", "version 1"),
        r"layers\.1\.mlp\.gate_proj",
    ),
    Case(
        "layers in a circle",
        "dense",
        engine(layers_in_circle((1, 2, 3))),
        WEIGHTS,
        ("layer",),
        r"layers\.[123]\.",
        must=False,
    ),
    Case(
        "key heads of every layer in each other's place",
        "llama",
        engine(both(*(reordered(PARTS_OF(number, "self_attn.k_proj"), (1, 0)) for number in range(4)))),
        WEIGHTS,
        ("heads", "k_proj", "every layer"),
        r"self_attn\.k_proj",
    ),
    Case(
        "router of one layer 30% off",
        "experts",
        engine(scaled(1.3, "layers.3.mlp.gate.")),
        WEIGHTS,
        (r"layers\.3\.mlp\.gate", r"1\.3"),
        r"layers\.3\.mlp\.gate",
    ),
    Case(
        "one expert of one layer a version behind",
        "experts",
        engine(old("layers.2.mlp.experts.3."), stale=True),
        WEIGHTS,
        (r"layers\.2\.mlp\.experts\.3", "version 0"),
        r"layers\.2\.mlp\.experts",
    ),
    Case(
        "queries of one layer of the trainer 30% off",
        "llama",
        trainer(recorded=True, edit=scaled(1.3, "layers.1.self_attn.q_proj")),
        WEIGHTS | LAYOUT | OF_MODEL,
        ("trainer", r"layers\.1\.self_attn\.[qk]_proj", r"1\.3"),
        r"layers\.1\.self_attn\.[qk]_proj",
    ),
    Case(
        "trainer two versions behind",
        "dense",
        trainer(recorded=True, edit=old(".layers.3.", "model.norm", "lm_head"), stale=True),
        STALE,
        ("trainer", "version"),
        r"layers\.3\.|model\.norm|lm_head",
        must=False,
    ),
)
