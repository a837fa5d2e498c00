"""What only Transformer Engine's layers do: packed attention, FP8 in each recipe, gradients that products add up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from megatron_grpo.config.schema import Fp8Config
from tests.gpu.dry import end_dry
from tests.parity.fp8_oracle import measure_in_transformers, measure_on_rank, simulate
from tests.parity.on_rank import load_on_rank, save_on_rank
from tests.parity.policy_training import gradients_on_rank, make_engine, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_fp8 import model
from tests.parity.training import merge
from tests.support.tiny_models import VOCAB, TinyModel, make_tiny_model

__all__ = ["model"]  # a fixture of the tests here
ONE = Layout()
RECIPES = ["delayed", "tensorwise", "blockwise", "mxfp8"]
LAYERS = [0, 1]


def attention_on_rank(layout: Layout, tiny: TinyModel) -> tuple[list[tuple[bool, bool, bool, bool]], list[str]]:
    """Of each selection of an attention in a packed step: whether sequences are padded in between, and whether
    FlashAttention, cuDNN's and the unfused attention may be used; then why cuDNN's may not."""
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    results, select = [], utils.get_attention_backend
    reasons, ask = [], utils._get_fused_attn_backend

    def select_backend(**parameters: Any) -> Any:
        backend, reason = ask(**parameters)
        reasons.append(f"{backend} {reason}")
        return backend, reason

    def selected(parameters: Any) -> Any:
        result = select(parameters)
        results.append((parameters.pad_between_seqs, bool(result[0]), bool(result[2]), bool(result[4])))
        return result

    utils.get_attention_backend, utils._get_fused_attn_backend = selected, select_backend
    make_engine(layout, tiny, precision="bfloat16").train(*train_arguments(layout))
    return results, reasons


@pytest.mark.parametrize("layout", [ONE, Layout(context=2)], ids=str)
def test_packed_sequences_have_no_padding_in_between(
    layout: Layout, model: TinyModel, record_property: Callable[[str, object], None]
) -> None:
    """Otherwise FlashAttention is excluded, or the host waits in every layer to find out."""
    end_dry(layout, model)
    for selections, reasons in run_on_ranks(layout, attention_on_rank, model):
        record_property("flash, fused, unfused", selections[0][1:])
        assert selections
        assert not any(padded for padded, *_ in selections)
        assert any(flash or fused for _, flash, fused, _ in selections), reasons


def require_recipe(fp8: Fp8Config) -> None:
    """Skip the test on GPUs without the recipe."""
    have = torch.cuda.get_device_capability() if torch.cuda.is_available() else fp8.least_capability
    if have < fp8.least_capability:
        needs, device = (".".join(map(str, capability)) for capability in (fp8.least_capability, have))
        pytest.skip(f"needs compute capability {needs}, and this GPU has {device}")


@pytest.mark.parametrize("parameters", [False, True], ids=["", "parameters"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_rounds_as_much_as_its_simulation(
    recipe: str, parameters: bool, model: TinyModel, record_property: Callable[[str, object], None]
) -> None:
    """Not bit by bit, since bfloat16 moves what is rounded. The simulation of delayed scaling is that of tensorwise."""
    fp8 = Fp8Config(format="hybrid", recipe=recipe, parameters=parameters)
    require_recipe(fp8)
    end_dry(ONE, model, fp8=fp8)
    settings = {"fp8": fp8, "precision": "bfloat16"}
    ((logprobs, _, gradients),) = run_on_ranks(ONE, measure_on_rank, model, settings)
    assert logprobs is not None
    plain, of_plain = measure_in_transformers(model.load())
    simulation = simulate(model.load(), "tensorwise" if recipe == "delayed" else recipe, LAYERS)
    simulated, _ = measure_in_transformers(simulation)
    moved, moved_by_simulation = ((values - plain).abs().mean().item() for values in (logprobs, simulated))
    errors = {name: ((gradients[name] - values).norm() / values.norm()).item() for name, values in of_plain.items()}
    record_property("mean_abs", moved)
    record_property("mean_abs_of_simulation", moved_by_simulation)
    record_property("largest_gradient_error", max(errors.values()))
    assert 0.5 < moved / moved_by_simulation < 2
    assert max(errors.values()) < 0.8, errors


@pytest.mark.parametrize("parameters", [False, True], ids=["", "parameters"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_fp8_continues(recipe: str, parameters: bool, model: TinyModel, tmp_path: Path) -> None:
    fp8 = Fp8Config(format="hybrid", recipe=recipe, parameters=parameters)
    require_recipe(fp8)
    end_dry(ONE, model, fp8=fp8)
    arguments = (model, tmp_path, {"precision": "bfloat16", "fp8": fp8})
    saved, loaded = (merge(run_on_ranks(ONE, body, *arguments)) for body in (save_on_rank, load_on_rank))
    for name, tensor in saved.items():
        # An FP8 parameter at the middle between two neighbours of its grid may become either.
        is_off = (loaded[name] - tensor).abs() > (0.13 * tensor.abs() if parameters else 0) + 2e-2 * (1 + tensor.abs())
        assert not is_off.any(), f"{name}: {is_off.sum()} of {is_off.numel()} elements differ"


@pytest.mark.parametrize("name", ["qwen3_untied", "qwen3_moe"])
def test_fused_gradients_are_those_of_a_product_and_a_sum(name: str, tmp_path: Path) -> None:
    tiny = make_tiny_model(name, tmp_path)
    separate, fused = ({"precision": "bfloat16", "gradient_accumulation_fusion": chosen} for chosen in (False, True))
    ((expected_ones, _),), ((actual, _),) = (
        run_on_ranks(ONE, gradients_on_rank, [tiny], True, is_fused)[0] for is_fused in (separate, fused)
    )
    for parameter, gradient in expected_ones.items():
        error = (actual[parameter] - gradient).norm() / gradient.norm()
        assert error < 2e-2, f"{parameter}: relative error {error:.1e}"


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_experts_in_fp8_train_and_are_saved(recipe: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2))
    model.save_pretrained(tmp_path / "experts")
    tiny = TinyModel("experts", tmp_path / "experts")
    fp8 = Fp8Config(format="hybrid", recipe=recipe)
    require_recipe(fp8)
    end_dry(ONE, tiny, fp8=fp8)
    (tmp_path / "checkpoint").mkdir()
    arguments = (tiny, tmp_path / "checkpoint", {"precision": "bfloat16", "fp8": fp8})
    saved, loaded = (merge(run_on_ranks(ONE, body, *arguments)) for body in (save_on_rank, load_on_rank))
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert saved.keys() == loaded.keys()
