"""Values, gradients and checkpoints of the value model against transformers' reward models, in every layout."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    Gemma3TextForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedModel,
    Qwen3ForSequenceClassification,
)

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.config.loop_schema import MseValueLossConfig
from megatron_grpo.config.schema import ModelConfig, OptimizerConfig, PolicyConfig
from megatron_grpo.losses.loss import GlobalCounts
from megatron_grpo.losses.value import MseValueLossFn
from megatron_grpo.models.families import exchange_head
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.heads import VALUE
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.rank import ValueRank
from tests.parity.on_rank import expect_continuation, expect_gradients, load_on_rank, save_on_rank, split_by_sequence
from tests.parity.ranks import LAYOUTS, Layout, run_on_ranks
from tests.parity.training import (
    LENGTHS,
    fetch,
    merge,
    parameters_of,
    random_mask,
    rank_share,
    step_counts,
    whole_tensors,
)
from tests.support.rare import rare
from tests.support.tiny_models import VOCAB, TinyModel

SOURCES = {
    "qwen3_tied": Qwen3ForSequenceClassification,
    "llama_untied": LlamaForTokenClassification,
    "gemma3": Gemma3TextForSequenceClassification,
}
VALUE_LAYOUTS = [*LAYOUTS, Layout(data=2)]
CLIP = 0.5
OPTIMIZER = OptimizerConfig(lr=1e-2, weight_decay=0.1, adam_eps=1e-2)
"""A large epsilon keeps the update a smooth function of the gradient, so that rounding does not flip its sign."""


@dataclass(frozen=True)
class RewardModel:
    """A reward model on disk: scores without a bias (sequences) or with one (tokens)."""

    path: Path
    kind: type[PreTrainedModel]

    def load(self) -> PreTrainedModel:
        return self.kind.from_pretrained(self.path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def reward_models(
    tiny_models: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, RewardModel]:
    folder = tmp_path_factory.mktemp("reward_models")
    models = {}
    for source, kind in SOURCES.items():
        torch.manual_seed(11)
        model = kind(AutoConfig.from_pretrained(tiny_models[source].path, num_labels=1))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0.0, 0.2)
        model.save_pretrained(folder / source)
        models[source] = RewardModel(folder / source, kind)
    return models


def make_batch() -> TokenBatch:
    """Eight sequences of different lengths with random masks, returns and earlier values."""
    generator = torch.Generator().manual_seed(3)
    mask, total = random_mask(generator), sum(LENGTHS)
    values, returns = torch.randn(2, total, generator=generator)
    token_ids = torch.randint(1, VOCAB, (total,), generator=generator)  # transformers gives padding, 0, no gradient
    tokens = TokenFields(token_ids=token_ids.int(), loss_mask=mask, values=values, returns=returns)
    return TokenBatch(LENGTHS, tokens)


def make_engine(layout: Layout, path: Path, *, distributed: bool = True) -> ValueRank:
    optimizer = OptimizerConfig(**{**vars(OPTIMIZER), "distributed": distributed})
    config = PolicyConfig(
        model=ModelConfig(path=str(path)), parallel=layout.parallel, precision="float32", optimizer=optimizer
    )
    shape = exchange_head(read_model_shape(path, reward_models=True), VALUE)
    return ValueRank(RankSettings(config=config, shape=shape, folder=str(path), decay_steps=100))


def values_on_rank(layout: Layout, paths: list[Path]) -> list[dict[int, Tensor]]:
    """Values by sequence for each model; {} on ranks that do not report."""
    results = []
    for path in paths:
        share, microbatches, order = rank_share(make_batch(), layout)
        engine = make_engine(layout, path)
        values = engine.compute_values(fetch(engine, share, None), microbatches)
        results.append(split_by_sequence(values, share, order))
    return results


def hf_values(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """[length]: the score after the tokens before each one; 0 at the first."""
    scores = model.score(model.model(token_ids[None]).last_hidden_state)[0, :, 0]
    return torch.cat([scores.new_zeros(1), scores[:-1]])


def hf_loss(model: PreTrainedModel) -> Tensor:
    """The clipped loss, one sequence at a time."""
    tokens, total = make_batch().fields, torch.zeros(())
    columns = (tokens.token_ids.long(), tokens.loss_mask, tokens.values, tokens.returns)
    for ids, mask, old, returns in zip(*(column.split(LENGTHS) for column in columns), strict=True):
        values = hf_values(model, ids)
        clipped = old + (values - old).clamp(-CLIP, CLIP)
        total = total + (torch.maximum((values - returns) ** 2, (clipped - returns) ** 2) * mask).sum()
    return 0.5 * total / tokens.loss_mask.sum()


def train_arguments(layout: Layout) -> tuple[TokenBatch, list[list[int]], MseValueLossFn, GlobalCounts]:
    share, microbatches, _ = rank_share(make_batch(), layout)
    return share, microbatches, MseValueLossFn(MseValueLossConfig(value_clip=CLIP)), step_counts(make_batch())


def gradients_on_rank(layout: Layout, paths: list[Path]) -> list[tuple[dict[str, Tensor], float, float]]:
    results = []
    for path in paths:
        engine = make_engine(layout, path, distributed=False)
        share, microbatches, loss_fn, counts = train_arguments(layout)
        shares = engine.compute_gradients(fetch(engine, share, loss_fn), microbatches, loss_fn, counts)
        for parameter in parameters_of(engine):
            parameter.data.copy_(parameter.main_grad)
        gradients = whole_tensors(engine)
        reported = sum(float(share["loss"]) for share in shares) if engine.is_output_rank else 0.0
        results.append((gradients, engine.optimizer.compute_grad_norm(), reported))
    return results


@pytest.mark.parametrize("layout", [*rare(LAYOUTS[:-1]), *VALUE_LAYOUTS[-2:]], ids=str)
def test_values_equal_transformers(layout: Layout, reward_models: dict[str, RewardModel]) -> None:
    by_rank = run_on_ranks(layout, values_on_rank, [model.path for model in reward_models.values()])
    for index, (name, reward_model) in enumerate(reward_models.items()):
        reported = {i: values for result in by_rank for i, values in result[index].items()}
        model = reward_model.load()
        with torch.no_grad():
            for i, ids in enumerate(make_batch().fields.token_ids.long().split(LENGTHS)):
                torch.testing.assert_close(
                    reported[i], hf_values(model, ids), atol=2e-5, rtol=0, msg=lambda m, n=name: n + m
                )


@pytest.mark.parametrize("layout", VALUE_LAYOUTS, ids=str)
def test_gradients_equal_transformers(layout: Layout, reward_models: dict[str, RewardModel]) -> None:
    by_rank = run_on_ranks(layout, gradients_on_rank, [model.path for model in reward_models.values()])
    for index, reward_model in enumerate(reward_models.values()):
        model = reward_model.load()
        loss = hf_loss(model)
        loss.backward()
        expected = {key: parameter.grad for key, parameter in model.named_parameters()}
        actual = merge([result[index][0] for result in by_rank])
        assert actual.keys() == expected.keys() | {"score.bias"}
        expect_gradients(actual, expected)
        if "score.bias" in expected:  # without it, transformers' norm lacks the bias that ours has
            norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
            assert all(result[index][1] == pytest.approx(norm, rel=1e-4) for result in by_rank)
        assert sum(result[index][2] for result in by_rank) == pytest.approx(loss.item(), rel=1e-5)


def fresh_on_rank(layout: Layout, path: Path) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    engine = make_engine(layout, path)
    return values_on_rank(layout, [path])[0], whole_tensors(engine)


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2, pipeline=2)], ids=str)
def test_a_policy_becomes_a_value_model_that_knows_nothing_yet(
    layout: Layout, tiny_models: dict[str, TinyModel]
) -> None:
    """The backbone of the (tied) model, and values that are 0."""
    model = tiny_models["qwen3_tied"]
    by_rank = run_on_ranks(layout, fresh_on_rank, model.path)
    assert all((values == 0).all() for result in by_rank for values in result[0].values())
    exported = merge([result[1] for result in by_rank])
    on_disk = model.tensors()
    assert exported.keys() - {"score.weight", "score.bias"} == on_disk.keys() - {"lm_head.weight"}
    for name in exported.keys() & on_disk.keys():
        assert torch.equal(exported[name], on_disk[name]), name


save = partial(save_on_rank, make=make_engine, arguments=train_arguments)
load = partial(load_on_rank, make=make_engine, arguments=train_arguments)


@pytest.mark.slow  # test_training.py does so for policies
def test_a_loaded_checkpoint_continues_exactly_and_in_other_layouts(
    tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    path, written_by = tiny_models["qwen3_tied"].path, Layout(tensor=2, pipeline=2)
    read_by = (Layout(), Layout(data=2), Layout(tensor=2, sequence=True))
    weights = expect_continuation(path, tmp_path / "checkpoint", written_by, read_by, save=save, load=load)
    assert weights["score.weight"].abs().max() > 1e-3, "the head has not learned"


def test_another_optimizer_than_the_checkpoints_is_named_with_its_section(
    tiny_models: dict[str, TinyModel], tmp_path: Path
) -> None:
    path = tiny_models["qwen3_tied"].path
    run_on_ranks(Layout(), save, path, tmp_path, {})
    with pytest.raises(RuntimeError, match=r"written with value\.optimizer\.distributed=true, and this run has false"):
        run_on_ranks(Layout(), load, path, tmp_path, {"distributed": False})
