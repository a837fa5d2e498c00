"""Engines that compute something else than the policy, for the doctor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.planted import Case, Edit, Forward, Tensors, engine
from tests.support.recorded_runs import RecordedRun

WEIGHTS, STALE = frozenset({"weights"}), frozenset({"weights", "staleness"})
OF_MODEL, SAMPLING = frozenset({"layer", "weights", "model"}), frozenset({"sampling"})


def old(*parts: str) -> Edit:
    """Tensors, by parts of their names, of the version before."""

    def edit(now: Tensors, before: Tensors) -> Tensors:
        return now | {name: before[name] for name in now if any(part in name for part in parts)}

    return edit


def scaled(factor: float, part: str) -> Edit:
    return lambda now, _: now | {name: factor * now[name] for name in now if part in name}


def exchanged(one: str, other: str) -> Edit:
    """Tensors whose names have one of two parts, in each other's place."""

    def edit(now: Tensors, _: Tensors) -> Tensors:
        partners = {name: name.replace(one, other) for name in now if one in name}
        return (
            now
            | {name: now[partner] for name, partner in partners.items()}
            | {partner: now[name] for name, partner in partners.items()}
        )

    return edit


def heads_permuted(now: Tensors, _: Tensors) -> Tensors:
    """Query heads 0 and 3 of layer 2 in each other's place."""
    name = "model.layers.2.self_attn.q_proj.weight"
    return now | {name: now[name].unflatten(0, (4, -1))[[3, 1, 2, 0]].flatten(0, 1)}


def halves_exchanged(name: str, dim: int) -> Edit:
    """The shards of two tensor-parallel ranks of a matrix in each other's place."""
    return lambda now, _: now | {name: torch.cat(now[name].chunk(2, dim)[::-1], dim)}


def zeroed(part: str) -> Edit:
    return lambda now, _: now | {name: torch.zeros_like(now[name]) for name in now if part in name}


def head_of_before(now: Tensors, before: Tensors) -> Tensors:
    return now | {"lm_head.weight": before["model.embed_tokens.weight"]}


def embedding_unscaled(now: Tensors, _: Tensors) -> Tensors:
    """Gemma's embedding without its factor, the root of the hidden size; the head has the same matrix as before."""
    embedding = now["model.embed_tokens.weight"]
    return now | {"model.embed_tokens.weight": embedding * embedding.shape[1] ** -0.5, "lm_head.weight": embedding}


def rows_exchanged(now: Tensors, _: Tensors) -> Tensors:
    """The head's rows of the special tokens are those of other tokens."""
    head = now["lm_head.weight"].clone()
    head[:3] = head[60:63]
    return now | {"lm_head.weight": head}


def norms_without_one(now: Tensors, _: Tensors) -> Tensors:
    """Weights of Gemma's norms, which are around 0 in its files, as an engine that does not add 1 has them."""
    return now | {name: now[name] - 1 for name in now if "norm" in name}


def adapters_times(factor: float, part: str = "") -> Edit:
    """The adapters' changes of some tensors, by a part of their names, by another factor; `base`: the base model."""

    def edit(now: Tensors, base: Tensors) -> Tensors:
        return now | {name: base[name] + factor * (now[name] - base[name]) for name in now if part in name}

    return edit


def truncated(mass: float) -> Any:
    """Keep the likeliest tokens that have a share of the probability."""

    def choose(logits: Tensor) -> Tensor:
        values, order = logits.sort(descending=True)
        before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
        return torch.empty_like(logits).scatter_(0, order, values.masked_fill(before >= mass, -torch.inf))

    return choose


def likeliest(count: int) -> Any:
    return lambda logits: logits.masked_fill(logits < logits.topk(count).values[-1], -torch.inf)


def repetition_penalised(factor: float) -> Any:
    """An engine that makes tokens less likely that the prompt or the response has."""

    def of_run(_: RecordedRun) -> Forward:
        def forward(model: Any, ids: list[int], prompt: int) -> Tensor:
            logits: Tensor = model(torch.tensor([ids])).logits[0, -1].float()
            seen = torch.zeros_like(logits, dtype=torch.bool)
            seen[ids] = True
            return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)

        return forward

    return of_run


def presence_penalised(penalty: float) -> Any:
    """An engine that makes tokens less likely that the response has."""

    def of_run(_: RecordedRun) -> Forward:
        def forward(model: Any, ids: list[int], prompt: int) -> Tensor:
            logits: Tensor = model(torch.tensor([ids])).logits[0, -1].float()
            logits[list(set(ids[prompt:]))] -= penalty
            return logits

        return forward

    return of_run


