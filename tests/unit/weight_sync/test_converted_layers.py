"""Layers of vLLM that are converted after a refit: FP8, kernels and captured tensors, bytes that wait."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import build_weight_map
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.models.weight_map import can_travel_in_fp8, index_tensors
from megatron_grpo.planning.engine_shards import assume_boxes
from megatron_grpo.platform.device import Platform
from megatron_grpo.platform.hardware import load_hardware
from megatron_grpo.preflight.refit_memory import estimate_open_bytes, needs_conversion
from megatron_grpo.weight_sync import engine_layers
from megatron_grpo.weight_sync.boxes import Box, count_elements
from megatron_grpo.weight_sync.engine_layers import KernelState, RebuiltLayer, name_scales, uses_fp8_blocks
from megatron_grpo.weight_sync.pieces import Pieces, read_ranges
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages
from megatron_grpo_kernels.fp8_blocks import quantise
from tests.support.recipes import COMMANDS, recipe_config

needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM's CPU kernels multiply by FP8 blocks with AMX"
)
INPUTS, OUTPUTS = 256, [256, 128]


@pytest.fixture
def layer(tmp_path: Path) -> Iterator[Any]:
    """Two matrices side by side in one of vLLM's layers, which it rounds when it loads them."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.quantization import QuantizationConfigArgs
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.linear import MergedColumnParallelLinear
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.utils.torch_utils import set_default_torch_dtype

    config: Any = VllmConfig()
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        init_distributed_environment(1, 0, f"file://{tmp_path}/meet", 0, "gloo")
        initialize_model_parallel(1, 1)
        config.model_config = SimpleNamespace(dtype=torch.bfloat16)
        blocks = OnlineQuantizationConfig(QuantizationConfigArgs(linear="fp8_per_block"))
        linear = MergedColumnParallelLinear(INPUTS, OUTPUTS, bias=False, quant_config=blocks, prefix="mlp.gate_up_proj")
        record_metadata_for_reloading(linear)
        _load(linear, _weights(seed=0))
        yield linear
        cleanup_dist_env_and_memory()


@needs_amx
def test_what_is_rounded_before_lands_as_vllm_would_have_rounded_it(layer: Any) -> None:
    inputs = torch.randn(5, INPUTS, dtype=torch.bfloat16)
    before, addresses = layer(inputs)[0], {name: parameter.data_ptr() for name, parameter in layer.named_parameters()}
    weights = _weights(seed=1)
    rebuilt = RebuiltLayer(layer)
    rebuilt.open().weight.data.copy_(torch.cat(weights))
    rebuilt.close()
    rounded_there = layer(inputs)[0]
    assert not torch.equal(rounded_there, before)

    _write(layer, _weights(seed=0))
    assert torch.equal(layer(inputs)[0], before), "vLLM rounded these when it loaded them"
    _write(layer, weights)
    assert torch.equal(layer(inputs)[0], rounded_there)
    exact = inputs.float() @ torch.cat(weights).float().T
    assert (rounded_there.float() - exact).abs().max() < 0.02 * exact.abs().max(), "the weights are FP8 numbers"
    assert {name: parameter.data_ptr() for name, parameter in layer.named_parameters()} == addresses, (
        "in the memory that was there"
    )


@needs_amx
def test_a_layer_that_was_begun_is_put_back(layer: Any) -> None:
    inputs = torch.randn(5, INPUTS, dtype=torch.bfloat16)
    before = layer(inputs)[0]
    blocked = RebuiltLayer(layer, ["weight"])
    blocked.open().weight.data.zero_()
    blocked.abandon()
    assert torch.equal(layer(inputs)[0], before)


@needs_amx
def test_other_layers_are_told_apart(layer: Any) -> None:
    assert uses_fp8_blocks(layer)
    assert not uses_fp8_blocks(nn.Linear(2, 2))


def _weights(seed: int) -> list[Tensor]:
    """The matrices, bfloat16: E4M3 numbers times 2^-10, in every block the largest, so that rounding is exact."""
    generator = torch.Generator().manual_seed(seed)
    matrices = []
    for rows in OUTPUTS:
        numbers = (torch.randn(rows, INPUTS, generator=generator) * 100).clamp(-448, 448)
        numbers[::128, ::128] = 448.0
        matrices.append((numbers.to(torch.float8_e4m3fn).float() / 1024).bfloat16())
    return matrices


def _load(layer: Any, weights: list[Tensor]) -> None:
    for number, matrix in enumerate(weights):
        layer.weight.weight_loader(layer.weight, matrix, number)


