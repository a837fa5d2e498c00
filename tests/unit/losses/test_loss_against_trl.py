"""TRL's own loss code on the same numbers, wherever its definition is ours."""

from __future__ import annotations

import inspect
import math
import textwrap
from collections import defaultdict
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo.batch.token_batch import TokenFields
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from tests.support.loss_oracle import counts_of, random_batch

SEQUENCES = 6
NO_KL = {"reference_policy_kl_penalty": 0.0}
CORRECTED = {**NO_KL, "use_importance_sampling_correction": True}
CASES: dict[str, tuple[LossConfig, dict[str, Any]]] = {
    "clipped": (LossConfig(ratio_clip_max=0.28, **NO_KL), {"loss_type": "bnpo", "epsilon_high": 0.28}),
    "dapo": (LossConfig(ratio_clip_max=0.28, **NO_KL), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "kl": (LossConfig(reference_policy_kl_penalty=0.2), {"loss_type": "bnpo", "beta": 0.2}),
    "on_policy_kl": (
        LossConfig(reference_policy_kl_penalty=0.2, use_on_policy_kl_approximation=True),
        {"loss_type": "bnpo", "beta": 0.2, "use_bias_correction_kl": True},
    ),
    "sequences": (
        LossConfig(reference_policy_kl_penalty=0.2, token_level_loss=False),
        {"loss_type": "grpo", "beta": 0.2},
    ),
    "dr_grpo": (
        LossConfig(constant_normalizer_tokens=20, **NO_KL),
        {"loss_type": "dr_grpo", "max_completion_length": 20},
    ),
    "gspo": (
        LossConfig(
            token_level_loss=False,
            sequence_level_importance_ratios=True,
            ratio_clip_min=0.05,
            ratio_clip_max=0.2,
            **NO_KL,
        ),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.2},
    ),
    # TRL's epsilon_high is the bound itself, and it has no lower one.
    "cispo": (
        LossConfig(use_cispo=True, ratio_clip_min=1.0, ratio_clip_max=0.5, **NO_KL),
        {"loss_type": "cispo", "epsilon_high": 1.5},
    ),
    "sapo": (
        LossConfig(use_sapo=True, sapo_temperature_pos=0.9, sapo_temperature_neg=1.4, token_level_loss=False, **NO_KL),
        {"loss_type": "sapo", "sapo_temperature_pos": 0.9, "sapo_temperature_neg": 1.4},
    ),
    "entropy": (
        LossConfig(entropy_coef=0.3, **NO_KL),
        {"loss_type": "bnpo", "_entropy_bonus_enabled": True, "entropy_coef": 0.3},
    ),
}

VLLM = {"loss_type": "bnpo", "use_vllm": True, "vllm_importance_sampling_correction": True}
CASES |= {
    "tis": (
        LossConfig(truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=1.2, **CORRECTED),
        {**VLLM, "mode": "token_truncate", "clip_max": 1.2},
    ),
    "icepop": (
        LossConfig(
            truncated_importance_sampling_type="icepop",
            truncated_importance_sampling_ratio=1.4,
            truncated_importance_sampling_ratio_min=0.7,
            **CORRECTED,
        ),
        {**VLLM, "mode": "token_mask", "clip_min": 0.7, "clip_max": 1.4},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_trl(case: str) -> None:
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    config, options = CASES[case]
    curr, tokens = random_batch(12, sequences=SEQUENCES)
    if config.constant_normalizer_tokens:
        tokens.loss_mask[1] = 0  # a response that is left out counts in the constant all the same
    if config.sequence_level_importance_ratios:  # TRL's form is for one advantage a response
        tokens.advantages = tokens.advantages[:, :1].expand_as(curr)
    ours, theirs = ([curr.clone().requires_grad_(), tokens.entropy.clone().requires_grad_()] for _ in range(2))
    inputs = _inputs(tokens)
    if config.use_importance_sampling_correction:
        limits = {name: options.get(name) for name in ("mode", "clip_min", "clip_max")}
        inputs["importance_sampling_ratio"] = _sampling_weights(grpo_trainer, tokens, **limits)
    expected = grpo_trainer.GRPOTrainer._compute_loss(_trainer(*theirs, **options), None, inputs)
    actual, _ = ClippedPGLossFn(config)(ours[0], replace(tokens, entropy=ours[1]), counts_of(tokens))
    torch.testing.assert_close(actual, expected)
    for loss in (expected, actual):
        loss.backward()
    torch.testing.assert_close(ours[0].grad, theirs[0].grad)
    if config.entropy_coef:
        torch.testing.assert_close(ours[1].grad, theirs[1].grad)


def _inputs(tokens: TokenFields) -> dict[str, Tensor]:
    length = tokens.loss_mask.shape[1]
    return {
        "prompt_ids": torch.zeros(SEQUENCES, 1, dtype=torch.int64),
        "prompt_mask": torch.ones(SEQUENCES, 1, dtype=torch.int64),
        "completion_ids": torch.zeros(SEQUENCES, length, dtype=torch.int64),
        "completion_mask": tokens.loss_mask,
        "advantages": tokens.advantages,
        "old_per_token_logps": tokens.prev_logprobs,
        "ref_per_token_logps": tokens.reference_logprobs,
        "num_items_in_batch": tokens.loss_mask.sum(),
    }


def _sampling_weights(
    grpo_trainer: ModuleType, tokens: TokenFields, mode: str, clip_min: float | None, clip_max: float | None
) -> Tensor:
    """The statements of GRPOTrainer._generate_and_score_completions about vLLM's log-probabilities, run as they are."""
    source = inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions)
    lines = textwrap.dedent(source).splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("mask = completion_mask if tool_mask"))
    end = next(i for i, line in enumerate(lines) if i > start and line.strip() == "raise ValueError(")
    names = {
        "torch": torch,
        "math": math,
        "tool_mask": None,
        "completion_mask": tokens.loss_mask,
        "old_per_token_logps": tokens.prev_logprobs,
        "sampling_per_token_logps": tokens.generation_logprobs,
        "self": SimpleNamespace(
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_min=clip_min,
            vllm_importance_sampling_clip_max=clip_max,
        ),
    }
    exec(textwrap.dedent("\n".join(lines[start : end - 1])), names)
    weights = names["vllm_importance_sampling_ratio"]
    assert isinstance(weights, Tensor)
    return weights


def _trainer(curr: Tensor, entropy: Tensor, **options: Any) -> Any:
    """What GRPOTrainer._compute_loss reads of its trainer."""
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
    }
    args |= {name: options.pop(name) for name in list(options) if name in args}
    fields: dict[str, Any] = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (curr, entropy, None),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "args": SimpleNamespace(**args),
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
        "current_gradient_accumulation_steps": 1,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
            num_processes=1,
            sync_gradients=False,
        ),
        "_metrics": {"train": defaultdict(list)},
    }
    return SimpleNamespace(**(fields | options))
