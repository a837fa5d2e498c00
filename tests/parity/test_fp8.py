"""FP8 numerics in torch: rounding against arithmetic, and a policy in every layout against transformers rounded so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Fp8Config, LoraConfig, LossConfig, ModelConfig, PolicyConfig
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.platform.device import detect_platform
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.microbatch import MicrobatchMaker
from megatron_grpo.trainer.model.build import build_transformer_config
from megatron_grpo.trainer.model.megatron_config import require_fp8
from megatron_grpo.trainer.model.rounding import round_blocks, round_tensor
from megatron_grpo.trainer.rank import PolicyRank
from tests.parity.fp8_oracle import block_scales, e4m3, simulate
from tests.parity.policy_training import OPTIMIZER, whole_gradients
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merged, step_counts
from tests.support.fp8_oracle import dequantise, quantise
from tests.support.tiny_models import VOCAB, TinyModel, logprobs_of_logits

RECIPES = ["tensorwise", "blockwise", "mxfp8"]
LENGTHS = [6, 8, 4]
"""Even, so that sequence parallelism adds no padding, which would take part in a tensor's largest value."""


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
    whole = 448 / exact.abs().max()
    assert torch.equal(round_tensor(values), (e4m3(exact * whole) / whole).to(dtype))
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
    made = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, tie_word_embeddings=False, max_position_embeddings=64))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.1)
    path = tmp_path_factory.mktemp("fp8") / "model"
    made.save_pretrained(path)
    return TinyModel("fp8", path)


def batch() -> TokenBatch:
    generator = torch.Generator().manual_seed(4)
    total, starts = sum(LENGTHS), torch.tensor([0, *LENGTHS]).cumsum(0)[:-1]
    mask = torch.ones(total)
    mask[starts] = 0
    tokens = TokenFields(
        token_ids=torch.randint(0, VOCAB, (total,), generator=generator).int(),
        loss_mask=mask,
        advantages=torch.randn(total, generator=generator),
        generation_logprobs=-torch.rand(total, generator=generator),
    )
    return TokenBatch(LENGTHS, tokens)


def measured_on_rank(
    layout: Layout, model: TinyModel, fp8: Fp8Config, recompute: bool, precision: str = "float32"
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Log-probabilities of all tokens, on the output rank, and gradients."""
    config = PolicyConfig(
        model=ModelConfig(path=str(model.path)),
        parallel=layout.parallel,
        precision=precision,
        optimizer=replace(OPTIMIZER, distributed=False),
        fp8=fp8,
        activation_checkpointing=recompute,
    )
    rank = PolicyRank(RankSettings(config=config, shape=model.shape, folder=str(model.path), decay_steps=1))
    microbatches = [[index] for index in range(len(LENGTHS))]
    tokens = TokenBatch(LENGTHS, TokenFields(token_ids=batch().fields.token_ids))
    logprobs = rank.compute_logprobs(tokens, microbatches)
    loss = ClippedPGLossFn(LossConfig(reference_policy_kl_penalty=0.0))
    rank.compute_gradients(batch(), microbatches, loss, step_counts(batch()))
    return logprobs, whole_gradients(rank)


def expected(model: TinyModel, recipe: str, layers: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by transformers with rounded operands in these layers."""
    oracle = simulate(model.load(), recipe, layers)
    tokens, found, loss = batch().fields, [], torch.zeros(())
    columns = (tokens.token_ids.long(), tokens.loss_mask, tokens.advantages)
    for ids, mask, advantages in zip(*(column.split(LENGTHS) for column in columns), strict=True):
        logprobs = logprobs_of_logits(oracle(ids[None]).logits, ids[None])[0]
        found.append(logprobs.detach())
        loss = loss - (logprobs * advantages * mask).sum()
    (loss / tokens.loss_mask.sum()).backward()
    return torch.cat(found), {name: parameter.grad for name, parameter in oracle.named_parameters()}


def expect_equal(layout: Layout, model: TinyModel, fp8: Fp8Config, layers: list[int], recompute: bool = False) -> None:
    by_rank = run_on_ranks(layout, measured_on_rank, model, fp8, recompute)
    logprobs, gradients = expected(model, fp8.recipe, layers)
    (reported,) = [found for found, _ in by_rank if found is not None]
    torch.testing.assert_close(reported, logprobs, atol=2e-5, rtol=0)
    actual = merged([found for _, found in by_rank])
    for name, gradient in gradients.items():
        error = (actual[name] - gradient).norm() / gradient.norm()
        assert error < 1e-4, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tensor=2), Layout(tensor=2, sequence=True), Layout(pipeline=2)], ids=str
)
def test_simulated_fp8_equals_transformers_rounded_the_same_way(layout: Layout, recipe: str, model: TinyModel) -> None:
    expect_equal(layout, model, Fp8Config(format="hybrid", recipe=recipe, simulate=True), [0, 1])


def test_recomputed_layers_round_again(model: TinyModel) -> None:
    fp8 = Fp8Config(format="e4m3", recipe="blockwise", simulate=True)
    expect_equal(Layout(tensor=2), model, fp8, [0, 1], recompute=True)


@pytest.mark.parametrize(("first", "last", "layers"), [(1, 0, [1]), (0, 1, [0]), (1, 1, [])])
def test_outer_layers_keep_their_numbers(first: int, last: int, layers: list[int], model: TinyModel) -> None:
    fp8 = Fp8Config(format="hybrid", simulate=True, first_layers_bf16=first, last_layers_bf16=last)
    expect_equal(Layout(pipeline=2), model, fp8, layers)


def test_the_rounding_shows(model: TinyModel) -> None:
    """Guards the tests above: without rounding they would fail."""
    plain = expected(model, "tensorwise", [])[0]
    for recipe in RECIPES:
        assert (expected(model, recipe, [0, 1])[0] - plain).abs().max() > 1e-3


def test_adapters_go_with_rounded_layers(model: TinyModel) -> None:
    """B is zero: the merged weights and the log-probabilities are those of the rounded base model."""
    config = PolicyConfig(
        model=ModelConfig(path=str(model.path)),
        precision="float32",
        fp8=Fp8Config(format="hybrid", recipe="mxfp8", simulate=True),
        lora=LoraConfig(rank=2),
    )
    (logprobs,) = run_on_ranks(Layout(), adapted_on_rank, config, model)
    torch.testing.assert_close(logprobs, expected(model, "mxfp8", [0, 1])[0], atol=2e-5, rtol=0)


def adapted_on_rank(_: Layout, config: PolicyConfig, model: TinyModel) -> Tensor | None:
    rank = PolicyRank(RankSettings(config=config, shape=model.shape, folder=str(model.path), decay_steps=1))
    tokens = TokenBatch(LENGTHS, TokenFields(token_ids=batch().fields.token_ids))
    return rank.compute_logprobs(tokens, [[0], [1], [2]])


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
