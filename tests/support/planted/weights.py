"""Changes of a model's weights, as a wrong engine or a wrong trainer has them."""

from collections.abc import Sequence

import torch

from tests.support.planted.plants import Edit, Tensors

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def both(*edits: Edit) -> Edit:
    """Several changes, one after the other."""

    def edit(now: Tensors, before: Tensors) -> Tensors:
        for change in edits:
            now = change(now, before)
        return now

    return edit


def old(*parts: str) -> Edit:
    """Tensors, by parts of their names, of the version before."""
    return lambda now, before: now | {name: before[name] for name in now if any(part in name for part in parts)}


def scale_tensors(factor: float, part: str) -> Edit:
    return lambda now, _: now | {name: factor * now[name] for name in now if part in name}


def fill_tensors(number: float, part: str) -> Edit:
    """Tensors without what they have learnt: zeros of biases and matrices, ones of norms."""
    return lambda now, _: now | {name: torch.full_like(now[name], number) for name in now if part in name}


def transpose_tensor(name: str) -> Edit:
    return lambda now, _: now | {name: now[name].T}


def edit_untied(edit: Edit) -> Edit:
    """An engine that copied the tied weights before one of the two went wrong."""
    return lambda now, before: edit(now | {HEAD: now[EMBED].clone()}, before)


def exchange_tensors(first: str, second: str) -> Edit:
    """Tensors whose names have one of two parts, in each other's place."""

    def edit(now: Tensors, _: Tensors) -> Tensors:
        partners = {name: name.replace(first, second) for name in now if first in name}
        return (
            now
            | {name: now[partner] for name, partner in partners.items()}
            | {partner: now[name] for name, partner in partners.items()}
        )

    return edit


def reorder_blocks(name: str, order: Sequence[int], dim: int = 0) -> Edit:
    """Equal blocks of a tensor, as heads or the shards of ranks, in another order."""

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


def shuffle_rows(name: str) -> Edit:
    """All rows of a tensor in an order that chance drew."""

    def edit(now: Tensors, _: Tensors) -> Tensors:
        order = torch.randperm(len(now[name]), generator=torch.Generator().manual_seed(3))
        return now | {name: now[name][order]}

    return edit


def experts_reordered(layer: int, order: Sequence[int]) -> Edit:
    def edit(now: Tensors, _: Tensors) -> Tensors:
        prefix = f"model.layers.{layer}.mlp.experts"
        return now | {
            f"{prefix}.{index}.{part}_proj.weight": now[f"{prefix}.{number}.{part}_proj.weight"]
            for index, number in enumerate(order)
            for part in ("gate", "up", "down")
        }

    return edit


def layers_in_circle(numbers: Sequence[int]) -> Edit:
    def edit(now: Tensors, _: Tensors) -> Tensors:
        changed = dict(now)
        for position, source in zip(numbers, [*numbers[1:], numbers[0]], strict=True):
            for name in now:
                if f".layers.{position}." in name:
                    changed[name] = now[name.replace(f".layers.{position}.", f".layers.{source}.")]
        return changed

    return edit


def head_times(factor: float, name: str, head: int, heads: int = 4, dim: int = 0) -> Edit:

    def edit(now: Tensors, _: Tensors) -> Tensors:
        value = now[name].clone()
        value.chunk(heads, dim)[head].mul_(factor)
        return now | {name: value}

    return edit


def without_last_rows(name: str, count: int) -> Edit:
    return lambda now, _: now | {name: torch.cat([now[name][:-count], torch.zeros_like(now[name][-count:])])}


def shard_of_before(name: str, rank: int, size: int) -> Edit:
    def edit(now: Tensors, before: Tensors) -> Tensors:
        shards = list(now[name].chunk(size))
        shards[rank] = before[name].chunk(size)[rank]
        return now | {name: torch.cat(shards)}

    return edit


def adapters_times(factor: float, part: str = "") -> Edit:
    """The adapters' changes of some tensors, by a part of their names, by another factor; `base`: the base model."""
    return lambda now, base: (
        now | {name: base[name] + factor * (now[name] - base[name]) for name in now if part in name}
    )


def head_of_before(now: Tensors, before: Tensors) -> Tensors:
    return now | {HEAD: before[EMBED]}


def embedding_of_before(now: Tensors, before: Tensors) -> Tensors:
    """The embedding of a tied model is stale, and its head is not."""
    return now | {HEAD: now[EMBED], EMBED: before[EMBED]}


def embedding_unscaled(now: Tensors, _: Tensors) -> Tensors:
    """Gemma's embedding without its factor, the root of the hidden size; the head has the same matrix as before."""
    return now | {EMBED: now[EMBED] * now[EMBED].shape[1] ** -0.5, HEAD: now[EMBED]}


def rows_exchanged(now: Tensors, _: Tensors) -> Tensors:
    """The head's rows of the special tokens are those of other tokens."""
    head = now[HEAD].clone()
    head[:3] = head[60:63]
    return now | {HEAD: head}


def norms_without_one(now: Tensors, _: Tensors) -> Tensors:
    """Weights of Gemma's norms, as an engine has them that does not add 1."""
    return now | {name: now[name] - 1 for name in now if "norm" in name}


def gate_and_up_mixed(now: Tensors, _: Tensors) -> Tensors:
    """The second halves of gate and up, one tensor-parallel rank's share, in each other's place in layer 1."""
    gate, up = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up"))
    (first, second), (third, fourth) = now[gate].chunk(2), now[up].chunk(2)
    return now | {gate: torch.cat([first, fourth]), up: torch.cat([third, second])}
