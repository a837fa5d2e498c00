"""Sampling options that exclude each other, or that vLLM would refuse later: what is said before a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest

from megatron_grpo.preflight.engine_checks import CPU_HEAD_SIZES
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.preflight.remarks import find_remarks
from megatron_grpo.trainer.messages import make_training_filter
from tests.support.config_problems import problems_of, write_weights

ICEPOP = (
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=icepop",
    "loss_fn.truncated_importance_sampling_ratio=5",
    "loss_fn.truncated_importance_sampling_ratio_min=0.5",
)


CORRECTED = ("loss_fn.use_importance_sampling_correction=true",)
FILTERS = ("generation.top_p=0.9", "generation.top_k=20", "generation.min_p=0.05")


@pytest.mark.parametrize("filters", [[one] for one in FILTERS] + [list(FILTERS)], ids=[*"pkm", "all"])
@pytest.mark.parametrize(
    "options",
    [ICEPOP, CORRECTED, ["grpo.seq_logprob_error_threshold=1.5"], [*CORRECTED, "grpo.async_grpo.enabled=true"]],
    ids=["icepop", "correction", "threshold", "asynchronous"],
)
def test_filters_that_training_repeats_go_with_what_compares(
    given: list[str], filters: list[str], options: list[str]
) -> None:
    config = compose_config([*given, *filters, *options])
    assert config.generation.has_training_filter
    assert not any(one.key.startswith("generation.") for one in find_remarks(config))


@pytest.mark.parametrize(
    ("overrides", "repeats"),
    [
        ([], False),
        (["generation.top_k=7"], True),
        (["generation.min_p=0.1", "generation.temperature=0.5"], True),
        (["generation.top_p=0.9", "generation.temperature=0"], False),
        (["generation.top_p=0.9", "generation.repetition_penalty=1.1"], False),
        (["generation.top_p=0.9", "generation.structured.choice=[a,b]"], False),
        (["generation.top_p=1.0", "generation.presence_penalty=1"], False),
    ],
)
def test_when_training_repeats_the_filter(given: list[str], overrides: list[str], repeats: bool) -> None:
    config = compose_config([*given, *overrides])
    assert config.generation.has_training_filter == repeats
    known = make_training_filter(config.generation)
    assert (known is not None) == repeats
    if known is not None:
        generation = config.generation
        assert (known.top_k, known.top_p, known.min_p) == (generation.top_k, generation.top_p, generation.min_p)


@pytest.mark.parametrize(("proposed", "method"), [(0, "ngram"), (2, "mtp")])
def test_n_grams_that_nobody_looks_up_are_idle(
    given: list[str], proposed: int, method: Literal["ngram", "mtp"]
) -> None:
    config = compose_config([*given, "generation.engine.speculative.prompt_lookup_max=5"])
    config.generation.engine.speculative.num_speculative_tokens = proposed
    config.generation.engine.speculative.method = method
    (told,) = find_remarks(config)
    assert told.subject == "generation.engine.speculative.prompt_lookup_max=5"


@pytest.mark.parametrize(("size", "engines", "each"), [(None, 2, 256), (7, 2, 4), (8, 2, 4), (9, 4, 3)])
def test_responses_decoded_together_are_shared_out(given: list[str], size: int | None, engines: int, each: int) -> None:
    config = compose_config(
        [
            *given,
            f"generation.parallel.data={engines}",
            f"generation.generation_batch_size={'null' if size is None else size}",
        ]
    )
    assert config.generation.sequences_per_engine == each


def test_vllm_has_attention_for_the_heads_of_the_model(given: list[str], model: Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # here: vLLM takes long to import

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    config = json.loads((model / "config.json").read_text()) | {"head_dim": 16}
    (model / "config.json").write_text(json.dumps(config))
    write_weights(model / "model.safetensors", config)
    problem = problems_of([*given, "cluster.gpus_per_node=0"])[f"policy.model.path={model}"]
    assert problem.startswith("has heads of 16, for which vLLM has no attention on a CPU; it has 32, 64,")
    compose_config([*given, "cluster.gpus_per_node=8"])
