"""Newer families on real ranks: gradients in every layout against transformers, of tiny models and of odd sizes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch
from megatron_grpo.models.hf_folder import write_hf_folder
from megatron_grpo.verification.problem import SMALL, TINY, make_model, prepare_model
from tests.parity.adapters import make_lora_rank
from tests.parity.lora import fill_b
from tests.parity.on_rank import expect_continuation, expect_logprobs, split_by_sequence
from tests.parity.policy_training import expect_gradients_of_transformers, gradients_on_rank, make_batch
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_value import fresh_on_rank
from tests.parity.training import fetch, merge, rank_share, whole_tensors
from tests.support.hf_configs import read_configs
from tests.support.rare import rare
from tests.support.tiny_models import TinyModel

FAMILIES = (
    *("glm4", "glm4_moe", "phi3", "olmo3", "minimax_m2", "llama4", "gemma4", "gemma4_moe"),
    *("gpt_oss", "mistral", "ministral3", "seed_oss"),
)
"""Names in verification/tiny_models.yaml."""
ODD = read_configs("odd_configs")["families"]
"""Keys in which a further model of a family differs from its tiny one."""
MIXTURES = ("glm4_moe", "minimax_m2", "llama4", "gemma4_moe", "gpt_oss")
WHOLE_EXPERTS = ("gpt_oss",)
"""Mixtures whose experts have biases, and are not split."""
LAYOUTS = [
    Layout(tensor=2, sequence=True),
    *rare(
        [
            Layout(),
            Layout(pipeline=2, virtual_pipeline=2),
            Layout(context=2),
            Layout(pipeline=4),
            Layout(tensor=2, data=2, sequence=True),
            Layout(data=2, expert=2),
            Layout(tensor=2, data=2, expert=2, expert_tensor=2, sequence=True),
        ]
    ),
]
TOLERANCE = 1e-4
"""Gemma 4 multiplies queries and keys without a scale, so that its softmax is sharp and rounding counts for more."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[TinyModel]]:
    folder = tmp_path_factory.mktemp("families")
    models = {}
    for family in FAMILIES:
        tiny = prepare_model(f"tiny:{family}", False, folder / family, seed=0)
        config = {"model_type": family, **SMALL, **TINY[family], **ODD[family]}
        odd = make_model(config, folder / f"{family}_odd", seed=1)
        models[family] = [TinyModel(path.name, path) for path in (tiny, odd)]
    return models


def choose(models: dict[str, list[TinyModel]], *families: str) -> list[TinyModel]:
    return [model for family in families for model in models[family]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_do_not_depend_on_the_layout(layout: Layout, models: dict[str, list[TinyModel]]) -> None:
    families = FAMILIES if layout.expert == 1 else MIXTURES
    if layout.expert_tensor > 1:
        families = tuple(family for family in families if family not in WHOLE_EXPERTS)
    chosen = choose(models, *families)
    by_rank = run_on_ranks(layout, gradients_on_rank, chosen, timeout_s=600.0)
    expect_gradients_of_transformers(by_rank, chosen, tolerance=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_that_share_a_key(sequence: bool, models: dict[str, list[TinyModel]]) -> None:
    """Four ranks have two keys, whose norm over all heads must count each once."""
    families = ("phi3", "olmo3") if not sequence else FAMILIES
    chosen = [models[family][0] for family in families]
    by_rank = run_on_ranks(Layout(tensor=4, sequence=sequence), gradients_on_rank, chosen, timeout_s=600.0)
    expect_gradients_of_transformers(by_rank, chosen, tolerance=TOLERANCE)


@pytest.mark.slow
def test_layers_are_recomputed(models: dict[str, list[TinyModel]]) -> None:
    chosen, settings = choose(models, *FAMILIES), {"activation_checkpointing": True}
    by_rank = run_on_ranks(Layout(tensor=2, sequence=True), gradients_on_rank, chosen, True, settings, timeout_s=600.0)
    expect_gradients_of_transformers(by_rank, chosen, tolerance=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_continues_in_another_layout(
    family: str, models: dict[str, list[TinyModel]], tmp_path: Path
) -> None:
    expect_continuation(
        models[family][0], tmp_path, Layout(tensor=2, sequence=True), [Layout(pipeline=2)], atol=1e-5, rtol=1e-4
    )


def adapted_on_rank(layout: Layout, models: list[TinyModel]) -> list[tuple[dict[int, Tensor], dict[str, Tensor]]]:
    """Log-probabilities by sequence of each model with adapters, and its weights with them merged."""
    results = []
    for model in models:
        rank = make_lora_rank(layout, model)
        fill_b(rank)
        share, microbatches, order = rank_share(make_batch(), layout)
        batch = TokenBatch(share.lengths, replace(share.fields, loss_mask=None))
        logprobs = rank.compute_logprobs(fetch(rank, batch, None), microbatches)
        results.append((split_by_sequence(logprobs, share, order), whole_tensors(rank)))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tensor=2, sequence=True), Layout(pipeline=2)], ids=str)
def test_adapters_are_merged_into_what_is_exported(
    layout: Layout, models: dict[str, list[TinyModel]], tmp_path: Path
) -> None:
    chosen = choose(models, *FAMILIES)
    by_rank = run_on_ranks(layout, adapted_on_rank, chosen, timeout_s=600.0)
    for index, tiny in enumerate(chosen):
        exported = merge([results[index][1] for results in by_rank])
        assert any(not torch.equal(exported[name], weight) for name, weight in tiny.tensors().items())
        folder = tmp_path / tiny.name
        write_hf_folder(exported.items(), tiny.path, folder)
        hf = TinyModel(tiny.name, folder).load()
        expect_logprobs([results[index][0] for results in by_rank], hf, 3e-5)


@pytest.mark.slow
def test_a_policy_becomes_a_value_model(models: dict[str, list[TinyModel]]) -> None:
    for family in FAMILIES:
        model = models[family][0]
        by_rank = run_on_ranks(Layout(tensor=2, sequence=True), fresh_on_rank, model.path)
        assert all((values == 0).all() for results in by_rank for values in (results[0] or {}).values())
        weights, stored = merge([weights for _, weights in by_rank]), model.tensors()
        assert weights.keys() - {"score.weight", "score.bias"} == stored.keys() - {"lm_head.weight"}
        assert all(torch.equal(weights[name], stored[name]) for name in weights.keys() & stored.keys())