def stale_prefix(run: RecordedRun) -> Forward:
    """An engine whose prefix cache has the prompts' keys and values from the version before."""
    before = AutoModelForCausalLM.from_pretrained(run.versions[-2], dtype=torch.float32).eval()

    def forward(model: Any, ids: list[int], prompt: int) -> Tensor:
        cached = prompt - 4  # whole blocks
        past = before(torch.tensor([ids[:cached]]), use_cache=True).past_key_values
        logits: Tensor = model(torch.tensor([ids[cached:]]), past_key_values=past).logits[0, -1].float()
        return logits

    return forward


def softcapped(cap: float) -> Any:
    return lambda logits: cap * torch.tanh(logits / cap)


LAYER = r"layers?[ .]{}\b".format
EXPERTS = "mlp.experts"
TENSORS: Sequence[Case] = (
    Case("stale head", "dense", engine(old("lm_head"), stale=True), WEIGHTS, ("lm_head", "version 1"), "lm_head"),
    Case(
        "stale head of a tied model",
        "tied",
        engine(head_of_before, config={"tie_word_embeddings": False}, stale=True),
        STALE,
        ("head", "version 0"),
        "lm_head|embed_tokens",
    ),
    Case(
        "matrix 5% off",
        "dense",
        engine(scaled(1.05, "layers.2.mlp.down_proj")),
        WEIGHTS,
        (r"layers\.2\.mlp\.(down|up)_proj", r"1\.05|5(\.0)?%"),
        r"layers\.2\.mlp\.(down|up)_proj",  # the product with either is the same
    ),
    Case(
        "layer a version behind",
        "dense",
        engine(old(".layers.1."), stale=True),
        STALE,
        (LAYER(1), "version 1"),
        r"layers\.1\.",
    ),
    Case(
        "stage a version behind",
        "dense",
        engine(old(".layers.2.", ".layers.3.", "model.norm", "lm_head"), stale=True),
        STALE,
        (r"stage|layers 2|layers\.2", "version 1"),
        r"layers\.[23]\.|model\.norm|lm_head",
    ),
    Case(
        "stale final norm", "dense", engine(old("model.norm"), stale=True), WEIGHTS, (r"model\.norm",), r"model\.norm"
    ),
    Case(
        "stale matrix of one of two engines",
        "dense",
        engine(old("layers.3.self_attn.o_proj"), stale=True, rollouts=4),
        WEIGHTS,
        (r"layers\.3\.self_attn\.o_proj", "version 1", "4 of 8"),
        r"layers\.3\.self_attn\.o_proj",
    ),
    Case(
        "keys and values exchanged",
        "llama",
        engine(exchanged("layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj")),
        WEIGHTS,
        (r"k_proj|keys", r"v_proj|values", LAYER(1)),
        r"layers\.1\.self_attn\.[kv]_proj",
    ),
    Case(
        "query heads permuted",
        "llama",
        engine(heads_permuted),
        WEIGHTS,
        (r"heads|q_proj", LAYER(2)),
        r"layers\.2\.self_attn\.q_proj",
    ),
    Case(
        "shards of o_proj exchanged",
        "llama",
        engine(halves_exchanged("model.layers.0.self_attn.o_proj.weight", 1)),
        WEIGHTS,
        (r"heads|shards|o_proj|q_proj", LAYER(0)),
        r"layers\.0\.self_attn",
    ),
    Case(
        "sign of a matrix",
        "llama",
        engine(scaled(-1.0, "layers.1.self_attn.o_proj")),
        WEIGHTS,
        (r"layers\.1\.self_attn\.[ov]_proj",),
        r"layers\.1\.self_attn\.[ov]_proj",
    ),
    Case(
        "norms of queries and keys exchanged",
        "dense",
        engine(exchanged("layers.0.self_attn.q_norm", "layers.0.self_attn.k_norm")),
        WEIGHTS,
        (LAYER(0), "q_norm", "k_norm"),
        r"layers\.0\.self_attn\.[qk]_norm",
        must=False,  # only their product counts, up to the rotation
    ),
    Case(
        "layers exchanged",
        "llama",
        engine(exchanged(".layers.1.", ".layers.2.")),
        WEIGHTS,
        (LAYER(1), r"\b2\b"),
        r"layers\.[12]\.",
        must=False,
    ),
    Case(
        "rows of special tokens in the head",
        "dense",
        engine(rows_exchanged),
        WEIGHTS,
        ("lm_head",),
        "lm_head",
        must=False,
    ),
    Case("missing biases", "biases", engine(zeroed("_proj.bias")), OF_MODEL, ("bias",), r"_proj\.bias"),
    Case(
        "keys and values exchanged in bfloat16",
        "bfloat16",
        engine(exchanged("layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj")),
        WEIGHTS,
        (r"k_proj|keys", r"v_proj|values", LAYER(1)),
        r"layers\.1\.self_attn\.[kv]_proj",
    ),
    Case(
        "two experts exchanged in bfloat16",
        "bfloat16 experts",
        engine(exchanged("layers.0.mlp.experts.1.", "layers.0.mlp.experts.3.")),
        WEIGHTS,
        ("expert", LAYER(0), r"\b1\b", r"\b3\b"),
        r"layers\.0\.mlp\.experts",
    ),
    Case(
        "two experts exchanged",
        "experts",
        engine(exchanged("layers.2.mlp.experts.0.", "layers.2.mlp.experts.3.")),
        WEIGHTS,
        ("expert", LAYER(2), r"\b0\b", r"\b3\b"),
        r"layers\.2\.mlp\.experts",
    ),
    Case("stale router", "experts", engine(old("layers.3.mlp.gate."), stale=True), WEIGHTS, (r"layers\.3\.mlp\.gate",)),
    Case(
        "router bias missing",
        "shared experts",
        engine(zeroed("e_score_correction_bias")),
        OF_MODEL | {"routing"},
        ("bias",),
        "e_score_correction_bias",
    ),
    Case(
        "shared expert missing",
        "shared experts",
        engine(zeroed("shared_experts.down_proj")),
        OF_MODEL,
        ("shared",),
        "shared_experts",
    ),
    Case("adapters missing", "adapters", engine(adapters_times(0), against=0), STALE, ("adapter|version 0",)),
    Case(
        "adapters twice", "adapters", engine(adapters_times(2), against=0), WEIGHTS, ("adapter", r"twice|\b2\b|scale")
    ),
    Case(
        "adapters without their scale",  # alpha 32 / rank 4
        "adapters",
        engine(adapters_times(1 / 8), against=0),
        WEIGHTS,
        ("adapter", "scale|alpha|0.125"),
    ),
    Case(
        "adapters of one layer missing",
        "adapters",
        engine(adapters_times(0, ".layers.1."), against=0),
        STALE,
        ("adapter|version 0", LAYER(1)),
        r"layers\.1\.",
    ),
    Case("adapters of the version before", "adapters", engine(old(""), stale=True), STALE, ("version 1",)),
)
"""Wrong weights."""


