"""Newer families on real ranks: gradients in every layout against transformers, of tiny models and of odd sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenBatch
from megatron_grpo.models.hf_folder import write_hf_folder
from megatron_grpo.verification.problem import SMALL, TINY, make_model, prepare_model
from tests.parity.adapters import make_lora_rank
from tests.parity.lora import fill_b
from tests.parity.policy_training import expect_gradients_of_transformers, gradients_on_rank, make_batch
from tests.parity.ranks import Layout, run_on_ranks
from tests.parity.test_training import load_on_rank, save_on_rank
from tests.parity.test_value import fresh_on_rank
from tests.parity.training import fetched, merged, rank_share, whole_tensors
from tests.support.tiny_models import TinyModel, logprobs_of_logits

FAMILIES = (
    *("glm4", "glm4_moe", "phi3", "olmo3", "minimax_m2", "llama4", "gemma4", "gemma4_moe"),
    *("gpt_oss", "mistral", "ministral3", "seed_oss"),
)
"""Names in verification/tiny_models.yaml."""
_ODD_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "vocab_size": 97}
ODD: dict[str, dict[str, Any]] = {
    "glm4": {**_ODD_HEADS, "attention_bias": False, "partial_rotary_factor": 0.6, "tie_word_embeddings": True},
    "glm4_moe": {
        **_ODD_HEADS,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.6,
        "n_group": 1,
        "num_experts_per_tok": 3,
        "num_local_experts": 6,
        "first_k_dense_replace": 3,
    },
    "phi3": {
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "hidden_size": 60,
        "head_dim": 10,
        "vocab_size": 97,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": True,
    },
    "olmo3": {
        **_ODD_HEADS,
        "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
        "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
        "tie_word_embeddings": True,
    },
    "minimax_m2": {**_ODD_HEADS, "rotary_dim": 10, "num_local_experts": 6, "num_experts_per_tok": 3},
    "llama4": {
        **_ODD_HEADS,
        "no_rope_layers": [0, 1, 1, 1],
        "attention_chunk_size": 7,
        "interleave_moe_layer_step": 1,
        "num_local_experts": 6,
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "tie_word_embeddings": True,
    },
    "gemma4": {
        **_ODD_HEADS,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
        "global_head_dim": 20,
        "num_global_key_value_heads": 6,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
    },
    "gemma4_moe": {
        **_ODD_HEADS,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "global_head_dim": 12,
        "attention_k_eq_v": False,
        "num_experts": 6,
        "top_k_experts": 1,
    },
    "gpt_oss": {
        **_ODD_HEADS,
        "intermediate_size": 36,
        "sliding_window": 7,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": {
        **_ODD_HEADS,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        "tie_word_embeddings": True,
    },
    "ministral3": {
        **_ODD_HEADS,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 4,
        },
        "tie_word_embeddings": True,
    },
    "seed_oss": {**_ODD_HEADS, "tie_word_embeddings": True},
}
"""Keys in which a further model of a family differs from its tiny one."""
MIXTURES = ("glm4_moe", "minimax_m2", "llama4", "gemma4_moe", "gpt_oss")
WHOLE_EXPERTS = ("gpt_oss",)
"""Mixtures whose experts have biases, and are not split."""
LAYOUTS = [
    Layout(tensor=2, sequence=True),
    *(
        pytest.param(layout, marks=pytest.mark.slow)
        for layout in (
            Layout(),
            Layout(pipeline=2, virtual_pipeline=2),
            Layout(context=2),
            Layout(pipeline=4),
            Layout(tensor=2, data=2, sequence=True),
            Layout(data=2, expert=2),
            Layout(tensor=2, data=2, expert=2, expert_tensor=2, sequence=True),
        )
    ),
]
TOLERANCE = 1e-4
"""Gemma 4 multiplies queries and keys without a scale, so that its softmax is sharp and rounding counts for more."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[TinyModel]]:
    """Models by family."""
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
    model, written_by, read_by = models[family][0], Layout(tensor=2, sequence=True), Layout(pipeline=2)
    expected = merged(run_on_ranks(written_by, save_on_rank, model, tmp_path, {}))
    for layout in (written_by, read_by):
        actual = merged(run_on_ranks(layout, load_on_rank, model, tmp_path, {}))
        for name, tensor in expected.items():
            rounding = 0.0 if layout == written_by else 1e-5
            torch.testing.assert_close(actual[name], tensor, atol=rounding, rtol=10 * rounding, msg=f"{layout} {name}")


def adapted_on_rank(layout: Layout, models: list[TinyModel]) -> list[tuple[dict[int, Tensor], dict[str, Tensor]]]:
    """Log-probabilities by sequence of each model with adapters, and its weights with them merged."""
    results = []
    for model in models:
        rank = make_lora_rank(layout, model)
        fill_b(rank)
        share, microbatches, order = rank_share(make_batch(), layout)
        batch = TokenBatch(share.lengths, replace(share.fields, loss_mask=None))
        logprobs = rank.compute_logprobs(fetched(rank, batch, None), microbatches)
        pieces = {} if logprobs is None else dict(zip(order, logprobs.split(share.lengths), strict=True))
        results.append((pieces, whole_tensors(rank)))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tensor=2, sequence=True), Layout(pipeline=2)], ids=str)
def test_adapters_are_merged_into_what_is_exported(
    layout: Layout, models: dict[str, list[TinyModel]], tmp_path: Path
) -> None:
    chosen, batch = choose(models, *FAMILIES), make_batch()
    by_rank = run_on_ranks(layout, adapted_on_rank, chosen, timeout_s=600.0)
    for index, tiny in enumerate(chosen):
        exported = merged([results[index][1] for results in by_rank])
        assert any(not torch.equal(exported[name], weight) for name, weight in tiny.tensors().items())
        folder = tmp_path / tiny.name
        write_hf_folder(exported.items(), tiny.path, folder)
        hf = TinyModel(tiny.name, folder).load()
        for number, ids in enumerate(batch.fields.token_ids.long().split(batch.lengths)):
            with torch.no_grad():
                expected = logprobs_of_logits(hf(ids[None]).logits / 0.8, ids[None])[0]
            reported = [results[index][0][number] for results in by_rank if number in results[index][0]]
            assert reported
            for logprobs in reported:
                torch.testing.assert_close(logprobs, expected, atol=3e-5, rtol=0, msg=tiny.name)


@pytest.mark.slow
def test_a_policy_becomes_a_value_model(models: dict[str, list[TinyModel]]) -> None:
    for family in FAMILIES:
        model = models[family][0]
        by_rank = run_on_ranks(Layout(tensor=2, sequence=True), fresh_on_rank, model.path)
        assert all((values == 0).all() for results in by_rank for values in (results[0] or {}).values())
        weights, stored = merged([weights for _, weights in by_rank]), model.tensors()
        assert weights.keys() - {"score.weight", "score.bias"} == stored.keys() - {"lm_head.weight"}
        assert all(torch.equal(weights[name], stored[name]) for name in weights.keys() & stored.keys())
