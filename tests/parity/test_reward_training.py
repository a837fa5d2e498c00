"""Reward models in training: gradients of transformers in every layout, TRL's losses, and the export's scores."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel, Qwen3MoeConfig

from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.data.processors import TaskDataSpec
from megatron_grpo.data.supervised_rows import score_data_processor
from megatron_grpo.export import main as export
from megatron_grpo.losses.preference import SequenceGradientLossFn, compute_score_loss
from megatron_grpo.models.checkpoint_model import POLICY_FOLDER
from megatron_grpo.models.families import FAMILIES, exchange_head, name_reward_model
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.models.heads import SCORE
from megatron_grpo.models.source import VOCABULARY
from megatron_grpo.prepare.models import make_tokenizer
from megatron_grpo.run.checkpoint_files import write_driver_files
from megatron_grpo.trainer.messages import RankSettings
from megatron_grpo.trainer.rank import ValueRank
from tests.parity.pairs import (
    ROWS,
    STEPS,
    compare_on_rank,
    make_config,
    make_model,
    make_pair_batch,
    make_pairs,
    record_losses,
    trl_arguments,
)
from tests.parity.policy_training import expect_gradients_of_transformers, whole_gradients
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import LENGTHS, step_counts
from tests.support.rare import rare
from tests.support.tiny_models import VOCAB, TinyModel

MARGINS, WEIGHTS = torch.tensor([0.0, 0.5, 0.0, 1.0]).double(), torch.tensor([1.0, 1.0, 0.5, 1.0]).double()
CENTER, LEARNING_RATE = 0.1, 3e-4  # at 1e-3 the twentieth step shows the rounding of earlier ones
LAYOUTS = [Layout(tensor=2, sequence=True), Layout(pipeline=2), Layout(context=2), Layout(data=2)]
EXPERTS = [Layout(data=2, expert=2), Layout(tensor=2, expert=2, sequence=True)]


class ScoringModel(TinyModel):
    """A reward model on disk."""

    def load(self) -> PreTrainedModel:
        options = {"dtype": torch.float64, "experts_implementation": "eager"}  # its fast products lack float64
        return AutoModelForSequenceClassification.from_pretrained(self.path, **options).eval()


def make_rank(layout: Layout, folder: Path, *, packing: bool = True, distributed: bool = True) -> ValueRank:
    config = make_config(folder, layout, packing=packing, distributed=distributed)
    config.optimizer.lr = LEARNING_RATE
    shape = exchange_head(read_model_shape(folder, reward_models=True), SCORE)
    return ValueRank(RankSettings(config=config, shape=shape, folder=str(folder), decay_steps=STEPS))


def make_reward_folder(folder: Path, config: Any) -> Path:
    """A reward model of random weights."""
    torch.manual_seed(11)
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dense_folder(tiny_models: dict[str, TinyModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = AutoConfig.from_pretrained(tiny_models["qwen3_tied"].path, num_labels=1, pad_token_id=None)
    return make_reward_folder(tmp_path_factory.mktemp("dense"), config)


@pytest.fixture(scope="module")
def mixture_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = Qwen3MoeConfig(**sizes, **heads, **experts, norm_topk_prob=True, num_labels=1, pad_token_id=None)
    return make_reward_folder(tmp_path_factory.mktemp("mixture"), config)


def make_batch() -> TokenBatch:
    """Four pairs of random sequences, scored at their last tokens."""
    generator = torch.Generator().manual_seed(3)
    last = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    last[torch.tensor(LENGTHS).cumsum(0) - 1] = True
    token_ids = torch.randint(1, VOCAB, (sum(LENGTHS),), generator=generator)
    return TokenBatch(LENGTHS, TokenFields(token_ids=token_ids.int(), sampled=last, loss_mask=last.float()))


def compute_loss(scores: Tensor, tokens: Tensor) -> Any:
    return compute_score_loss(scores, MARGINS, WEIGHTS, CENTER)


def gradients_on_rank(layout: Layout, folder: Path, packing: bool) -> tuple[dict[str, Tensor], float, float]:
    """Gradients, their norm and the loss of the pairs."""
    rank, loss_fn, batch = (
        make_rank(layout, folder, packing=packing, distributed=False),
        SequenceGradientLossFn(),
        make_batch(),
    )
    result, share, microbatches = compare_on_rank(rank, layout, batch, ("values",), compute_loss)
    rank.compute_gradients(share, microbatches, loss_fn, step_counts(batch))
    return whole_gradients(rank), rank.optimizer.compute_grad_norm(), result.loss


def loss_of_transformers(model: torch.nn.Module) -> Tensor:
    """The loss by its definition, one sequence at a time."""
    sequences = make_batch().fields.token_ids.long().split(LENGTHS)
    scores = torch.stack([model(ids[None], use_cache=False).logits[0, 0] for ids in sequences]).view(-1, 2)
    total = torch.zeros((), dtype=torch.float64)
    for (chosen, rejected), margin, weight in zip(scores, MARGINS, WEIGHTS, strict=True):
        total = total + weight * (CENTER * (chosen + rejected) ** 2 - logsigmoid(chosen - rejected - margin))
    return total / WEIGHTS.sum()


def expect_loss_and_gradients(by_rank: list[tuple[dict[str, Tensor], float, float]], model: ScoringModel) -> None:
    """Also the norm, which no bias enters."""
    with torch.no_grad():
        loss = loss_of_transformers(model.load()).item()
    assert [actual for _, _, actual in by_rank] == pytest.approx([loss] * len(by_rank), rel=1e-5)
    gradients = [[(actual, norm)] for actual, norm, _ in by_rank]
    expect_gradients_of_transformers(gradients, [model], 1e-4, loss_of_transformers)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", [*LAYOUTS[:3], *rare(LAYOUTS[3:])], ids=str)
def test_gradients_of_scores_equal_transformers(layout: Layout, packing: bool, dense_folder: Path) -> None:
    by_rank = run_on_ranks(layout, gradients_on_rank, dense_folder, packing)
    expect_loss_and_gradients(by_rank, ScoringModel("dense", dense_folder))


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", [EXPERTS[0], *rare(EXPERTS[1:])], ids=str)
def test_gradients_of_a_mixtures_scores_equal_transformers(layout: Layout, packing: bool, mixture_folder: Path) -> None:
    by_rank = run_on_ranks(layout, gradients_on_rank, mixture_folder, packing)
    expect_loss_and_gradients(by_rank, ScoringModel("mixture", mixture_folder))


def make_scored_batch(pairs: list[dict[str, Any]]) -> tuple[TokenBatch, Tensor]:
    """The batch of a step's pairs, and their margins."""
    spec, tokenizer = TaskDataSpec(task_name="math", apply_chat_template=False), make_tokenizer(VOCABULARY, 64)
    data = [score_data_processor(row, spec, tokenizer, 64, number) for number, row in enumerate(pairs)]
    margins = torch.tensor([row.get("margin", 0.0) for row in data]).double()
    return make_pair_batch(data, is_scored=True), margins


