"""Weights in any other order, settings of a single layer, and samples that are copies, for the doctor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.support.planted import Case, Edit, Plant, Tensors, dtype_of, engine, write
from tests.support.planted_engines import LAYER, OF_MODEL, SAMPLING, WEIGHTS, adapters_times, scaled
from tests.support.planted_parts import head_times
from tests.support.recorded_runs import RecordedRun, sampled, scored


def reordered(name: str, order: Sequence[int], dim: int = 0) -> Edit:
    """Equal blocks of a tensor in another order."""

    def edit(now: Tensors, _: Tensors) -> Tensors:
        blocks = now[name].chunk(len(order), dim)
        return now | {name: torch.cat([blocks[number] for number in order], dim)}

    return edit


def exchanged_rows(name: str, pairs: Sequence[tuple[int, int]], dim: int = 0) -> Edit:
    """Some rows of a tensor in each other's place."""

    def edit(now: Tensors, _: Tensors) -> Tensors:
        order = list(range(now[name].shape[dim]))
        for first, second in pairs:
            order[first], order[second] = order[second], order[first]
        return now | {name: now[name].index_select(dim, torch.tensor(order))}

    return edit


def shuffled(name: str) -> Edit:
    """All rows of a tensor in an order that chance drew."""

    def edit(now: Tensors, _: Tensors) -> Tensors:
        order = torch.randperm(len(now[name]), generator=torch.Generator().manual_seed(3))
        return now | {name: now[name][order]}

    return edit


def experts_reordered(layer: int, order: Sequence[int]) -> Edit:
    def edit(now: Tensors, _: Tensors) -> Tensors:
        prefix = f"model.layers.{layer}.mlp.experts"
        return now | {
            f"{prefix}.{place}.{part}_proj.weight": now[f"{prefix}.{number}.{part}_proj.weight"]
            for place, number in enumerate(order)
            for part in ("gate", "up", "down")
        }

    return edit


def prepared(change: Callable[[Any], None]) -> Plant:
    """An engine whose model in transformers is changed before it samples."""
    return engine(prepare=change)


