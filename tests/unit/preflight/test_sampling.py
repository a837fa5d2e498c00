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
from tests.support.config_problems import problems_of, setting_problems_of, write_weights

ON_GPUS = "cluster.gpus_per_node=8"
MTP = ("generation.engine.speculative.num_speculative_tokens=1", "generation.engine.speculative.method=mtp")
ICEPOP = (
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=icepop",
    "loss_fn.truncated_importance_sampling_ratio=5",
    "loss_fn.truncated_importance_sampling_ratio_min=0.5",
)


@pytest.mark.parametrize(
    ("overrides", "subject", "text"),
    [
        (["generation.temperature=4"], "generation.temperature=4", "must be 0 (greedy) or float >= 0.01 and <= 2"),
        (["generation.min_p=1.5"], "generation.min_p=1.5", "must be float >= 0 and <= 1"),
        (["generation.presence_penalty=3"], "generation.presence_penalty=3", "must be float >= -2 and <= 2"),
        (["generation.repetition_penalty=0"], "generation.repetition_penalty=0", "must be float > 0"),
        (["generation.bad_words=[a,'']"], "generation.bad_words.1=", "must be list of text that is not empty"),
        (
            ["generation.structured.regex='[0-9]+'", "generation.structured.choice=[a]"],
            "generation.structured.regex",
            "excludes generation.structured.choice",
        ),
        (["generation.structured.regex='[0-9'"], "generation.structured.regex=[0-9", "is not a regular expression"),
        (["generation.structured.json_schema=abc"], "generation.structured.json_schema=abc", "is not a JSON text"),
        (["generation.structured.json_schema='[1]'"], "generation.structured.json_schema=[1]", "must be a JSON object"),
        (
            ["generation.structured.choice=[]"],
            "generation.structured.choice=[]",
            "must be list of text that is not empty",
        ),
        (["generation.structured.choice=[a,'']"], "generation.structured.choice.1=", "list of text that is not empty"),
        (
            ["generation.structured.choice=[a,b]", *ICEPOP],
            "loss_fn.truncated_importance_sampling_type=icepop",
            "the form gives many tokens a probability of 1",
        ),
        (
            ["generation.structured.choice=[a,b]", "grpo.seq_logprob_error_threshold=2"],
            "grpo.seq_logprob_error_threshold=2",
            "beside generation.structured",
        ),
        (
            ["generation.generation_batch_size=8", "generation.engine.max_num_seqs=4"],
            "generation.generation_batch_size=8",
            "say the same; give one of them",
        ),
        (
            ["generation.generation_batch_size=3", "generation.parallel.data=4"],
            "generation.generation_batch_size=3",
            "leaves some of the 4 engines without a response",
        ),
        (
            [ON_GPUS, "generation.engine.speculative.num_speculative_tokens=3", "generation.min_p=0.1"],
            "generation.min_p=0.1",
            "vLLM has no min_p with speculative decoding",
        ),
        (
            [
                "generation.engine.speculative.num_speculative_tokens=3",
                "generation.engine_args.logits_processors=[a.b]",
            ],
            "generation.engine_args.logits_processors=['a.b']",
            "vLLM has no logits processors with speculative decoding; leave them out",
        ),
        (
            ["generation.engine.speculative.num_speculative_tokens=3", "generation.top_k=5"],
            "generation.top_k=5",
            "fails on a CPU in the installed vLLM with speculative decoding",
        ),
        (
            [ON_GPUS, *MTP],
            "generation.engine.speculative.method=mtp",
            "vLLM has for deepseek_v3, deepseek_v32, glm_moe_dsa, glm4_moe, qwen3_5, qwen3_5_moe, qwen3_next, and the "
            "model is qwen3; use ngram",
        ),
        (
            [
                ON_GPUS,
                "generation.engine.speculative.num_speculative_tokens=3",
                "generation.engine.speculative.prompt_lookup_min=5",
            ],
            "generation.engine.speculative.prompt_lookup_min=5",
            "must not be above generation.engine.speculative.prompt_lookup_max=4",
        ),
    ],
)
def test_refused_before_anything_starts(given: list[str], overrides: list[str], subject: str, text: str) -> None:
    ((found, message),) = setting_problems_of([*given, *overrides]).items()
    assert found == subject
    assert text in message