def _write(layer: Any, weights: list[Tensor]) -> None:
    """As a refit brings them: rounded a matrix at a time, numbers and scales."""
    blocked, row = RebuiltLayer(layer, ["weight"]), 0
    for matrix in weights:
        numbers, scales = quantise(matrix)
        opened = blocked.open()
        opened.weight.data[row : row + len(matrix)].copy_(numbers)
        getattr(opened, name_scales("weight")).data[row // 128 : row // 128 + len(scales)].copy_(scales)
        row += len(matrix)
    blocked.close()


@dataclasses.dataclass
class Settings:
    scale: Tensor
    block: int = 128


class Kernel:
    def __init__(self, settings: Settings) -> None:
        self.settings, self.strides = settings, [torch.full((2,), 7)]
        self.call = functools.partial(print, settings.scale)


class Method:
    """Makes a kernel whose scale is derived from the layer's weight, in each conversion."""

    kernel: Kernel

    def convert(self, kernel_layer: Any, block: int = 128) -> None:
        self.settings = Settings(2.0 * kernel_layer.weight.detach(), block)
        self.kernel = Kernel(self.settings)
        kernel_layer.workspace = torch.full((3,), float(kernel_layer.weight[0]))


@pytest.fixture
def kernel_layer(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(engine_layers, "detect_platform", lambda: Platform("cuda", torch.device("cpu"), "nccl"))
    monkeypatch.setattr(engine_layers, "_PACKAGES", (__name__,))
    module: Any = nn.Module()
    module.weight = nn.Parameter(torch.ones(2), requires_grad=False)
    module.quant_method = Method()
    module.quant_method.convert(module)
    return module


def test_the_first_objects_get_the_values_of_a_conversion(kernel_layer: Any) -> None:
    method = kernel_layer.quant_method
    kernel, settings, scale, workspace = method.kernel, method.settings, method.settings.scale, kernel_layer.workspace
    for factor in (3.0, 5.0):
        state = KernelState(kernel_layer)
        kernel_layer.weight.data.fill_(factor)
        method.convert(kernel_layer)
        assert method.kernel is not kernel
        state.keep()
        assert method.kernel is kernel
        assert kernel.settings is method.settings is settings
        assert settings.scale is scale
        assert kernel.call.args[0] is scale
        assert kernel_layer.workspace is workspace
        assert (scale.tolist(), workspace.tolist()) == ([2 * factor] * 2, [factor] * 3)


def test_a_conversion_that_is_given_up_leaves_the_first_objects(kernel_layer: Any) -> None:
    method, state = kernel_layer.quant_method, KernelState(kernel_layer)
    kernel = method.kernel
    method.convert(kernel_layer)
    state.put_back()
    assert method.kernel is kernel


def enlarge(kernel_layer: Any) -> None:
    kernel_layer.quant_method.convert(kernel_layer)
    kernel_layer.workspace = torch.zeros(4)


def leave_out(kernel_layer: Any) -> None:
    kernel_layer.quant_method.convert(kernel_layer)
    kernel_layer.workspace = None


def close(kernel_layer: Any) -> None:
    kernel_layer.quant_method.convert(kernel_layer)
    kernel_layer.quant_method.kernel.call = lambda: None


@pytest.mark.parametrize(
    ("convert", "path"),
    [
        (enlarge, "workspace"),
        (leave_out, "workspace"),
        (close, r"quant_method\.kernel\.call"),
        (
            lambda kernel_layer: kernel_layer.quant_method.convert(kernel_layer, block=64),
            r"quant_method\.settings\.block",
        ),
    ],
)
def test_what_tensors_alone_cannot_bring_to_a_graph_is_refused(kernel_layer: Any, convert: Any, path: str) -> None:
    state = KernelState(kernel_layer)
    convert(kernel_layer)
    with pytest.raises(ValueError, match=rf"has changed {path}.*moe_backend or linear_backend"):
        state.keep()


def test_kernels_on_cpus_are_made_anew(kernel_layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_layers, "detect_platform", lambda: Platform("cpu", torch.device("cpu"), "gloo"))
    method, state = kernel_layer.quant_method, KernelState(kernel_layer)
    kernel = method.kernel
    method.convert(kernel_layer)
    state.keep()
    assert method.kernel is not kernel


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
            expected[module] += count_elements(box.layout.tensor) * width
            of_layers[index[box.tensor].layer] += count_elements(box.layout.tensor) * width
    remaining: dict[str, int] = {}
    open_bytes = 0
    for piece in pieces[pieces["target"] == target]:  # a worker's pieces are in the order of their turns
        module = find_module(keys[piece["tensor"]][0])
        if module is None:
            continue
        remaining.setdefault(module, expected[module])
        open_bytes = max(open_bytes, sum(expected[name] for name in remaining))
        remaining[module] -= count_elements(read_ranges(piece)) * width
        if not remaining[module]:
            del remaining[module]
    assert not remaining, "every module is complete at the end"
    return open_bytes, max(of_layers.values())


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
        open_bytes, largest = replay(config, shape, engine, pieces, target)
        assert 0 < open_bytes <= largest
        assert open_bytes + largest <= min(estimate * 1.02, MOST_OPEN * largest), "a layer and its converted form"


def test_without_the_order_of_layers_many_would_be_open() -> None:
    config = recipe_config("+exp=qwen3_30b_a3b_4nodes")
    shape = read_model_shape(config.policy.model.path)
    engine = assume_boxes(shape, config.generation.parallel)
    open_bytes, largest = replay(config, shape, engine, plan_recipe(config, shape, engine, by_layer=False), 0)
    assert open_bytes > MOST_OPEN * largest