def with_scale(layer: int, factor: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.layers[layer].self_attn.scaling *= factor

    return change


def with_epsilon(layer: int, epsilon: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        model.model.layers[layer].post_attention_layernorm.variance_epsilon = epsilon

    return change


def with_base(layer: int, base: float) -> Callable[[Any], None]:
    """One layer has rotary embeddings of another base, with the usual formula."""

    def change(model: Any) -> None:
        config = model.config
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        frequencies = base ** -(torch.arange(0, width, 2).float() / width)

        def turn(_: Any, inputs: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            length = options["hidden_states"].shape[1]
            angles = torch.outer(torch.arange(length).float(), frequencies).repeat(1, 2)[None]
            return inputs, {**options, "position_embeddings": (angles.cos(), angles.sin())}

        model.model.layers[layer].self_attn.register_forward_pre_hook(turn, with_kwargs=True)

    return change


def equal_samples(run: RecordedRun) -> None:
    """All samples of a prompt are drawn with one seed; weights and numbers are right."""
    version = len(run.versions) - 1
    drawn = sampled(run.versions[version], run.prompts(), version=version, samples=1, dtype=dtype_of(run))
    copies = [replace(one, sample=sample) for one in drawn for sample in range(run.samples)]
    write(run, copies, scored(run.versions[version], copies, dtype=dtype_of(run)), recorded=False)


def half_equal_samples(run: RecordedRun) -> None:
    """Two engines begin with one seed, so the second half of each group repeats the first."""
    version = len(run.versions) - 1
    half = run.samples // 2
    drawn = sampled(run.versions[version], run.prompts(), version=version, samples=half, dtype=dtype_of(run))
    copies = [replace(one, sample=one.sample + half * again) for one in drawn for again in range(2)]
    write(run, copies, scored(run.versions[version], copies, dtype=dtype_of(run)), recorded=False)


PARTS_OF = "model.layers.{}.{}.weight".format
EMBED = "model.embed_tokens.weight"
ORDERS: Sequence[Case] = (
    Case(
        "query heads in any order",
        "llama",
        engine(reordered(PARTS_OF(1, "self_attn.q_proj"), (2, 0, 3, 1))),
        WEIGHTS,
        ("head", r"layers\.1\.self_attn\.q_proj", "2 in the place of 0"),
        r"layers\.1\.self_attn\.[qk]_proj",
    ),
    Case(
        "three of four heads of an output projection",
        "dense",
        engine(reordered(PARTS_OF(2, "self_attn.o_proj"), (1, 2, 0, 3), 1)),
        WEIGHTS,
        ("head", r"layers\.2\.self_attn\.o_proj", "1 in the place of 0"),
        r"layers\.2\.self_attn\.o_proj",
    ),
    Case(
        "blocks of a gate in any order",
        "llama",
        engine(reordered(PARTS_OF(1, "mlp.gate_proj"), (2, 0, 3, 1))),
        WEIGHTS,
        ("block|row", r"layers\.1\.mlp\.gate_proj", "2 in the place of 0"),
        r"layers\.1\.mlp\.gate_proj",
    ),
    Case(
        "two rows of a matrix",
        "llama",
        engine(exchanged_rows(PARTS_OF(1, "mlp.down_proj"), [(3, 17)])),
        WEIGHTS,
        ("rows", r"layers\.1\.mlp\.down_proj", "17 in the place of 3"),
        r"layers\.1\.mlp\.down_proj",
    ),
    Case(
        "three rows of a matrix",
        "dense",
        engine(exchanged_rows(PARTS_OF(2, "self_attn.o_proj"), [(3, 17), (17, 40)])),
        WEIGHTS,
        ("rows", r"layers\.2\.self_attn\.o_proj"),
        r"layers\.2\.self_attn\.o_proj",
    ),
    Case(
        "two columns of a matrix",
        "dense",
        engine(exchanged_rows(PARTS_OF(0, "mlp.down_proj"), [(5, 30)], 1)),
        WEIGHTS,
        ("columns", r"layers\.0\.mlp\.down_proj", "30 in the place of 5"),
        r"layers\.0\.mlp\.down_proj",
    ),
    Case(
        "two rows of the embedding",
        "llama",
        engine(exchanged_rows(EMBED, [(72, 87)])),  # e and t
        WEIGHTS,
        ("rows", "embed_tokens", "87 in the place of 72"),
        "embed_tokens",
    ),
    Case(
        "rows of the head in an order of chance",
        "dense",
        engine(shuffled("lm_head.weight")),
        WEIGHTS,
        ("rows", "lm_head"),
        "lm_head",
    ),
    Case(
        "rows of a few tokens in the head",
        "llama",
        engine(exchanged_rows("lm_head.weight", [(20, 60), (21, 61), (22, 62), (23, 63), (24, 64), (25, 65)])),
        WEIGHTS,
        ("rows", "lm_head"),
        "lm_head",
    ),
    Case(
        "three of four experts in a circle",
        "experts",
        engine(experts_reordered(2, (2, 0, 1, 3))),
        WEIGHTS,
        ("expert", LAYER(2), "2 in the place of 0"),
        r"layers\.2\.mlp\.experts",
    ),
    Case(
        "rows of a router",
        "experts",
        engine(reordered(PARTS_OF(3, "mlp.gate"), (1, 3, 0, 2))),
        WEIGHTS,
        (r"layers\.3\.mlp\.(gate|experts)", "in the place of"),
        r"layers\.3\.mlp\.(gate|experts)",
    ),
    Case(
        "scale of attention in one layer",
        "llama",
        prepared(with_scale(2, 1.3)),
        OF_MODEL,
        (r"products of queries and keys in layer 2|layers\.2\.self_attn\.[qk]_proj", r"1\.3"),
        r"layers\.2\.self_attn\.[qk]_proj",
    ),
    Case(
        "epsilon of one norm",
        "dense",
        prepared(with_epsilon(1, 0.03)),
        OF_MODEL,
        (r"layers\.1\.post_attention_layernorm", "epsilon of 0.03"),
        r"layers\.1\.post_attention_layernorm",
    ),
    Case(
        "rotary base of one layer",
        "llama",
        prepared(with_base(1, 3e3)),
        OF_MODEL,
        ("rotary embeddings in layer 1", r"\b(3000|2999|3001)\b"),
        "$^",
    ),
    Case("one seed for all samples", "dense", equal_samples, SAMPLING, ("seed|copies", "4 of 4 groups"), "$^"),
    Case(
        "one seed for two engines",
        "llama",
        half_equal_samples,
        SAMPLING,
        ("seed|copies",),
        "$^",
        overrides=("grpo.num_generations_per_prompt=4",),
    ),
    Case(
        "one key head with the other sign",
        "dense",
        engine(head_times(-1.0, PARTS_OF(1, "self_attn.k_proj"), 1, heads=2)),
        WEIGHTS,
        ("head 1", r"layers\.1\.self_attn\.k_proj", "sign|-1"),
        r"layers\.1\.self_attn\.[qk]_proj",
    ),
    Case(
        "feed-forward weights of one layer 20% off",
        "dense",
        engine(scaled(1.2, "layers.3.mlp.down_proj")),
        WEIGHTS,
        (r"layers\.3\.mlp\.(down|up)_proj", r"1\.2"),
        r"layers\.3\.mlp\.(down|up)_proj",
    ),
    Case(
        "adapters of queries at half",
        "adapters",
        engine(adapters_times(0.5, "q_proj"), against=0),
        WEIGHTS,
        ("adapter", "q_proj", "0.5"),
        "q_proj",
    ),
)
