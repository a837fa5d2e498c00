"""FP8 numerics in torch: rounding against arithmetic, and a policy in every layout against transformers rounded so."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Fp8Config, LoraConfig, PolicyConfig
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.platform.device import detect_platform
from megatron_grpo.trainer.microbatch import MicrobatchMaker
from megatron_grpo.trainer.model.build import build_transformer_config
from megatron_grpo.trainer.model.megatron_config import require_fp8
from megatron_grpo.trainer.model.rounding import round_blocks, round_tensor
from tests.parity.fp8_oracle import block_scales, e4m3, expect_equal, measure_in_transformers, measure_on_rank, simulate
from tests.parity.ranks import Layout, run_on_ranks
from tests.support.fp8_oracle import dequantise, quantise
from tests.support.tiny_models import VOCAB, TinyModel

RECIPES = ["tensorwise", "blockwise", "mxfp8"]


def test_e4m3_of_the_oracle_is_torchs() -> None:
    """Every number that E4M3 has, and what lies between them, ties included."""
    numbers = torch.arange(-128, 128, dtype=torch.int8).view(torch.float8_e4m3fn).float()
    exact = numbers[numbers.isfinite()].sort().values
    middles = (exact[1:] + exact[:-1]) / 2
    for values in (exact, middles, torch.randn(4096) * 100):
        within = values.clamp(-448, 448)
        assert torch.equal(e4m3(within), within.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_equals_arithmetic(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-12, 12, (256, 1), generator=generator))
    values = (torch.randn(256, 384, generator=generator) * spread).to(dtype)
    values[:2] = 0
    exact = values.float()
    scale = 448 / exact.abs().max()
    assert torch.equal(round_tensor(values), (e4m3(exact * scale) / scale).to(dtype))
    for rows, columns in ((1, 128), (128, 128)):
        scales = block_scales(exact, rows, columns, power_of_two=False)
        rounded = round_blocks(values, rows, columns, power_of_two=False)
        assert torch.equal(rounded, (e4m3(exact / scales) * scales).to(dtype))
    scales = block_scales(exact, 1, 32, power_of_two=True)
    assert torch.equal(round_blocks(values, 1, 32, power_of_two=True), (e4m3(exact * scales) / scales).to(dtype))
    assert torch.equal(round_tensor(values * 0), values * 0)


def test_weights_are_rounded_to_the_numbers_that_engines_receive() -> None:
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 384)
    assert torch.equal(round_blocks(weight, 128, 128, power_of_two=False), dequantise(*quantise(weight)))


def test_blocks_that_are_cut_are_an_error() -> None:
    with pytest.raises(AssertionError, match="100 columns are not whole blocks of 128"):
        round_blocks(torch.ones(128, 100), 1, 128, power_of_two=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Heads of 128 features, so that no block has rows of two of the merged matrices."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False, max_position_embeddings=64))
    with torch.no_grad():
        for name, parameter in qwen3.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.1)
    path = tmp_path_factory.mktemp("fp8") / "model"
    qwen3.save_pretrained(path)
    return TinyModel("fp8", path)


def expect_rounded(
    layout: Layout, model: TinyModel, fp8: Fp8Config, layers: list[int], recompute: bool = False
) -> None:
    """Expect numbers of transformers with rounded operands in these layers."""
    settings = {"fp8": fp8, "activation_checkpointing": recompute}
    expected = measure_in_transformers(simulate(model.load(), fp8.recipe, layers))
    expect_equal(run_on_ranks(layout, measure_on_rank, model, settings), *expected)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tensor=2), Layout(tensor=2, sequence=True), Layout(pipeline=2)], ids=str
)
def test_simulated_fp8_equals_transformers_rounded_the_same_way(layout: Layout, recipe: str, model: TinyModel) -> None:
    expect_rounded(layout, model, Fp8Config(format="hybrid", recipe=recipe, simulate=True), [0, 1])


def test_recomputed_layers_round_again(model: TinyModel) -> None:
    fp8 = Fp8Config(format="e4m3", recipe="blockwise", simulate=True)
    expect_rounded(Layout(tensor=2), model, fp8, [0, 1], recompute=True)


@pytest.mark.parametrize(("first", "last", "layers"), [(1, 0, [1]), (0, 1, [0]), (1, 1, [])])
def test_outer_layers_keep_their_numbers(first: int, last: int, layers: list[int], model: TinyModel) -> None:
    fp8 = Fp8Config(format="hybrid", simulate=True, first_layers_bf16=first, last_layers_bf16=last)
    expect_rounded(Layout(pipeline=2), model, fp8, layers)


def test_the_rounding_shows(model: TinyModel) -> None:
    """Guards the tests above: without rounding they would fail."""
    plain = measure_in_transformers(model.load())[0]
    for recipe in RECIPES:
        rounded = measure_in_transformers(simulate(model.load(), recipe, [0, 1]))[0]
        assert (rounded - plain).abs().max() > 1e-3


def test_adapters_go_with_rounded_layers(model: TinyModel) -> None:
    """B is zero: the merged weights and the log-probabilities are those of the rounded base model."""
    fp8 = Fp8Config(format="hybrid", recipe="mxfp8", simulate=True)
    ((logprobs, _, _),) = run_on_ranks(Layout(), measure_on_rank, model, {"fp8": fp8, "lora": LoraConfig(rank=2)})
    expected = measure_in_transformers(simulate(model.load(), "mxfp8", [0, 1]))[0]
    torch.testing.assert_close(logprobs, expected, atol=2e-5, rtol=0)


def test_settings_reach_megatron_and_are_refused_without_a_gpu(model: TinyModel) -> None:
    """What Transformer Engine does with them has not run here."""
    fp8 = Fp8Config(format="hybrid", recipe="blockwise", parameters=True, first_layers_bf16=1, last_layers_bf16=2)
    config = build_transformer_config(PolicyConfig(fp8=fp8), model.shape, detect_platform())
    assert (config.fp8, config.fp8_recipe, config.fp8_param) == ("hybrid", "blockwise", True)
    assert (config.first_last_layers_bf16, config.num_layers_at_start_in_bf16) == (True, 1)
    assert config.num_layers_at_end_in_bf16 == 2
    for off in (Fp8Config(), replace(fp8, simulate=True)):
        assert build_transformer_config(PolicyConfig(fp8=off), model.shape, detect_platform()).fp8 is None
        require_fp8(off, model.shape, detect_platform())
    with pytest.raises(RunError, match=r"policy\.fp8\.format=hybrid needs a GPU and Transformer Engine"):
        require_fp8(fp8, model.shape, detect_platform())


def local_tokens_on_rank(layout: Layout, shape: ModelShape, packing: bool) -> int:
    fp8 = Fp8Config(format="hybrid", recipe="tensorwise")
    config = PolicyConfig(parallel=layout.parallel, packing=packing, fp8=fp8)
    return MicrobatchMaker(config, shape, detect_platform()).lay_out([5, 9, 7]).local_tokens


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, sequence=True), Layout(context=2)], ids=str)
def test_microbatches_have_the_tokens_that_products_take(layout: Layout, model: TinyModel) -> None:
    """Also what sequence parallelism leaves each rank."""
    for packing in (True, False):
        for tokens in run_on_ranks(layout, local_tokens_on_rank, model.shape, packing):
            assert tokens % (16 * (layout.tensor if layout.sequence else 1)) == 0
            assert tokens * layout.context >= 21
