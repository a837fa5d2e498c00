"""Further defects and healthy runs for the doctor, of the same kinds as the others and in other places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_grpo.batch.trajectory import Span, Trajectory
from tests.support.planted import Case, Edit, Forward, Tensors, engine, trainer, write
from tests.support.planted_engines import (
    LAYER,
    OF_MODEL,
    SAMPLING,
    STALE,
    WEIGHTS,
    adapters_times,
    likeliest,
    old,
    scaled,
    zeroed,
)
from tests.support.planted_healthy import Healthy, filtered
from tests.support.planted_others import LAYOUT, leaking, shards_exchanged
from tests.support.recorded_runs import RecordedRun, alone, sampled, scored

ROUTED = OF_MODEL | {"routing"}


def both(*edits: Edit) -> Edit:
    """Several changes, one after the other."""

    def edit(now: Tensors, before: Tensors) -> Tensors:
        for one in edits:
            now = one(now, before)
        return now

    return edit


def ones(part: str) -> Edit:
    return lambda now, _: now | {name: torch.ones_like(now[name]) for name in now if part in name}


def transposed(name: str) -> Edit:
    return lambda now, _: now | {name: now[name].T}


def rotated_experts(layer: int) -> Edit:
    """Each expert of a layer has the matrices of the next one."""

    def edit(now: Tensors, _: Tensors) -> Tensors:
        prefix = f"model.layers.{layer}.mlp.experts."
        names = [name for name in now if name.startswith(prefix)]
        count = 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in names)

        def next_name(name: str) -> str:
            number, rest = name.removeprefix(prefix).split(".", 1)
            return f"{prefix}{(int(number) + 1) % count}.{rest}"

        return now | {name: now[next_name(name)] for name in names}

    return edit


def kv_heads_exchanged(now: Tensors, _: Tensors) -> Tensors:
    """The two key and value heads of layer 1 in each other's place."""
    names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv"]
    return now | {name: torch.cat(now[name].chunk(2)[::-1]) for name in names}


def min_p(share: float) -> Callable[[Tensor], Tensor]:
    def choose(logits: Tensor) -> Tensor:
        probabilities = logits.softmax(-1)
        return logits.masked_fill(probabilities < share * probabilities.max(), -torch.inf)

    return choose


def frequency_penalised(penalty: float) -> Any:
    def of_run(_: RecordedRun) -> Forward:
        def forward(model: Any, ids: list[int], prompt: int) -> Tensor:
            logits: Tensor = model(torch.tensor([ids])).logits[0, -1].float()
            return logits - penalty * torch.bincount(
                torch.tensor(ids[prompt:], dtype=torch.int64), minlength=len(logits)
            )

        return forward

    return of_run


def spans_of_two(run: RecordedRun) -> None:
    """The record says that the weights changed within each response, and the engine kept the earlier ones."""
    version = len(run.versions) - 1
    drawn = sampled(run.versions[version - 1], run.prompts(), version=version - 1)

    def in_two(one: Trajectory) -> Trajectory:
        ((start, end, _),) = one.spans
        middle = start + 3
        return (
            one if end <= middle else replace(one, spans=[Span(start, middle, version - 1), Span(middle, end, version)])
        )

    drawn = [in_two(one) for one in drawn]
    write(run, drawn, scored(run.versions[version], drawn), recorded=False)


def gap_in_positions(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """Responses, here the last 12 tokens, have positions as if padding stood before them."""
    found = []
    for ids in sequences:
        positions = torch.arange(len(ids))
        positions[max(len(ids) - 12, 0) :] += 9
        mask = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool).tril()
        found.append(model(torch.tensor([ids]), position_ids=positions[None], attention_mask=mask).logits[0])
    return found


