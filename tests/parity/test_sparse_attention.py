"""DeepSeek-V3.2 and GLM-5 on real ranks: odd sizes, shared choices, recomputation, adapters, checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.trainer.model.sparse_attention import choose_highest
from megatron_grpo.verification.problem import SMALL, TINY, make_model
from tests.parity.adapters import make_lora_rank
from tests.parity.on_rank import expect_close, expect_continuation, train_on_rank
from tests.parity.policy_training import expect_gradients_of_transformers, gradients_on_rank
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.training import merge
from tests.support.hf_configs import read_configs
from tests.support.tiny_models import TinyModel

NAMES = read_configs("odd_configs")["sparse_attention"]
GRADIENT = 2e-5


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyModel]:
    folder = tmp_path_factory.mktemp("sparse")
    for name, odd in NAMES.items():
        make_model({"model_type": name, **SMALL, **TINY[name], **odd}, folder / name, seed=1)
    return {name: TinyModel(name, folder / name) for name in NAMES}


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        (Layout(tensor=2, sequence=True), {"activation_checkpointing": True}),
        (Layout(context=2), {"recompute_modules": ["core_attn"]}),
        pytest.param(Layout(pipeline=2), {"activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param(Layout(tensor=2, context=2, sequence=True), {}, marks=pytest.mark.slow),
        pytest.param(Layout(data=2, expert=2), {"packing": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_of_odd_sizes(layout: Layout, settings: dict[str, Any], models: dict[str, TinyModel]) -> None:
    """Layers are recomputed from the last, when later ones have chosen other tokens."""
    chosen, packing = list(models.values()), settings.pop("packing", True)
    by_rank = run_on_ranks(layout, gradients_on_rank, chosen, packing, settings)
    expect_gradients_of_transformers(by_rank, chosen, tolerance=GRADIENT)


def test_of_equal_scores_the_first_are_chosen() -> None:
    """In rows of any length, which `topk` does not do."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.randint(-1, 3, (4, 5, 70), generator=generator).float()
    scores[:, :, 60:] = -torch.inf
    for width in (8, 61, 70):
        rows = scores[..., :width]
        ranked = rows.sort(dim=-1, descending=True, stable=True).indices[..., :7]
        assert torch.equal(choose_highest(rows, 7), torch.zeros_like(rows, dtype=torch.bool).scatter(-1, ranked, True))


def test_training_continues_and_leaves_the_indexer_as_it_is(models: dict[str, TinyModel], tmp_path: Path) -> None:
    model, written_by = models["glm_moe_dsa"], Layout(tensor=2, sequence=True)
    expected = expect_continuation(model, tmp_path, written_by, [Layout(pipeline=2)], atol=1e-5)
    before = model.tensors()
    assert expected.keys() == before.keys()
    equal = {name for name, tensor in before.items() if torch.equal(tensor, expected[name])}
    assert equal == {name for name in before if ".indexer." in name or name.endswith("e_score_correction_bias")}


@pytest.mark.slow
def test_adapters_are_merged_into_what_is_published(models: dict[str, TinyModel]) -> None:
    model = models["glm_moe_dsa"]
    settings = {"lora": LoraConfig(rank=3, alpha=7.0, target_modules=["linear_proj"])}
    first, second = (
        merge(run_on_ranks(layout, train_on_rank, model, settings, 2, make_lora_rank))
        for layout in (Layout(), Layout(context=2))
    )
    before = model.tensors()
    changed = {name for name in before if not torch.equal(first[name], before[name])}
    assert changed == {name for name in before if name.endswith("o_proj.weight")}
    expect_close(second, first, atol=1e-5)