def _config(name: str, run: str, words: Sequence[str], config: Mapping[str, Any], **more: Any) -> Case:
    """An engine whose config.json has other entries."""
    return Case(name, run, engine(config=dict(config)), more.pop("causes", OF_MODEL), tuple(words), "$^", **more)


WINDOW = {"layer_types": ["full_attention"] * 4}
SETTINGS: Sequence[Case] = (
    _config("another epsilon", "dense", ["eps"], {"rms_norm_eps": 1e-2}),
    _config("another rotary base", "llama", ["rope"], {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}),
    _config("sliding window left out", "gemma", ["window"], {"sliding_window": 4096}),
    _config("shorter sliding window", "gemma", ["window"], {"sliding_window": 8}),
    _config("scale of attention", "gemma", ["scal"], {"query_pre_attn_scalar": 16}),
    _config(
        "one expert a token instead of two",
        "experts",
        ["num_experts_per_tok|top.?k|experts"],
        {"num_experts_per_tok": 1},
        causes=OF_MODEL | {"routing"},
    ),
    _config(
        "weights of experts not normalised",
        "experts",
        ["norm_topk_prob|normal"],
        {"norm_topk_prob": False},
        causes=OF_MODEL | {"routing"},
    ),
    _config(
        "factor of routed experts",
        "shared experts",
        ["routed_scaling_factor|scal"],
        {"routed_scaling_factor": 1.0},
        causes=OF_MODEL | {"routing"},
    ),
    Case("norms without the added one", "gemma", engine(norms_without_one), OF_MODEL, ("norm",), "norm"),
    Case(
        "embedding not scaled",
        "gemma",
        engine(embedding_unscaled, config={"tie_word_embeddings": False}),
        OF_MODEL,
        ("embed",),
        "embed|lm_head",
        must=False,
    ),
    Case(
        "soft cap on logits", "dense", engine(choose=softcapped(5.0)), OF_MODEL | SAMPLING, ("cap",), "$^", must=False
    ),
    Case("top_p of 0.8", "dense", engine(choose=truncated(0.8)), SAMPLING, ("top_p",), "$^"),
    Case("top_k of 5", "dense", engine(choose=likeliest(5)), SAMPLING, ("top_k",), "$^"),
    Case(
        "repetition penalty",
        "dense",
        engine(forward=repetition_penalised(1.2)),
        SAMPLING,
        ("repetition_penalty",),
        "$^",
    ),
    Case("presence penalty", "dense", engine(forward=presence_penalised(0.5)), SAMPLING, ("presence_penalty",), "$^"),
    Case(
        "bfloat16 in a run of float32",
        "dense",
        engine(dtype=torch.bfloat16),
        frozenset({"precision"}),
        ("bfloat16|precision",),
        "$^",
    ),
    Case(
        "prefix cache from before the refit",
        "dense",
        engine(forward=stale_prefix, stale=True),
        STALE,
        ("cache|prefix|prompt",),
        "$^",
    ),
)
"""Right weights, and another computation."""
