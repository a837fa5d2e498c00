"""Defects of one head, stage, layer, adapter, version, engine or length, and of several tokens, for the doctor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.planted import Case, Edit, Tensors, engine
from tests.support.planted_engines import LAYER, SAMPLING, STALE, WEIGHTS, adapters_times, old, scaled
from tests.support.planted_others import RECORD
from tests.support.recorded_runs import EOS, RecordedRun


def head_times(factor: float, name: str, head: int, *, columns: bool = False, heads: int = 4) -> Edit:
    """One head of a projection times a factor."""

    def edit(now: Tensors, _: Tensors) -> Tensors:
        value = now[name].clone()
        value.chunk(heads, int(columns))[head].mul_(factor)
        return now | {name: value}

    return edit


def biased(biases: dict[int, float]) -> Callable[[Tensor], Tensor]:
    def choose(logits: Tensor) -> Tensor:
        changed = logits.clone()
        for token, number in biases.items():
            changed[token] += number
        return changed

    return choose


def of_least_length(length: int) -> Any:
    """An engine that does not end a response before it has some tokens."""

    def of_run(_: RecordedRun) -> Any:
        def forward(model: Any, ids: list[int], prompt: int) -> Tensor:
            logits: Tensor = model(torch.tensor([ids])).logits[0, -1].float()
            if len(ids) - prompt < length:
                logits[EOS] = -np.inf
            return logits

        return forward

    return of_run


def other_checkpoint(run: RecordedRun) -> None:
    """The newest checkpoint is that of the version before; both sides of the run were right."""
    newest = len(run.versions) - 1
    engine(recorded=False)(run)
    before = run.run_dir / "checkpoints"
    folder = before.resolve()
    before.unlink()
    before.mkdir()
    for number in range(1, newest + 1):
        (before / f"step_{number}").symlink_to(folder / f"step_{min(number, newest - 1)}")


LAYER_1 = "model.layers.1.self_attn"
PARTS: Sequence[Case] = (
    Case(
        "sign of one head's output",
        "llama",
        engine(head_times(-1.0, f"{LAYER_1}.o_proj.weight", 2, columns=True)),
        WEIGHTS,
        ("head 2", r"layers\.1\.self_attn\.o_proj", "sign|-1"),
        r"layers\.1\.self_attn\.[ov]_proj",
    ),
    Case(
        "one query head 30% off",
        "llama",
        engine(head_times(1.3, f"{LAYER_1}.q_proj.weight", 3)),
        WEIGHTS,
        ("head 3", r"layers\.1\.self_attn\.q_proj", r"1\.3"),
        r"layers\.1\.self_attn\.q_proj",
    ),
    Case(
        "attention weights of one layer half",
        "llama",
        engine(scaled(0.5, "layers.2.self_attn")),
        WEIGHTS,
        ("attention", LAYER(2), "half|0.5"),
        r"layers\.2\.self_attn",
    ),
    Case(
        "layer two versions back",
        "dense",
        engine(old(".layers.1."), against=-3, stale=True),
        STALE,
        (LAYER(1), "version 0"),
        r"layers\.1\.",
    ),
    Case(
        "stage two versions back",
        "dense",
        engine(old(".layers.2.", ".layers.3.", "model.norm", "lm_head"), against=-3, stale=True),
        STALE,
        (r"stage|layers 2|layers\.2", "version 0"),
        r"layers\.[23]\.|model\.norm|lm_head",
    ),
    Case(
        "adapters of one layer with the other sign",
        "adapters",
        engine(adapters_times(-1, ".layers.1."), against=0),
        WEIGHTS,
        ("adapter", LAYER(1), "-1"),
        r"layers\.1\.",
    ),
    Case(
        "adapters of one layer three times",
        "adapters",
        engine(adapters_times(3, ".layers.2."), against=0),
        WEIGHTS,
        ("adapter", LAYER(2), r"\b3\b"),
        r"layers\.2\.",
    ),
    Case(
        "three tokens biased",
        "dense",
        engine(choose=biased({10: 2.0, 40: -3.0, 70: 1.0})),
        SAMPLING,
        ("token 10", "token 40", "token 70"),
        "$^",
    ),
    Case("two tokens never drawn", "dense", engine(choose=biased({20: -1e4, 50: -1e4})), SAMPLING, ("20", "50"), "$^"),
    Case("checkpoint of another version", "dense", other_checkpoint, RECORD, ("checkpoint step_2",), "$^"),
    Case("least length of a response", "dense", engine(forward=of_least_length(6)), SAMPLING, ("min_tokens=6",), "$^"),
)
