"""What of FP8, adapters, quantization and optimizers a model and a machine take; the rest is refused before a start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.config.schema import Config, Fp8Config, LoraConfig, LossConfig, ParallelConfig
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.models.shape import LatentShape, ModelShape
from megatron_grpo.preflight import node_checks as checks
from megatron_grpo.preflight.machine_checks import find_package_problems
from megatron_grpo.preflight.model_checks import find_fp8_problems, find_training_problems
from megatron_grpo.preflight.node_checks import find_fp8_machine_problems, read_gpu_capability
from megatron_grpo.preflight.remarks import find_unused_settings
from tests.support.config_problems import SMALL

SHAPE = replace(parse_model_shape(SMALL), hidden=256, head_dim=128, ffn_hidden=512)
"""Eight heads and four key/value heads in four layers."""
LATENT = replace(SHAPE, latent=LatentShape(query_rank=256, rank=128, plain_dim=128, rope_dim=64, value_dim=128))


def compress(**sizes: int) -> ModelShape:
    assert LATENT.latent is not None
    return replace(LATENT, latent=replace(LATENT.latent, **sizes))


def config(gpus: int = 8, **fp8: object) -> Config:
    config = Config()
    config.cluster.gpus_per_node = gpus
    config.policy.fp8 = Fp8Config(**{"format": "hybrid", **fp8})
    return config


def problems(config: Config, shape: ModelShape | None = SHAPE) -> dict[str, str]:
    return {problem.subject: problem.text for problem in find_fp8_problems(config, shape)}


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_what_fits_is_taken(recipe: str) -> None:
    assert problems(config(recipe=recipe)) == {}
    assert problems(config(format="off", recipe=recipe, first_layers_bf16=99)) == {}
    if recipe != "delayed":
        assert problems(config(gpus=0, recipe=recipe, simulate=True)) == {}
    assert problems(config(recipe=recipe), LATENT) == {}, "a short vector and a rotated key are 192 rows"


def test_layers_that_transformer_engine_does_not_have_are_refused() -> None:
    text = "Transformer Engine's layers do not express qwen3; use off, with precision=fp8_engines if the engines are "
    (problem,) = problems(config(), replace(SHAPE, post_norms=True)).values()
    assert problem.startswith(text)


def test_what_the_device_cannot_do_is_refused_with_what_to_do() -> None:
    on_cpu = problems(config(gpus=0))
    assert on_cpu["policy.fp8.format=hybrid"].endswith("use off, or policy.fp8.simulate=true for its numerics")
    full = config()
    full.policy.precision = "float32"
    assert problems(full)["policy.fp8.format=hybrid"] == "needs policy.precision=bfloat16, not float32"
    adapted = config()
    adapted.policy.lora = LoraConfig(rank=4)
    assert problems(adapted)["policy.fp8.format=hybrid"].endswith("use off, or policy.lora.rank=0")
    assert "mxfp8" in problems(config(parameters=True, recipe="mxfp8"))["policy.fp8.parameters=True"]
    settings = config(parameters=True)
    settings.policy.optimizer.distributed = False
    assert "policy.optimizer.distributed=true" in problems(settings)["policy.fp8.parameters=True"]


def test_delayed_is_neither_simulated_nor_left_out_of_layers() -> None:
    refusals = problems(config(recipe="delayed", simulate=True, first_layers_bf16=1))
    assert refusals["policy.fp8.recipe=delayed"].endswith("use tensorwise, blockwise or mxfp8")
    assert refusals["policy.fp8.first_layers_bf16=1"].endswith("use 0, or policy.fp8.recipe=tensorwise")


def test_more_outer_layers_than_there_are() -> None:
    settings = config(last_layers_bf16=3)
    settings.policy.parallel.pipeline = 2
    text = "is more than the 2 layers that a pipeline rank has"
    assert problems(settings) == {"policy.fp8.last_layers_bf16=3": text}
    assert problems(config(first_layers_bf16=5, simulate=True)) == {
        "policy.fp8.first_layers_bf16=5": "is more than the 4 layers that the model has"
    }


@pytest.mark.parametrize(
    ("recipe", "tensor", "shape", "expected"),
    [
        ("blockwise", 1, replace(SHAPE, hidden=192), "multiples of 128, and the model's hidden size is 192; use fewer"),
        ("blockwise", 8, SHAPE, "multiples of 128, and the model's feed-forward width is 512 over 8 ranks; use fewer"),
        ("mxfp8", 1, replace(SHAPE, ffn_hidden=80), "multiples of 32, and the model's feed-forward width is 80; use "),
        ("tensorwise", 1, replace(SHAPE, hidden=24), "multiples of 16, and the model's hidden size is 24; use off"),
        ("blockwise", 1, compress(query_rank=192), "multiples of 128, and the model's q_lora_rank is 192; use fewer"),
        ("blockwise", 1, compress(rank=64), "multiples of 128, and the model's kv_lora_rank is 64; use fewer"),
        ("blockwise", 8, compress(value_dim=64), "the model's width of all heads is 512 over 8 ranks; use fewer"),
        ("mxfp8", 8, compress(rope_dim=4), "the model's width of queries is 1056 over 8 ranks; use fewer"),
        ("tensorwise", 1, compress(rope_dim=8), "a short vector and a rotated key are 136, and no multiple of 16; use"),
    ],
)
def test_sizes_that_are_no_whole_blocks(recipe: str, tensor: int, shape: ModelShape, expected: str) -> None:
    settings = config(recipe=recipe)
    settings.policy.parallel = ParallelConfig(tensor=tensor)
    (text,) = problems(settings, shape).values()
    assert expected in text


@pytest.mark.parametrize(
    ("recipe", "have", "text"),
    [
        (
            "tensorwise",
            (8, 0),
            "recipe=tensorwise needs GPUs of compute capability 8.9, and this machine has 8.0; use off",
        ),
        ("delayed", (8, 9), None),
        ("blockwise", (8, 9), "capability 9.0, and this machine has 8.9; use recipe=tensorwise"),
        ("mxfp8", (9, 0), "capability 10.0, and this machine has 9.0; use recipe=tensorwise"),
        ("mxfp8", (10, 0), None),
        ("mxfp8", None, None),
    ],
)
def test_gpus_that_are_too_old(
    recipe: str, have: tuple[int, int] | None, text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "read_gpu_capability", lambda: have)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    texts = [problem.text for problem in find_fp8_machine_problems(config(recipe=recipe))]
    assert len(texts) == (text is not None)
    assert all(str(text) in refusal for refusal in texts)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = find_package_problems(config())
    assert "pip install 'transformer-engine[pytorch]'" in problem.text
    assert list(find_package_problems(config(simulate=True))) == []


def test_the_oldest_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    for answer, expected in (("9.0\\n10.0\\n8.9\\n", (8, 9)), ("No devices\\n", None)):
        tool.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        assert read_gpu_capability() == expected
    monkeypatch.setenv("PATH", "")
    assert read_gpu_capability() is None


def test_settings_that_change_nothing_are_named() -> None:
    def idle(settings: Config) -> dict[str, str]:
        return {problem.subject: problem.text for problem in find_unused_settings(settings)}

    assert idle(config(format="off", simulate=True)) == {
        "policy.fp8.simulate=True": "needs policy.fp8.format=hybrid or e4m3"
    }
    assert idle(config(amax_history=16)) == {"policy.fp8.amax_history=16": "is for policy.fp8.recipe=delayed"}
    assert "policy.fp8.parameters=True" in idle(config(parameters=True, simulate=True))


@pytest.mark.parametrize(
    ("recipe", "multiple"), [("delayed", 16), ("tensorwise", 16), ("blockwise", 128), ("mxfp8", 32)]
)
def test_tokens_are_padded_for_the_products_of_the_device_alone(recipe: str, multiple: int) -> None:
    assert Fp8Config(format="hybrid", recipe=recipe).token_multiple == multiple
    assert Fp8Config(format="hybrid", recipe=recipe, simulate=True).token_multiple == 1
    assert Fp8Config(recipe=recipe).token_multiple == 1


def test_the_value_model_stays_out_of_fp8() -> None:
    settings = replace(config(), algorithm="ppo")
    assert settings.value_model is not None
    assert settings.value_model.fp8.format == "off"


def test_fused_gradients_of_simulated_fp8_are_refused() -> None:
    settings = config(recipe="tensorwise", simulate=True)
    settings.policy.gradient_accumulation_fusion = True
    (problem,) = find_training_problems(settings, SHAPE)
    assert problem.subject == "policy.gradient_accumulation_fusion=True"
    assert "policy.fp8.simulate=True" in problem.text
    assert "use null" in problem.text


def test_a_loss_without_a_deterministic_form_on_gpus_is_refused() -> None:
    settings = Config()
    settings.cluster.gpus_per_node = 8
    settings.policy.deterministic = True
    assert list(find_training_problems(settings, None)) == []
    settings.loss_fn.kl_score_function_gradient = True
    (problem,) = find_training_problems(settings, None)
    assert problem.subject == "policy.deterministic=True"
    assert problem.text.startswith("excludes loss_fn.kl_score_function_gradient")
    settings.loss_fn = LossConfig(objective="fipo")
    (problem,) = find_training_problems(settings, None)
    assert problem.text.startswith("excludes loss_fn.objective=fipo")
    settings.cluster.gpus_per_node = 0
    assert list(find_training_problems(settings, None)) == []


def offload(config: Config) -> None:
    config.policy.optimizer.cpu_offload = 0.5


def own_adam(config: Config) -> None:
    config.policy.optimizer.precision_aware = True


def set_adapters(config: Config) -> None:
    config.policy.lora.rank = 8


def set_fp8_weights(config: Config) -> None:
    config.policy.fp8.parameters = True


def split_heads(config: Config) -> None:
    config.policy.parallel.tensor = 2 * parse_model_shape(SMALL).key_value_heads


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (offload, "excludes policy.optimizer.cpu_offload"),
        (own_adam, "excludes policy.optimizer.precision_aware"),
        (set_adapters, "policy.lora.rank=8 trains adapters alone; use adamw"),
        (set_fp8_weights, "excludes policy.fp8.parameters"),
        (split_heads, "orthogonalizes queries, keys and values apart"),
    ],
)
def test_muon_names_what_it_does_not_go_with(change: Callable[[Config], None], text: str) -> None:
    config = Config()
    config.cluster.gpus_per_node = 8
    change(config)
    assert not list(find_training_problems(config, parse_model_shape(SMALL)))
    config.policy.optimizer.name = "muon"
    (problem,) = find_training_problems(config, parse_model_shape(SMALL))
    assert problem.subject == "policy.optimizer.name=muon"
    assert text in problem.text


def test_fields_of_muon_need_it() -> None:
    settings = Config()
    settings.policy.megatron_optimizer = {"muon_split_qkv": False}
    (problem,) = find_training_problems(settings, None)
    assert problem.subject == "policy.megatron_optimizer.muon_split_qkv=False"
    settings.policy.optimizer.name = "muon"
    assert not list(find_training_problems(settings, None))