def test_n_grams_need_a_single_stage(given: list[str]) -> None:
    overrides = [
        *given,
        ON_GPUS,
        "generation.engine.speculative.num_speculative_tokens=3",
        "generation.parallel.pipeline=2",
    ]
    ((subject, text),) = setting_problems_of(overrides).items()
    assert subject == "generation.parallel.pipeline=2"
    assert text.endswith("use 1")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (ICEPOP, "loss_fn.use_importance_sampling_correction=True"),
        (["loss_fn.use_importance_sampling_correction=true"], "loss_fn.use_importance_sampling_correction=True"),
        (["grpo.seq_logprob_error_threshold=1.5"], "grpo.seq_logprob_error_threshold=1.5"),
    ],
)
def test_filters_that_training_cannot_repeat_are_refused_beside_what_compares(
    given: list[str], options: list[str], named: str
) -> None:
    overrides = [*given, "generation.top_p=0.9", "generation.top_k=5", "generation.bad_words=[x]"]
    compose_config(overrides)
    told = problems_of([*overrides, *options])
    assert told.keys() == {"generation.top_p=0.9", "generation.top_k=5"}
    assert "does not repeat beside generation.bad_words" in told["generation.top_p=0.9"]
    assert f"{named} would take that for a difference" in told["generation.top_p=0.9"]
    assert "; use null, or leave that option out" in told["generation.top_k=5"]


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


def test_a_filter_that_training_does_not_repeat_is_told_of(given: list[str]) -> None:
    overrides = [*given, "generation.min_p=0.02", "generation.structured.choice=[yes,no]"]
    told = {one.subject: one.text for one in find_remarks(compose_config(overrides))}
    assert "because generation.structured changes the logits before it" in told["generation.min_p=0.02"]


@pytest.mark.parametrize(("proposed", "method"), [(0, "ngram"), (2, "mtp")])
def test_n_grams_that_nobody_looks_up_are_idle(
    given: list[str], proposed: int, method: Literal["ngram", "mtp"]
) -> None:
    config = compose_config([*given, "generation.engine.speculative.prompt_lookup_max=5"])
    config.generation.engine.speculative.num_speculative_tokens = proposed
    config.generation.engine.speculative.method = method
    (told,) = find_remarks(config)
    assert told.subject == "generation.engine.speculative.prompt_lookup_max=5"


def test_a_method_of_no_speculation_is_idle(given: list[str]) -> None:
    (told,) = find_remarks(compose_config([*given, MTP[1]]))
    assert told.subject == MTP[1]


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


@pytest.mark.parametrize(
    ("foreign", "here"),
    [
        ("min_p=0.1", "TRL's min_p is generation.min_p here"),
        ("repetition_penalty=1.1", "TRL's repetition_penalty is generation.repetition_penalty here"),
        ("generation_batch_size=4", "TRL's generation_batch_size is grpo.num_prompts_per_step and "),
        ("vllm_guided_decoding_regex=x", "TRL's vllm_guided_decoding_regex is generation.structured.regex here"),
        ("generation_kwargs.presence_penalty=1", "unknown key; --cfg job shows all keys"),
        ("generation_kwargs=1", "TRL's generation_kwargs is generation.presence_penalty and"),
    ],
)
def test_names_that_users_know(given: list[str], foreign: str, here: str) -> None:
    (text,) = problems_of([*given, f"+{foreign}"]).values()
    assert here in text


def test_penalties_beside_what_drops_for_a_difference_are_told_of(given: list[str]) -> None:
    overrides = [*given, "generation.bad_words=[x]"]
    assert "generation.bad_words" not in {one.key for one in find_remarks(compose_config(overrides))}
    told = {one.subject: one.text for one in find_remarks(compose_config([*overrides, *ICEPOP]))}
    assert "truncated_importance_sampling_type=icepop leaves tokens out" in told["generation.bad_words=['x']"]


def test_vllm_has_attention_for_the_heads_of_the_model(given: list[str], model: Path) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # here: vLLM takes long to import

    assert list(CPU_HEAD_SIZES) == CPUAttentionBackend.get_supported_head_sizes()
    config = json.loads((model / "config.json").read_text()) | {"head_dim": 16}
    (model / "config.json").write_text(json.dumps(config))
    write_weights(model / "model.safetensors", config)
    problem = problems_of([*given, "cluster.gpus_per_node=0"])[f"policy.model.path={model}"]
    assert problem.startswith("has heads of 16, for which vLLM has no attention on a CPU; it has 32, 64,")
    compose_config([*given, "cluster.gpus_per_node=8"])
