"""Bytes that wait for a layer's conversion during a refit, for every recipe whose engines convert weights."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import build_weight_map, read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.models.weight_map import can_travel_in_fp8, index_tensors
from megatron_grpo.planning.engine_shards import assume_boxes
from megatron_grpo.platform.hardware import load_hardware
from megatron_grpo.preflight.refit_memory import estimate_open_bytes, needs_conversion
from megatron_grpo.weight_sync.boxes import Box, count_elements
from megatron_grpo.weight_sync.pieces import Pieces, read_ranges
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages
from tests.support.recipes import COMMANDS, recipe_config

MOST_OPEN = 3
"""Layers whose bytes may be open at once on a rank of an engine, of its largest."""


QUICK = ("deepseek_v3_64nodes_fp8", "glm_4_5_air_8nodes", "gpt_oss_20b_8gpu_colocated", "qwen3_30b_a3b_4nodes")


def find_gpu(command: tuple[str, ...]) -> str | None:
    """The GPU on which the engines convert: any for quantised ones, else Blackwell; None: there is none."""
    config = recipe_config(*command)
    if len(command) > 1 and "quantization" in recipe_config(command[0]).generation.engine_args:
        return None  # its engines are in FP8 anyway
    shape = read_model_shape(config.policy.model.path)
    gpus = (gpu for gpu in ("h100", "b200") if needs_conversion(config, shape, load_hardware(gpu)))
    return next(gpus, None)


def plan_recipe(config: Config, shape: ModelShape, engine: list[list[Box]], *, by_layer: bool) -> Pieces:
    """Plan the refit of a recipe, into at most two of its engines."""
    dtypes = choose_wire_dtypes(shape, config.policy.precision, config.refit.fp8_blocks)
    shards, bucket = split_policy(config.policy.parallel, shape), int(config.refit.bucket_mib * 2**20)
    engines, is_colocated = min(config.generation.parallel.data, 2), config.generation.is_colocated
    node = len(shards) if is_colocated else None
    return plan_messages(shape, shards, engine, engines, dtypes, bucket, devices_per_node=node, by_layer=by_layer)


def replay(config: Config, shape: ModelShape, engine: list[list[Box]], pieces: Pieces, target: int) -> tuple[int, int]:
    """Most bytes that are open at once on a worker, and bytes of its largest layer.

    Modules are counted as vLLM has them: all experts of a layer are one, and a module stays open from its first element
    to its last.
    """
    is_quantised = "quantization" in config.generation.engine_args
    entries, keys = build_weight_map(shape), list(index_tensors(build_weight_map(shape), shape).items())
    width = 1 if config.refit.fp8_blocks else 2

    def find_module(name: str) -> str | None:
        entry = entries[index[name].row]
        if entry.per_expert:
            return re.sub(r"\.experts\..*", ".experts", name)
        return name.rpartition(".")[0] if is_quantised and can_travel_in_fp8(entry) else None

    index = dict(keys)
    expected, of_layers = Counter[str](), Counter[int]()
    for box in engine[target % len(engine)]:
        module = find_module(box.tensor)
        if module is not None:
            expected[module] += count_elements(box.cut.tensor) * width
            of_layers[index[box.tensor].layer] += count_elements(box.cut.tensor) * width
    remaining: dict[str, int] = {}
    most = 0
    for piece in pieces[pieces["target"] == target]:  # a worker's pieces are in the order of their turns
        module = find_module(keys[piece["tensor"]][0])
        if module is None:
            continue
        remaining.setdefault(module, expected[module])
        most = max(most, sum(expected[name] for name in remaining))
        remaining[module] -= count_elements(read_ranges(piece)) * width
        if not remaining[module]:
            del remaining[module]
    assert not remaining, "every module is complete at the end"
    return most, max(of_layers.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[] if command[0].removeprefix("+exp=") in QUICK else pytest.mark.slow)
        for command in COMMANDS
    ],
    ids=" ".join,
)
def test_engines_of_every_recipe_have_few_layers_open(command: tuple[str, ...]) -> None:
    gpu, config = find_gpu(command), recipe_config(*command)
    if gpu is None:
        pytest.skip("its engines keep weights in the plain layout, or are those of another case")
    shape = read_model_shape(config.policy.model.path)
    engine = assume_boxes(shape, config.generation.parallel)
    estimate = estimate_open_bytes(config, shape, load_hardware(gpu))
    pieces = plan_recipe(config, shape, engine, by_layer=True)
    last = len(engine) * min(config.generation.parallel.data, 2) - 1
    for target in {0, last}:
        most, largest = replay(config, shape, engine, pieces, target)
        assert 0 < most <= largest
        assert most + largest <= min(estimate * 1.02, MOST_OPEN * largest), "a layer and its converted form"


def test_without_the_order_of_layers_many_would_be_open() -> None:
    config = recipe_config("+exp=qwen3_30b_a3b_4nodes")
    shape = read_model_shape(config.policy.model.path)
    engine = assume_boxes(shape, config.generation.parallel)
    most, largest = replay(config, shape, engine, plan_recipe(config, shape, engine, by_layer=False), 0)
    assert most > MOST_OPEN * largest
