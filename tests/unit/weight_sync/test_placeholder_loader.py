"""Engines that begin with placeholders, after a refit, against engines that have read the folder."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vllm.config import LoadConfig

from megatron_grpo.config.schema import GenerationConfig, ParallelConfig
from megatron_grpo.generation.engine_arguments import VllmSettings, make_engine_arguments
from megatron_grpo.generation.vllm_images import EngineImages
from megatron_grpo.models.families import measure_tensors
from megatron_grpo.models.families.reading import include_tower, read_model_shape
from megatron_grpo.models.weight_layouts import split_policy
from megatron_grpo.weight_sync import placeholder_loader
from megatron_grpo.weight_sync.boxes import to_slices
from megatron_grpo.weight_sync.engine_layers import ModelReload, list_unsent
from megatron_grpo.weight_sync.model_writer import ModelWriter
from megatron_grpo.weight_sync.pieces import read_ranges, split_messages
from megatron_grpo.weight_sync.placeholder_loader import PlaceholderLoader, find_unsent, measure_folder, read_tensors
from megatron_grpo.weight_sync.transfer_plan import choose_wire_dtypes, plan_messages
from megatron_grpo.weight_sync.weight_trace import trace_model
from tests.support.engine_configs import ENGINE_CONFIGS, write_engine_config
from tests.support.engine_state import list_state
from tests.support.image_models import make_image_model
from tests.support.refit_models import full_tensor, made_up_worker
from tests.support.vision_models import make_vision_model

# A tied head, experts, latent attention, delta nets, a state space, a loaded buffer, sinks, a vision folder; others are
# slow.
QUICK = ("qwen3_moe", "nemotron_h", "gpt_oss")
NOT_ON_CPUS = {"deepseek_v32", "glm_moe_dsa", "nemotron_h_moe"}
CASES = [
    pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
    for family in ENGINE_CONFIGS
    if family not in NOT_ON_CPUS
]


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('group')}/meet", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


def write_folder(family: str, folder: Path) -> dict[str, Tensor]:
    """Write a model with the tensors that a refit sends, and return these."""
    write_engine_config(family, folder)
    sizes = measure_tensors(read_model_shape(folder))
    tensors = {name: 0.1 * full_tensor(name, size).bfloat16() for name, size in sizes.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def build_model(
    folder: Path, *, awaits_refit: bool, images: EngineImages | None = None, **engine_args: Any
) -> tuple[nn.Module, Any]:
    """Start vLLM's model of an engine as its worker does; return it with vLLM's configuration."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.model_loader import get_model

    rotary_embedding._ROPE_DICT.clear()  # a dry run in this process leaves modules without data
    settings = VllmSettings(
        model_path=str(folder),
        config=GenerationConfig(engine_args=engine_args),
        precision="bfloat16",
        max_total_sequence_length=128,
        awaits_refit=awaits_refit,
        images=images,
    )
    config = AsyncEngineArgs(**make_engine_arguments(settings), skip_tokenizer_init=True).create_engine_config()
    with set_current_vllm_config(config), torch.no_grad():
        return get_model(vllm_config=config), config


def refit(
    model: nn.Module, config: Any, folder: Path, tensors: dict[str, Tensor], mode: str, *, trains_tower: bool = False
) -> int:
    """Bring tensors into the model as an engine's worker does, without links; returns the bytes of pieces."""
    from vllm.config import set_current_vllm_config

    shape = read_model_shape(folder)
    shape = include_tower(shape, folder) if trains_tower else shape
    with set_current_vllm_config(config), torch.no_grad():
        boxes = trace_model(model, measure_tensors(shape), torch.bfloat16).boxes
        if mode == "broadcast":
            worker = made_up_worker(model, boxes)
            worker.vllm_config = config
            reload = ModelReload(worker)
            reload.begin()
            reload.load(tensors.items())
            reload.finish()
            return sum(tensor.nbytes for tensor in tensors.values())
        dtypes = choose_wire_dtypes(shape, "bfloat16", fp8_blocks=False)
        policy, names = split_policy(ParallelConfig(), shape), list(measure_tensors(shape))
        messages = split_messages(plan_messages(shape, policy, [boxes], 1, dtypes, 1 << 20))
        writer = ModelWriter(model, torch.bfloat16, boxes, messages)
        writer.begin()
        for number, message in enumerate(messages):
            for position, piece in enumerate(message):
                values = tensors[names[piece["tensor"]]][to_slices(read_ranges(piece))]
                writer.write(number, position, values)
        writer.finish()
        return sum(int(message["bytes"].sum()) for message in messages)


