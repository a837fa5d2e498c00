"""What the sizes of a model have to divide by in a layout."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.config.errors import Problem
from megatron_grpo.config.schema import ParallelConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_map import group_rows


def training_split_problems(section: str, parallel: ParallelConfig, shape: ModelShape) -> Iterator[Problem]:
    """What of a layout does not fit the model that it trains, under the keys of a section."""
    yield from tensor_problems(section, parallel.tensor, shape)
    yield from _pipeline(section, parallel, shape)
    yield from _experts(section, parallel, shape)
    if parallel.tensor > 1 and not parallel.sequence and (shape.experts is not None or shape.latent is not None):
        what = "a mixture of experts" if shape.experts is not None else "latent attention"
        text = f"{what} with {section}.tensor={parallel.tensor} needs it; use true"
        yield Problem(f"{section}.sequence=False", text)


def tensor_problems(section: str, tensor: int, shape: ModelShape) -> Iterator[Problem]:
    """What of a model's sizes tensor parallelism does not divide, under the keys of a section."""
    usable = [size for size in range(1, shape.attention_heads + 1) if _undivided(size, shape) is None]
    what = _undivided(tensor, shape)
    if what is not None:
        yield Problem(f"{section}.tensor={tensor}", f"does not divide the model's {what}; use {listed(usable)}")


def listed(numbers: list[int]) -> str:
    """For a message: "1, 2 or 4"."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last


def divisors(number: int) -> list[int]:
    """What divides a number."""
    return [d for d in range(1, number + 1) if number % d == 0]


def _undivided(tensor: int, shape: ModelShape) -> str | None:
    """What so many ranks cannot split evenly."""
    heads, groups = shape.attention_heads, shape.key_value_heads
    sizes = [(heads, "attention heads"), (shape.ffn_hidden, "feed-forward width")]
    if shape.experts is not None and shape.experts.shared_ffn_hidden:
        sizes.append((shape.experts.shared_ffn_hidden, "shared experts' width"))
    for size, what in sizes:
        if size % tensor:
            return f"{size} {what}"
    if groups % tensor == 0 or shape.latent is not None:
        return None
    # More ranks than key/value heads: every rank has an even part of one head's queries, key and value.
    if tensor % groups or sum(group_rows(shape)) % (tensor // groups):
        return f"{groups} key/value heads, nor is it a multiple of them"
    return None


def _pipeline(section: str, parallel: ParallelConfig, shape: ModelShape) -> Iterator[Problem]:
    stages, chunks = parallel.pipeline, parallel.virtual_pipeline
    if chunks > 1 and stages == 1:
        yield Problem(f"{section}.virtual_pipeline={chunks}", f"needs {section}.pipeline > 1")
        return
    ends = {"first_stage_layers": parallel.first_stage_layers, "last_stage_layers": parallel.last_stage_layers}
    given = {name: layers for name, layers in ends.items() if layers is not None}
    counted = parallel.count_embedding + parallel.count_loss
    if given and (stages == 1 or counted):
        name, layers = next(iter(given.items()))
        both = "and count_embedding or count_loss are two ways to one end; use one"
        fix = f"needs {section}.pipeline > 1" if stages == 1 else both
        yield Problem(f"{section}.{name}={layers}", fix)
        return
    if counted and stages == 1:
        name = "count_embedding" if parallel.count_embedding else "count_loss"
        yield Problem(f"{section}.{name}=True", f"needs {section}.pipeline > 1")
        return
    middle, left = stages - len(given), shape.layers + counted - sum(given.values())
    if left < 0 or (middle == 0 and left) or (middle and (left % middle or left < middle)):
        yield Problem(f"{section}.pipeline={stages}", _uneven(shape.layers, counted, given, left, middle))
        return
    for layers in {*given.values(), *([left // middle] if middle else [])}:
        if layers % chunks:
            text = f"does not divide the {layers} layers of a pipeline rank; use {listed(divisors(layers))}"
            yield Problem(f"{section}.virtual_pipeline={chunks}", text)
            return


def _uneven(layers: int, counted: int, given: dict[str, int], left: int, middle: int) -> str:
    """Why layers do not share out over the pipeline."""
    if given:
        names = " and ".join(f"{name}={number}" for name, number in given.items())
        return f"with {names} {left} of the {layers} layers are left for {middle} ranks, who need equally many each"
    if counted:
        return f"does not divide the model's {layers} layers and what is counted as {counted} more; use " + listed(
            divisors(layers + counted)
        )
    return f"does not divide the model's {layers} layers; use {listed(divisors(layers))}, or first_stage_layers"


def _experts(section: str, parallel: ParallelConfig, shape: ModelShape) -> Iterator[Problem]:
    expert, tensor = parallel.expert, parallel.expert_tensor
    if shape.experts is None:
        for name, size in (("expert", expert), ("expert_tensor", tensor)):
            if size > 1:
                yield Problem(f"{section}.{name}={size}", "the model has no experts; use 1")
        return
    count, width = shape.experts.count, shape.experts.ffn_hidden
    if count % expert:
        text = f"does not divide the model's {count} experts; use {listed(divisors(count))}"
        yield Problem(f"{section}.expert={expert}", text)
    if width % tensor:
        text = f"does not divide an expert's width of {width}; use {listed(divisors(width))}"
        yield Problem(f"{section}.expert_tensor={tensor}", text)
    ranks = parallel.tensor * parallel.context * parallel.data
    if ranks % (expert * tensor):
        text = f"times expert_tensor={tensor} does not divide tensor * context * data = {ranks}; use "
        usable = [size for size in divisors(count) if ranks % (size * tensor) == 0]
        more = f"{listed(usable)}, or more replicas" if usable else "fewer of expert_tensor, or more replicas"
        yield Problem(f"{section}.expert={expert}", text + more)
