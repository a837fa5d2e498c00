"""Quantisation-aware training: a policy in every layout against transformers rounded by plain arithmetic, and what the
export command writes of it."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

from megatron_grpo.config.schema import QuantizationFormat
from megatron_grpo.export import main
from megatron_grpo.run.checkpoint_files import write_driver_files
from megatron_grpo.trainer.hf_export import quantize_rows
from megatron_grpo.trainer.model.rounding import QuantizedLinear
from tests.parity.fp8_oracle import e4m3, expect_equal, measure_in_transformers, measure_on_rank
from tests.parity.policy_training import make_engine
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_export import save_checkpoint
from tests.support.tiny_models import TinyModel

FORMATS = get_args(QuantizationFormat)
START_S = 500.0
"""Ranks import modelopt, which takes a while on a busy machine."""


class _Rounded(torch.autograd.Function):
    """Each row of [..., columns] to 8 bits and back; the gradient as it is."""

    @staticmethod
    def forward(ctx, values: Tensor, quantization: str) -> Tensor:
        bound, rounding = (127, torch.round) if quantization == "int8" else (448, e4m3)
        step = values.abs().max(dim=-1, keepdim=True).values / bound
        return rounding(values / step) * step

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def round_weight(values: Tensor, quantization: str) -> Tensor:
    return _Rounded.apply(values, quantization)


def with_rounding(model: torch.nn.Module, quantization: str) -> torch.nn.Module:
    """A transformers model whose layers compute with rounded operands; changes it."""
    for linear in model.model.layers.modules():
        if isinstance(linear, torch.nn.Linear):

            def forward(values: Tensor, linear: torch.nn.Linear = linear) -> Tensor:
                return F.linear(
                    round_weight(values, quantization), round_weight(linear.weight, quantization), linear.bias
                )

            linear.forward = forward
    return model


@pytest.mark.slow
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, sequence=True), Layout(pipeline=2)], ids=str)
def test_quantised_training_equals_transformers_rounded_the_same_way(
    layout: Layout, quantization: str, tiny_models: dict[str, TinyModel]
) -> None:
    """Guarded: without rounding, the numbers are others."""
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    model = tiny_models["qwen3_tied"]
    settings = {"quantization": quantization}
    by_rank = run_on_ranks(layout, measure_on_rank, model, settings, True, timeout_s=START_S)
    logprobs, gradients = measure_in_transformers(with_rounding(model.load(), quantization))
    expect_equal(by_rank, logprobs, gradients)
    assert all(policy is reference is None or torch.equal(policy, reference) for policy, reference, _ in by_rank)
    assert (logprobs - measure_in_transformers(model.load())[0]).abs().max() > 1e-3


def rounded_on_rank(layout: Layout, model: TinyModel, quantization: str) -> dict[str, Tensor]:
    """The weights that the layers of a policy compute with, of the whole model; names are Megatron-Core's."""
    rank = make_engine(layout, model, distributed=False, quantization=quantization)
    layers = {name: layer for name, layer in rank.chunks[0].named_modules() if isinstance(layer, QuantizedLinear)}
    assert len(layers) == 4 * model.shape.layers
    assert not any("quantizer" in name for name in rank.chunks[0].state_dict())
    return {name: layer._quantizers[1](layer.weight.detach()) for name, layer in layers.items()}


def export(model: TinyModel, folder: Path, quantization: str) -> Path:
    """A checkpoint that two ranks wrote, exported in 8 bits."""
    checkpoint = folder / "run" / "checkpoints" / "step_3"
    (checkpoint / "megatron").mkdir(parents=True)
    keys = {"model": {"path": str(model.path)}, "precision": "float32", "quantization": quantization}
    OmegaConf.save(OmegaConf.create({"policy": keys}), folder / "run" / "config.yaml")
    run_on_ranks(Layout(tensor=2), save_checkpoint, model.path, checkpoint / "megatron")
    write_driver_files(
        checkpoint, 3, {"save_state": {"total_steps": 3}, "metrics": {}, "batch_cache": []}, {"epoch": 0}
    )
    output = folder / "out"
    assert main([f"checkpoint={checkpoint}", f"output={output}", "format=quantized"]) == 0
    return output