def losses_of_scores(
    layout: Layout, folder: Path, pairs: list[dict[str, Any]], center: float, checkpoint: Path | None = None
) -> list[float]:
    """Losses of our steps on pairs; `checkpoint`: folder for the weights after the last one."""
    rank, losses = make_rank(layout, folder), list[float]()
    for start in range(0, len(pairs), ROWS):
        batch, margins = make_scored_batch(pairs[start : start + ROWS])
        score = partial(compute_score_loss, margins=margins, weights=torch.ones(ROWS).double(), center=center)
        result, *work = compare_on_rank(rank, layout, batch, ("values",), lambda scores, _, score=score: score(scores))
        rank.train(*work, SequenceGradientLossFn(), step_counts(batch))
        losses.append(result.loss)
    if checkpoint is not None:
        rank.checkpoint.save(str(checkpoint))
    return losses


def scores_of_checkpoint(layout: Layout, folder: Path, checkpoint: Path) -> Tensor:
    rank, (batch, _) = make_rank(layout, folder), make_scored_batch(make_pairs()[:ROWS])
    rank.checkpoint.load(str(checkpoint))
    values = rank.compute_values(batch, [[*range(len(batch))]])
    return values[batch.fields.sampled]


@pytest.mark.slow
@pytest.mark.parametrize("center", [0.0, 0.01])
def test_the_losses_of_twenty_steps_on_scores_are_those_of_trl(center: float, tmp_path: Path) -> None:
    """With margins where scores are centered, so that each term is once absent."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    folder = make_model(tmp_path / "model", "AutoModelForSequenceClassification", num_labels=1)
    pairs = make_pairs()
    if center:
        pairs = [{**pair, "margin": 0.25 * (number % 3)} for number, pair in enumerate(pairs)]
    recorder, expected = record_losses(RewardTrainer)
    settings = trl_arguments() | {"learning_rate": LEARNING_RATE, "center_rewards_coefficient": center or None}
    arguments = RewardConfig(output_dir=str(tmp_path / "trl"), **settings)
    tokenizer = make_tokenizer(VOCABULARY, 64)
    recorder(str(folder), args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer).train()
    (actual,) = run_on_ranks(Layout(), losses_of_scores, folder, pairs, center)
    assert len(expected) == len(actual) == STEPS
    assert expected[-1] < expected[0] - 0.1, "the model learns"
    assert actual == pytest.approx(expected, abs=1e-5)


def test_a_checkpoint_becomes_a_sequence_classifier(tmp_path: Path) -> None:
    """A language model becomes a reward model that knows nothing, learns, and is exported with its scores."""
    folder, run_dir = make_model(tmp_path / "model"), tmp_path / "run"
    checkpoint = run_dir / "checkpoints" / "step_3" / POLICY_FOLDER
    checkpoint.mkdir(parents=True)
    policy = {"model": {"path": str(folder)}, "precision": "float32"}
    write_driver_files(checkpoint.parent, 3, {"save_state": {"total_steps": 3}, "metrics": {}}, {})
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"algorithm": "reward_model", "policy": policy}))
    (run_dir / "conversation_format.json").write_text('{"system_prompt": "Judge."}')
    layout = Layout(tensor=2, pipeline=2)
    losses = run_on_ranks(layout, losses_of_scores, folder, make_pairs()[: 3 * ROWS], 0.0, checkpoint)[0]
    assert losses[0] == pytest.approx(0.6931, abs=1e-4), "log 2: all scores are 0"
    assert losses[2] < losses[0]
    output = tmp_path / "export"
    assert export([f"checkpoint={checkpoint.parent}", f"output={output}"]) == 0
    model, loading = AutoModelForSequenceClassification.from_pretrained(output, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_labels == 1
    assert model.config.conversation_format == {"system_prompt": "Judge."}
    assert model.config.pad_token_id == VOCABULARY["<pad>"]
    batch, _ = make_scored_batch(make_pairs()[:ROWS])
    padding = model.config.pad_token_id
    sequences = batch.fields.token_ids.long().split(batch.lengths)
    padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=padding)
    with torch.no_grad():
        expected = model(padded, attention_mask=(padded != padding).long()).logits[:, 0]
    (actual,) = run_on_ranks(Layout(), scores_of_checkpoint, folder, checkpoint)
    assert expected.std() > 1e-3, "scores differ"
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


def test_classes_of_reward_models_are_those_of_transformers(tiny_models: dict[str, TinyModel]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    for family in FAMILIES.values():
        name = CLASSES.get(family.model_type or family.name)
        assert family.has_reward_models == (name is not None), family.name
        assert name is None or name == f"{family.reward_name}ForSequenceClassification"
    assert name_reward_model(tiny_models["gemma3"].shape) == "Gemma3TextForSequenceClassification"