def find_differences(expected: nn.Module, actual: nn.Module) -> list[str]:
    """Paths of the tensors and numbers in which two models differ."""
    states = list_state(expected), list_state(actual)
    differing = list(states[0].keys() ^ states[1].keys())
    for path in states[0].keys() & states[1].keys():
        first, second = states[0][path], states[1][path]
        if isinstance(first, Tensor) and isinstance(second, Tensor):
            is_equal = first.dtype == second.dtype and torch.equal(
                first.float().nan_to_num(7), second.float().nan_to_num(7)
            )
        else:
            is_equal = type(first) is type(second) and first == second
        if not is_equal:
            differing.append(path)
    return sorted(differing)


@pytest.mark.turns(2)
@pytest.mark.parametrize("mode", ["reshard", pytest.param("broadcast", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", CASES)
def test_a_refit_leaves_nothing_of_the_placeholders(
    family: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family.startswith("qwen3_5") or family.endswith("_vision"):
        pytest.importorskip("torchvision")  # vLLM's module of these models imports it
    tensors = write_folder(family, tmp_path)
    expected, _ = build_model(tmp_path, awaits_refit=False)
    monkeypatch.setattr(placeholder_loader, "read_tensors", lambda *_: pytest.fail("the folder was read"))
    actual, config = build_model(tmp_path, awaits_refit=True)
    assert find_differences(expected, actual)
    refit(actual, config, tmp_path, tensors, mode)
    assert find_differences(expected, actual) == []
    # An engine that sleeps without weights keeps only what no refit brings; a GPU's memory comes back with any content.
    boxes = trace_model(actual, measure_tensors(read_model_shape(tmp_path)), torch.bfloat16).boxes
    copies = [(tensor, tensor.clone()) for tensor in list_unsent(actual, boxes)]
    assert sum(tensor.nbytes for tensor, _ in copies) < 0.2 * sum(tensor.nbytes for tensor in actual.parameters())
    for tensor in (*(parameter.data for parameter in actual.parameters()), *(tensor for tensor, _ in copies)):
        tensor.fill_(7 if tensor.dtype == torch.bool or not tensor.is_floating_point() else torch.nan)
    assert find_differences(expected, actual)
    for tensor, copy in copies:
        tensor.copy_(copy)
    refit(actual, config, tmp_path, tensors, mode)
    assert find_differences(expected, actual) == []


@pytest.mark.parametrize("container", ["ministral3", "gemma3"])
def test_a_tower_that_engines_do_not_build_is_not_read(
    container: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchvision")
    make_vision_model(container, tmp_path)
    sent, stored, _ = measure_folder(tmp_path)
    assert stored.keys() > sent.keys()
    monkeypatch.setattr(placeholder_loader, "read_tensors", lambda *_: pytest.fail("the folder was read"))
    build_model(tmp_path, awaits_refit=True)


@pytest.mark.turns(2)
@pytest.mark.parametrize("mode", ["reshard", "broadcast"])
@pytest.mark.parametrize(
    ("name", "trains_tower"),
    [("qwen2_5_vl", False), ("qwen2_5_vl", True), ("qwen3_vl", False), ("qwen3_vl", True), ("qwen3_vl_moe", False)],
)
def test_a_refit_fills_the_text_part_and_a_trained_tower(
    name: str, trains_tower: bool, mode: str, tmp_path: Path
) -> None:
    pytest.importorskip("torchvision")
    folders = [tmp_path / "first", tmp_path / "second"]
    for seed, folder in enumerate(folders):
        make_image_model(folder, seed, name)
    first, second = (load_file(folder / "model.safetensors") for folder in folders)
    tower = {key: tensor for key, tensor in first.items() if "visual." in key}
    if not trains_tower:
        save_file({**second, **tower}, folders[1] / "model.safetensors", {"format": "pt"})
    vision = read_model_shape(folders[0]).vision
    assert vision is not None
    images = EngineImages(str(tmp_path), vision, 1)
    expected, _ = build_model(folders[1], awaits_refit=False, images=images)
    actual, config = build_model(folders[0], awaits_refit=True, images=images)
    assert find_differences(expected, actual)
    tensors = {key: tensor.bfloat16() for key, tensor in second.items() if trains_tower or key not in tower}
    sent = refit(actual, config, folders[1], tensors, mode, trains_tower=trains_tower)
    assert sent == sum(tensor.nbytes for tensor in tensors.values()), "no byte of a frozen tower is sent"
    assert find_differences(expected, actual) == []


@pytest.mark.slow
def test_a_folder_with_more_than_a_refit_sends_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder("qwen2", tmp_path)
    sent, stored, _ = measure_folder(tmp_path)
    less = {name: size for name, size in sent.items() if "q_proj.bias" not in name}
    monkeypatch.setattr(placeholder_loader, "measure_folder", lambda _: (less, stored, False))
    expected, _ = build_model(tmp_path, awaits_refit=False)
    actual, _ = build_model(tmp_path, awaits_refit=True)
    assert find_differences(expected, actual) == []
    assert "no refit sends model.layers.0.self_attn.qkv_proj.bias" in caplog.text
    assert f"reads {len(stored)} of {len(stored)} tensors" in caplog.text
    monkeypatch.setattr(placeholder_loader, "measure_folder", lambda _: (less, stored, True))
    with pytest.raises(ValueError, match=r"no refit sends .*qkv_proj.bias.* quantized weights are never read"):
        build_model(tmp_path, awaits_refit=True)


class MadeUp(nn.Module):
    """A model whose loader writes each tensor to where `targets` says, and others nowhere."""

    def __init__(self, targets: dict[str, Callable[[Any], Tensor]]) -> None:
        super().__init__()
        self.targets = targets
        self.weight = nn.Parameter(torch.zeros(4, 2), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("table", torch.zeros(3, dtype=torch.int64))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.targets:
                self.targets[name](self).copy_(tensor)


HALVES = {"a": lambda model: model.weight.data[:2], "b": lambda model: model.weight.data[2:]}
SIZES = {"a": (2, 2), "b": (2, 2)}


@pytest.mark.parametrize(
    ("extra", "size", "target", "unsent"),
    [
        ("a tower", (5,), None, []),
        ("both", (4, 2), lambda model: model.weight.data, []),
        ("a scale", (1,), lambda model: model.scale, ["scale"]),
        ("a table", (3,), lambda model: model.table, ["table"]),
    ],
)
def test_what_the_folder_alone_fills_is_named(
    extra: str, size: tuple[int, ...], target: Callable[[Any], Tensor] | None, unsent: list[str]
) -> None:
    model = MadeUp(HALVES | ({extra: target} if target is not None else {}))
    assert find_unsent(model, SIZES, SIZES | {extra: size}, torch.float32) == unsent


def test_layers_that_propose_tokens_read_their_own_tensors_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker of every engine would read the whole folder otherwise."""
    drafter = MadeUp({"mtp.scale": lambda model: model.scale})
    values = {name: torch.full(size, 3.0) for name, size in (SIZES | {"mtp.scale": (1,)}).items()}
    save_file(values, tmp_path / "model.safetensors")
    stored = {name: tuple(value.shape) for name, value in values.items()}
    monkeypatch.setattr(placeholder_loader, "measure_folder", lambda _: (SIZES, stored, False))
    config: Any = SimpleNamespace(model=str(tmp_path), dtype=torch.float32)
    weights = list(PlaceholderLoader(LoadConfig()).get_all_weights(config, drafter))
    assert [name for name, _ in weights] == ["mtp.scale"]
    drafter.load_weights(weights)
    assert drafter.scale == 3.0
    assert dict(read_tensors(tmp_path, ["b"]))["b"].tolist() == [[3.0, 3.0]] * 2


def test_a_half_that_no_refit_sends_is_named() -> None:
    assert find_unsent(MadeUp(HALVES), {"a": SIZES["a"]}, SIZES, torch.float32) == ["weight"]