@pytest.mark.slow
@pytest.mark.parametrize("quantization", FORMATS)
def test_the_exported_weights_are_those_that_the_trained_model_computes_with(
    quantization: str, tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    pytest.importorskip("modelopt", reason="nvidia-modelopt is not installed")
    model = tiny_models["qwen3_tied"]
    stored = load_file(export(model, tmp_path, quantization) / "model.safetensors")
    (computed,) = run_on_ranks(Layout(), rounded_on_rank, model, quantization, timeout_s=START_S)
    for layer in range(model.shape.layers):
        names = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}
        for ours, theirs in names.items():
            name = f"model.layers.{layer}.{theirs}.weight"
            scaled_back = stored[name].float() * stored[f"{name}_scale"]
            torch.testing.assert_close(scaled_back, computed[f"decoder.layers.{layer}.{ours}"], atol=0, rtol=3e-7)
        gate, up = computed[f"decoder.layers.{layer}.mlp.linear_fc1"].chunk(2)
        for part, theirs in ((gate, "gate_proj"), (up, "up_proj")):
            name = f"model.layers.{layer}.mlp.{theirs}.weight"
            torch.testing.assert_close(stored[name].float() * stored[f"{name}_scale"], part, atol=0, rtol=3e-7)


@pytest.mark.parametrize("quantization", FORMATS)
def test_the_exported_folder_holds_the_model_in_8_bits(
    quantization: str, tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    """Weights against arithmetic of another kind; everything else as it was."""
    model = tiny_models["qwen3_tied"]
    output = export(model, tmp_path, quantization)
    stored = load_file(output / "model.safetensors")
    for name, tensor in model.tensors().items():
        if name.endswith("_proj.weight"):
            assert stored[name].dtype == {"int8": torch.int8, "fp8": torch.float8_e4m3fn}[quantization]
            scaled_back = stored[name].float() * stored.pop(f"{name}_scale")
            torch.testing.assert_close(scaled_back, round_weight(tensor, quantization), atol=0, rtol=3e-7)
        else:
            assert torch.equal(stored[name], tensor), name
    assert stored.keys() == model.tensors().keys()
    written = json.loads((output / "config.json").read_text())
    assert written["quantization_config"]["format"] == {"int8": "int", "fp8": "float"}[quantization] + "-quantized"
    assert written["dtype"] == "float32"


@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("factor", [1.0, 0.0, 1e-9])
def test_rows_have_a_scale_each(quantization: QuantizationFormat, factor: float) -> None:
    """Rows of very different sizes; rows of zeros stay zeros, without a scale of zero or infinity."""
    spread = torch.exp2(torch.arange(-12.0, 12.0))[:, None]
    weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(0)) * spread
    weight[3] *= factor
    numbers, scales = quantize_rows(weight, quantization)
    bound = 127 if quantization == "int8" else 448
    scaled_rows = [row for row in range(24) if row != 3 or weight[3].abs().max() > 1e-6]
    assert (numbers.float().abs().amax(dim=1)[scaled_rows] == bound).all()
    exact = round_weight(weight[scaled_rows], quantization)
    torch.testing.assert_close((numbers.float() * scales)[scaled_rows], exact, atol=0, rtol=3e-7)
    assert (numbers.float()[3] == 0).all() == (3 not in scaled_rows)
    assert (scales > 0).all()


def test_a_run_without_quantisation_has_nothing_to_write(
    tiny_models: dict[str, TinyModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    (checkpoint / "megatron").mkdir(parents=True)
    config_file, path = tmp_path / "run" / "config.yaml", tiny_models["qwen3_tied"].path
    command = [f"checkpoint={checkpoint}", f"output={tmp_path / 'out'}", "format=quantized"]
    for value, message in (("null", "has no policy.quantization"), ("int4", "policy.quantization=int4")):
        config_file.write_text(f"policy: {{model: {{path: {path}}}, precision: float32, quantization: {value}}}")
        assert main(command) == 2
        assert message in capsys.readouterr().err
