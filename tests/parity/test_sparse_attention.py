"""DeepSeek-V3.2 and GLM-5 on real ranks: odd sizes, shared choices, recomputation, adapters, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.config.schema import LoraConfig
from megatron_grpo.trainer.model.sparse_attention import choose_highest
from megatron_grpo.verification.problem import SMALL, TINY, make_model
from tests.parity.adapters import make_lora_rank
from tests.parity.policy_training import expect_gradients_of_transformers, gradients_on_rank, train_arguments
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_training import load_on_rank, save_on_rank
from tests.parity.training import merged, whole_tensors
from tests.support.tiny_models import VOCAB, TinyModel

_ODD = {
    "vocab_size": VOCAB,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 6,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
    "q_lora_rank": 20,
    "index_head_dim": 10,
    "index_n_heads": 16,
    "index_topk": 3,
    "n_group": 1,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 3,
}
_SHARED = {"index_topk_pattern": "FSFS", "indexer_types": ["full", "shared", "full", "shared"]}
NAMES = {"deepseek_v32": _ODD, "glm_moe_dsa": {**_ODD, **_SHARED, "rms_norm_eps": 1e-4}}
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
    expected = merged(run_on_ranks(written_by, save_on_rank, model, tmp_path, {}))
    before = model.tensors()
    assert expected.keys() == before.keys()
    equal = {name for name, tensor in before.items() if torch.equal(tensor, expected[name])}
    assert equal == {name for name in before if ".indexer." in name or name.endswith("e_score_correction_bias")}
    actual = merged(run_on_ranks(Layout(pipeline=2), load_on_rank, model, tmp_path, {}))
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def adapted_on_rank(layout: Layout, model: TinyModel) -> dict[str, Tensor]:
    """Weights after two steps of adapters of the output's projection."""
    rank = make_lora_rank(layout, model, LoraConfig(rank=3, alpha=7.0, target_modules=["linear_proj"]))
    for _ in range(2):
        rank.train(*train_arguments(layout))
    return whole_tensors(rank)


@pytest.mark.slow
def test_adapters_are_merged_into_what_is_published(models: dict[str, TinyModel]) -> None:
    model = models["glm_moe_dsa"]
    one, two = (merged(run_on_ranks(layout, adapted_on_rank, model)) for layout in (Layout(), Layout(context=2)))
    before = model.tensors()
    changed = {name for name in before if not torch.equal(one[name], before[name])}
    assert changed == {name for name in before if name.endswith("o_proj.weight")}
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, atol=1e-5, rtol=1e-4, msg=name)
