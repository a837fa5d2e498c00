"""Faults that fewer than half of the canary's tokens show, and rounding of healthy families, by transformers alone."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from megatron_grpo.config.errors import CanaryError
from megatron_grpo.config.generation_schema import RefitConfig
from megatron_grpo.config.schema import Config
from megatron_grpo.generation.engine_canary import CanaryPrompt
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.verification.double_precision import DoublePrecision
from megatron_grpo.verification.hf_model import load_eager_model
from megatron_grpo.verification.problem import SMALL, TINY, make_model, prepare_model
from megatron_grpo.weight_sync.refit_checks import BOUNDS, TOKEN_FACTOR, Canary, draw_canary, find_coarsest_precision
from tests.support.grpo_run import SHAPE

Logprobs = tuple[tuple[float, ...], ...]
VOCAB = 131
SEQUENCES = draw_canary(1, VOCAB, 64)
MEASURED = BOUNDS["float32"].floor  # limit of the median once a run has measured its noise


def score(model: Any) -> Logprobs:
    """Log-probabilities of all tokens but the first, each sequence computed alone."""
    rows = []
    for sequence in SEQUENCES:
        ids = torch.tensor(sequence)
        with torch.no_grad():
            logits = model(ids[None], use_cache=False).logits[0, :-1].double()
        rows.append(tuple(logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].tolist()))
    return tuple(rows)


def make_prompt(expected: Logprobs, *, spares_sequence: bool = False) -> CanaryPrompt:
    return CanaryPrompt(
        7, SEQUENCES, expected, MEASURED, token_limit=TOKEN_FACTOR * MEASURED, spares_sequence=spares_sequence
    )


LATE = SEQUENCES[2][17]
"""A token near the end of a sequence, so that few others see it."""


def damage_embedding(model: Any) -> None:
    model.model.embed_tokens.weight[LATE] *= 1.5


def damage_output_row(model: Any) -> None:
    model.lm_head.weight[LATE] *= 1.003


def damage_expert(model: Any) -> None:
    model.model.layers[-1].mlp.experts.down_proj[5] *= 1.3


def swap_experts(model: Any) -> None:
    weights = model.model.layers[-1].mlp.experts.down_proj
    weights[2:4] = weights[2:4].flip(0)


def make_tiny(family: str, folder: Path) -> Path:
    """A tiny model; with experts 32 of them, so that few tokens use each."""
    experts = {"num_local_experts": 32} if "moe" in family else {}
    return make_model({"model_type": family, **SMALL, **TINY[family], **experts}, folder, seed=0)


@pytest.mark.parametrize(
    ("family", "damage"),
    [
        ("qwen3", damage_embedding),
        ("deepseek_v3", damage_embedding),
        ("llama", damage_output_row),
        ("qwen3_moe", damage_expert),
        ("qwen3_moe", swap_experts),
    ],
)
def test_a_fault_of_few_tokens_is_noticed_where_the_median_is_blind(
    family: str, damage: Callable[[Any], None], tmp_path: Path
) -> None:
    assert sum(token == LATE for sequence in SEQUENCES for token in sequence) == 1
    model = load_eager_model(make_tiny(family, tmp_path), torch.float32)
    prompt = make_prompt(score(model), spares_sequence="moe" in family)
    with torch.no_grad():
        damage(model)
    actual = score(model)
    blind = replace(prompt, token_limit=math.inf)
    assert blind.require_agreement(actual).error <= MEASURED, "the median does not see it"
    with pytest.raises(CanaryError, match="the medians agree, but log-probabilities of single tokens"):
        prompt.require_agreement(actual)


def test_an_expert_that_only_one_sequence_uses_is_noticed_by_the_second_canary(tmp_path: Path) -> None:
    model = load_eager_model(make_tiny("qwen3_moe", tmp_path), torch.float32)
    prompt = make_prompt(score(model), spares_sequence=True)
    with torch.no_grad():
        model.model.layers[-1].mlp.experts.down_proj[3] *= 1.3
    actual = score(model)
    assert prompt.require_agreement(actual).is_suspect
    with pytest.raises(CanaryError, match="single tokens"):
        replace(prompt, spares_sequence=False).require_agreement(actual)


def test_a_wrong_head_of_attention_is_noticed(tmp_path: Path) -> None:
    """All tokens behind the first ones attend by it: the median sees a large fault, the largest any."""
    model = load_eager_model(prepare_model("tiny:qwen3", False, tmp_path, 0), torch.float32)
    prompt = make_prompt(score(model))
    projection = model.model.layers[1].self_attn.o_proj.weight
    width = model.config.head_dim
    with torch.no_grad():
        projection[:, width : 2 * width] *= 1.05
    with pytest.raises(CanaryError, match="differ from the policy's by"):
        prompt.require_agreement(score(model))


def test_the_message_names_the_tokens(tmp_path: Path) -> None:
    model = load_eager_model(prepare_model("tiny:llama", False, tmp_path, 0), torch.float32)
    prompt = make_prompt(score(model))
    actual = [list(row) for row in prompt.expected]
    actual[2][16] += 0.25  # of token 17: the first token of a sequence has none
    with pytest.raises(CanaryError) as caught:
        prompt.require_agreement(actual)
    text = f"by more than 0.001: 1 of 20 tokens, from token 17 (id {LATE}, behind id {SEQUENCES[2][16]}), by up to 0.25"
    assert text in str(caught.value)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma4", "qwen3_5", "deepseek_v3"])
def test_rounding_of_a_healthy_family_is_far_below_the_limit(family: str, tmp_path: Path) -> None:
    """Between float32 and float64, which is more than between two sides that round alike."""
    folder = prepare_model(f"tiny:{family}", False, tmp_path, 0)
    rounded = score(load_eager_model(folder, torch.float32))
    with DoublePrecision():
        exact = score(load_eager_model(folder, torch.float64).double())
    assert make_prompt(exact).require_agreement(rounded).error < MEASURED / 20
    differences = [[abs(a - b) for a, b in zip(*rows, strict=True)] for rows in zip(exact, rounded, strict=True)]
    largest = max(map(max, differences))
    assert largest < TOKEN_FACTOR * MEASURED / 20
    assert largest < TOKEN_FACTOR * 2 * max(map(median, differences)), "tokens round alike"


def test_a_near_tie_of_experts_changes_one_sequence() -> None:
    expected = ((-1.0, -2.0, -3.0, -2.0, -1.0), (-4.0, -5.0, -1.0))
    tie = ((-1.0, -2.0, -3.0, -2.6, -1.1), (-4.0, -5.0, -1.0))
    both = ((-1.0, -2.0, -3.0, -2.6, -1.1), (-4.0, -5.0, -1.4))
    prompt = CanaryPrompt(
        1, ((1, 2, 3, 4, 5, 6), (1, 2, 3, 4)), expected, MEASURED, token_limit=1e-3, spares_sequence=True
    )
    result = prompt.require_agreement(tie)
    assert result == (pytest.approx(0), pytest.approx(0.6), True)
    with pytest.raises(CanaryError, match=r"2 of 6 tokens, from token 4 .*, 1 of 4 tokens, from token 3"):
        prompt.require_agreement(both)
    with pytest.raises(CanaryError, match="2 of 6 tokens"):
        replace(prompt, spares_sequence=False).require_agreement(tie)


def choose_limits(config: Config, **shape: Any) -> tuple[float, bool]:
    canary = Canary.from_config(config, replace(SHAPE, **shape))
    return canary.token_limit, canary.spares_sequence


def test_single_tokens_have_a_limit_where_all_tokens_round_alike() -> None:
    config = compose_config(["+exp=quickstart"])
    assert find_coarsest_precision(config) == "float32"
    experts: Any = object()
    assert choose_limits(config) == (TOKEN_FACTOR * BOUNDS["float32"].first, False)
    assert choose_limits(config, experts=experts) == (TOKEN_FACTOR * BOUNDS["float32"].first, True)
    servers = compose_config(["+exp=quickstart", "generation.server.urls=[http://localhost:1]"])
    assert find_coarsest_precision(servers) == "tf32"
    assert choose_limits(servers) == (TOKEN_FACTOR * BOUNDS["tf32"].first, False)
    assert choose_limits(servers, experts=experts)[0] == math.inf
    half = compose_config(["+exp=quickstart", "policy.precision=bfloat16"])
    assert choose_limits(half)[0] == math.inf


def test_the_limit_of_tokens_follows_the_noise_and_the_users_limit() -> None:
    canary = Canary(RefitConfig(), SEQUENCES, BOUNDS["float32"], limits_tokens=True)
    canary.record_noise(3e-6)
    assert canary.token_limit == pytest.approx(TOKEN_FACTOR * 1e-4)
    canary.record_noise(2e-5)
    assert canary.token_limit == pytest.approx(TOKEN_FACTOR * 20 * 2e-5)
    canary.record_noise(3e-6, largest=3e-4)
    assert canary.token_limit == pytest.approx(20 * 3e-4), "of single tokens too"
    canary.record_noise(3e-6, largest=3e-3)
    assert canary.token_limit == pytest.approx(TOKEN_FACTOR * BOUNDS["float32"].first), "up to the first limit"
    assert Canary(RefitConfig(canary_limit=0.2), SEQUENCES, limits_tokens=True).token_limit == pytest.approx(2.0)