def odd_rows_off(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """One replica of two computes a layer otherwise."""
    right = alone(model, sequences)
    model.model.layers[1].mlp.down_proj.weight.data.mul_(0.8)
    return [right[row] if row % 2 == 0 else wrong for row, wrong in enumerate(alone(model, sequences))]


def _config(
    name: str, run: str, words: Sequence[str], config: dict[str, Any], causes: Any = OF_MODEL, must: bool = True
) -> Case:
    return Case(name, run, engine(config=config), frozenset(causes), tuple(words), "$^", must)


SWAPPED_ROPE = {
    "sliding_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "full_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MORE: Sequence[Case] = (
    Case(
        "stale gate of one of four engines",
        "llama",
        engine(old("layers.2.mlp.gate_proj"), stale=True, rollouts=2),
        WEIGHTS,
        (r"layers\.2\.mlp\.gate_proj", "version 0", "2 of 8"),
        r"layers\.2\.mlp\.gate_proj",
    ),
    Case(
        "matrix 10% too small",
        "tied",
        engine(scaled(0.9, "layers.3.self_attn.o_proj")),
        WEIGHTS,
        (r"layers\.3\.self_attn\.[ov]_proj", r"0\.9|10%"),
        r"layers\.3\.self_attn\.[ov]_proj",
    ),
    Case(
        "biases of one layer missing",
        "biases",
        engine(zeroed("layers.2.self_attn.q_proj.bias")),
        OF_MODEL,
        ("bias", LAYER(2)),
    ),
    Case(
        "stale bias",
        "biases",
        engine(old("layers.1.self_attn.v_proj.bias"), stale=True),
        WEIGHTS,
        (r"layers\.1\.self_attn\.v_proj\.bias",),
        r"layers\.1\.self_attn\.v_proj\.bias",
    ),
    Case(
        "stale embedding below a fresh head",
        "tied",
        engine(
            lambda now, before: (
                now
                | {
                    "lm_head.weight": now["model.embed_tokens.weight"],
                    "model.embed_tokens.weight": before["model.embed_tokens.weight"],
                }
            ),
            config={"tie_word_embeddings": False},
            stale=True,
        ),
        STALE,
        ("embed", "version 0"),
        "embed_tokens",
    ),
    Case(
        "experts rotated",
        "experts",
        engine(rotated_experts(0)),
        WEIGHTS,
        ("expert", LAYER(0)),
        r"layers\.0\.mlp\.(experts|gate)",
    ),
    Case(
        "an expert without weights",
        "experts",
        engine(zeroed("layers.3.mlp.experts.2.down_proj")),
        WEIGHTS,
        ("expert", LAYER(3), r"\b2\b"),
        r"layers\.3\.mlp\.experts",
    ),
    _config(
        "three experts a token", "experts", ["num_experts_per_tok|top.?k|experts"], {"num_experts_per_tok": 3}, ROUTED
    ),
    Case(
        "stale shared expert",
        "shared experts",
        engine(old("layers.2.mlp.shared_experts"), stale=True),
        STALE,
        (r"layers\.2\.mlp\.shared_experts|shared.*layer 2|layer 2.*shared",),
        r"layers\.2\.mlp\.shared",
    ),
    _config("window of 20 instead of 16", "gemma", ["window"], {"sliding_window": 20}, must=False),
    _config("rotary bases exchanged", "gemma", ["rope"], {"rope_parameters": SWAPPED_ROPE}, must=False),
    _config(
        "windows in other layers",
        "gemma",
        ["window|layer_types"],
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]},
        must=False,
    ),
    _config(
        "rotary base of 20000", "dense", ["rope"], {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
    ),
    _config("epsilon of 0.001", "llama", ["eps"], {"rms_norm_eps": 1e-3}),
    Case("min_p of 0.1", "dense", engine(choose=min_p(0.1)), SAMPLING, ("min_p",), "$^"),
    Case(
        "frequency penalty", "dense", engine(forward=frequency_penalised(0.3)), SAMPLING, ("frequency_penalty",), "$^"
    ),
    Case(
        "temperature of one of two engines",
        "colder",
        engine(temperature=1.0, rollouts=4),
        SAMPLING,
        ("temperature", "4 of 8"),
        "$^",
    ),
    Case("adapters four times", "adapters", engine(adapters_times(4), against=0), WEIGHTS, ("adapter", r"\b4\b|scale")),
    Case(
        "adapters of attention missing",
        "adapters",
        engine(adapters_times(0, "self_attn"), against=0),
        STALE,
        ("adapter|version 0", "attn|_proj|attention"),
        "self_attn",
    ),
    Case(
        "a layer left out",
        "llama",
        engine(both(zeroed("layers.2.self_attn.o_proj"), zeroed("layers.2.mlp.down_proj"))),
        WEIGHTS | {"layer"},
        (LAYER(2),),
        r"layers\.2\.",
    ),
    Case(
        "key and value heads exchanged",
        "llama",
        engine(kv_heads_exchanged),
        WEIGHTS,
        ("head|[kv]_proj", LAYER(1)),
        r"layers\.1\.self_attn",
    ),
    Case(
        "matrix transposed",
        "llama",
        engine(transposed("model.layers.1.self_attn.o_proj.weight")),
        WEIGHTS,
        (LAYER(1),),
        r"layers\.1\.self_attn\.[ov]_proj",
        must=False,
    ),
    Case(
        "norms of keys missing",
        "dense",
        engine(ones("layers.2.self_attn.k_norm")),
        OF_MODEL,
        ("k_norm",),
        "k_norm|q_norm",
    ),
    Case("final norm missing", "llama", engine(ones("model.norm")), OF_MODEL, (r"model\.norm",), r"model\.norm"),
    Case(
        "two stale matrices",
        "dense",
        engine(old("layers.0.self_attn.q_proj", "layers.3.mlp.down_proj"), stale=True),
        WEIGHTS,
        (r"layers\.0\.self_attn\.q_proj", r"layers\.3\.mlp\.down_proj"),
        r"layers\.0\.self_attn\.q_proj|layers\.3\.mlp\.down_proj",
    ),
    Case(
        "first stage behind",
        "llama",
        engine(old("embed_tokens", ".layers.0.", ".layers.1."), stale=True),
        STALE,
        (r"stage|layers 0|layers\.0", "version 0"),
        r"embed_tokens|layers\.[01]\.",
    ),
    Case("asynchronous engine that was never updated", "dense", spans_of_two, STALE, ("version 1",), "$^"),
    Case(
        "leak in a run of adapters",
        "adapters",
        trainer(recorded=False, forward=leaking),
        LAYOUT,
        ("layout|pack", "replay"),
    ),
    Case(
        "gap in positions", "llama", trainer(recorded=True, forward=gap_in_positions), LAYOUT, ("trainer",), must=False
    ),
    Case(
        "one replica of two, recorded",
        "llama",
        trainer(recorded=True, forward=odd_rows_off),
        LAYOUT | {"weights"},
        ("trainer", "[34] of [78]|replica|data"),
    ),
    Case(
        "reference instead of policy",
        "dense",
        trainer(recorded=True, edit=old("")),
        STALE,
        ("trainer", "version 1"),
        "$^",
    ),
    Case(
        "shards of the vocabulary exchanged, recorded",
        "dense",
        trainer(recorded=True, forward=shards_exchanged),
        LAYOUT,
        ("trainer",),
        must=False,
    ),
    Case(
        "biases missing in the trainer",
        "biases",
        trainer(recorded=True, edit=zeroed("_proj.bias")),
        OF_MODEL,
        ("trainer", "bias"),
    ),
)


def far_token(run: RecordedRun) -> None:
    """A near tie sent one token to another expert on one side."""
    version = len(run.versions) - 1
    dtype = torch.bfloat16
    drawn = sampled(run.versions[version], run.prompts(), version=version, dtype=dtype)
    trained = scored(run.versions[version], drawn, dtype=dtype)
    write(run, drawn, trained, recorded=True)


MORE_HEALTHY: Sequence[Healthy] = (
    Healthy("hotter", "dense", engine(recorded=True), ("generation.temperature=1.3",)),
    Healthy("experts in bfloat16, recorded", "bfloat16 experts", far_token),
    Healthy("top_k of 5 in bfloat16", "bfloat16", engine(choose=likeliest(5)), ("generation.top_k=5",)),
    Healthy("window and recorded", "gemma", engine(recorded=True)),
    Healthy("biases, recorded", "biases", engine(recorded=True)),
    Healthy("adapters, recorded", "adapters", engine(recorded=True)),
    Healthy("filter and adapters", "adapters", filtered, ("generation.top_k=5",)),
)
