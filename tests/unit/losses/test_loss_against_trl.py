"""TRL on the same numbers; counts of an optimizer step, and which entries losses look at."""

import inspect
import math
import textwrap
from collections import defaultdict
from dataclasses import fields, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.token_batch import STORED_DTYPES, TokenFields
from megatron_grpo.config.loop_schema import MseValueLossConfig
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.losses.loss import GlobalCounts, LossFunction, combine_metrics, is_extreme
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.selections import mark_selected
from megatron_grpo.losses.value import MseValueLossFn
from tests.support.loss_oracle import CONFIGS, VARIANTS, counts_of, random_batch

SEQUENCES = 6


@pytest.mark.parametrize("case", VARIANTS["trl"])
def test_loss_and_gradients_equal_trl(case: str) -> None:
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    config, options = (VARIANTS["trl"][case][side] for side in ("ours", "theirs"))
    config = LossConfig(**config)
    curr, tokens = random_batch(12, sequences=SEQUENCES)
    if config.constant_normalizer_tokens:
        tokens.loss_mask[1] = 0  # a response that is left out counts in the constant all the same
    if config.averages_responses:  # TRL's form is for one advantage a response
        tokens.advantages = tokens.advantages[:, :1].expand_as(curr)
    if config.selection is not None:
        tokens.selected = mark_selected(config, tokens.entropy, tokens.advantages, tokens.loss_mask > 0)
    ours, theirs = ([curr.clone().requires_grad_(), tokens.entropy.clone().requires_grad_()] for _ in range(2))
    inputs, trainer_class = _inputs(tokens), grpo_trainer.GRPOTrainer
    if "mode" in options:
        limits = {name: options.get(name) for name in ("mode", "clip_min", "clip_max")}
        inputs["importance_sampling_ratio"] = _sampling_weights(grpo_trainer, tokens, **limits)
    if config.objective == "gmpo":
        trainer_class = pytest.importorskip("trl.experimental.gmpo").GMPOTrainer
        inputs["advantages"] = tokens.advantages[:, 0]
    expected = trainer_class._compute_loss(_trainer(grpo_trainer.GRPOTrainer, *theirs, **options), None, inputs)
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
        "sampling_per_token_logps": tokens.generation_logprobs,
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


def _trainer(trainer_class: Any, curr: Tensor, entropy: Tensor, **options: Any) -> Any:
    """What GRPOTrainer._compute_loss reads of its trainer."""
    args = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "steps_per_generation": 1,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
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
            pad_across_processes=lambda value, dim, pad_index: value,
            num_processes=1,
            sync_gradients=False,
        ),
        "_metrics": {"train": defaultdict(list)},
        "get_off_policy_mask": trainer_class.get_off_policy_mask,
        "get_gamma_weights": trainer_class.get_gamma_weights,
    }
    trainer = SimpleNamespace(**(fields | options))
    trainer.get_high_entropy_mask = partial(trainer_class.get_high_entropy_mask, trainer)
    return trainer


Response = tuple[int, int, bool, bool]
"""Tokens of the prompt, tokens of the response, whether it is in the loss, whether it is correct."""
RESPONSES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5), st.booleans(), st.booleans()), max_size=8)


def make_step(responses: list[Response], *, correct_known: bool) -> StepBatch:
    """The responses as the driver holds them."""
    rows = np.array(responses, dtype=np.int64).reshape(-1, 4)
    return StepBatch(
        lengths=rows[:, 0] + rows[:, 1],
        response_tokens=rows[:, 1],
        in_loss=rows[:, 2] > 0,
        positive=rows[:, 3] > 0 if correct_known else None,
    )


def test_counts_are_sums_of_weights() -> None:
    batch = make_step(
        [(2, 3, True, True), (1, 4, True, False), (1, 5, False, True), (1, 0, True, True)], correct_known=True
    )
    batch.loss_weights = np.array([0.5, 1.0, 0.25, 0.75], dtype=np.float32)
    assert GlobalCounts.count(batch, np.arange(4)) == GlobalCounts(
        tokens=7.0, sequences=1.5, all_sequences=2.5, positive_tokens=1.5, token_weight=5.5 / 7
    )


def mask_of(response: Response) -> list[float]:
    """The loss mask, token by token."""
    prompt, tokens, in_loss, _ = response
    return [0.0] * prompt + [float(in_loss)] * tokens


@given(responses=RESPONSES, correct_known=st.booleans(), data=st.data())
def test_counts_are_those_of_the_masks(responses: list[Response], correct_known: bool, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(responses))), unique=True) if responses else st.just([]))
    masks = [mask_of(responses[number]) for number in chosen]
    assume(any(map(sum, masks)))
    counts = GlobalCounts.count(make_step(responses, correct_known=correct_known), np.array(chosen, dtype=np.int64))
    correct = [mask for number, mask in zip(chosen, masks, strict=True) if correct_known and responses[number][3]]
    assert counts == GlobalCounts(
        tokens=sum(map(sum, masks)),
        sequences=sum(1.0 in mask for mask in masks),
        all_sequences=len(chosen),
        positive_tokens=sum(map(sum, correct)),
    )
    assert all(type(getattr(counts, one.name)) is float for one in fields(counts)), "plain numbers, not numpy's"


@pytest.mark.parametrize("responses", [[(2, 3, False, True)], [(2, 0, True, True)], [(1, 0, True, True)] * 3])
def test_a_step_without_a_token_in_the_loss_is_a_defect(responses: list[Response]) -> None:
    batch = make_step(responses, correct_known=True)
    with pytest.raises(AssertionError, match="a token to learn from"):
        GlobalCounts.count(batch, np.arange(len(responses)))
    with pytest.raises(AssertionError, match="a token to learn from"):
        GlobalCounts.count(batch, np.array([], dtype=np.int64))


SHARES = st.lists(
    st.dictionaries(
        st.sampled_from(["loss", "ratio_max", "ratio_min", "max_of_means", "kl"]),
        st.floats(-1e6, 1e6) | st.sampled_from([math.inf, -math.inf]),
    ),
    max_size=5,
)


@given(shares=SHARES)
def test_shares_add_up_and_extremes_are_extremes(shares: list[dict[str, float]]) -> None:
    values: dict[str, list[float]] = {}
    for share in shares:
        for name, value in share.items():
            values.setdefault(name, []).append(value)
    reduce = {"ratio_max": max, "ratio_min": min}
    expected = {name: reduce.get(name, sum)(column) for name, column in values.items()}
    assert combine_metrics(shares) == pytest.approx(expected, nan_ok=True)
    assert {name for name in values if is_extreme(name)} == values.keys() & reduce.keys()


def everything(seed: int) -> tuple[Tensor, TokenFields]:
    """A policy's log-probabilities and a batch in which no entry is missing."""
    curr, tokens = random_batch(seed)
    ids = torch.arange(curr.numel()).view_as(curr)
    return curr, replace(tokens, token_ids=ids, sampled=tokens.loss_mask > 0, values=curr / 2, returns=curr**2)


class Watched(TokenFields):
    """Remembers which entries were looked at, in the set `seen`."""

    __slots__ = ("seen",)

    def __init__(self, **entries: Tensor) -> None:
        self.seen: set[str] = set()
        super().__init__(**entries)

    def __getattribute__(self, name: str) -> Any:
        if name in NAMES:
            self.seen.add(name)
        return super().__getattribute__(name)


NAMES = {one.name for one in fields(TokenFields)}
OF_THE_RANK = {"loss_mask", "positive", "weight", "rollout_share", "entropy", "unfiltered_logprobs"}
"""Entries that no store holds: they follow from others, or from the model's output."""
LOSSES: dict[str, list[LossFunction]] = {
    "policy": [ClippedPGLossFn(config) for config in CONFIGS.values()],
    "value": [MseValueLossFn(MseValueLossConfig(value_clip=clip)) for clip in (None, 0.2)],
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_looks_at_what_it_says_that_it_reads(kind: str) -> None:
    """Whatever else is not fetched cannot be missed; and nothing is fetched that no configuration looks at."""
    curr, tokens = everything(20)
    looked_at: set[str] = set()
    for loss_fn in LOSSES[kind]:
        watched = Watched(**tokens.as_dict())
        loss_fn(curr, watched, counts_of(tokens))
        looked_at |= watched.seen
        assert watched.seen <= {*loss_fn.field_names, *OF_THE_RANK}
        # loss_mask is made on the rank, of "sampled".
        assert {"sampled"} <= set(loss_fn.field_names) <= STORED_DTYPES.keys()
    assert looked_at >= {*LOSSES[kind][0].field_names} - {"sampled"}


@pytest.mark.parametrize("kind", LOSSES)
def test_entries_that_a_loss_does_not_read_change_nothing(kind: str) -> None:
    curr, tokens = everything(21)
    counts = counts_of(tokens)
    for loss_fn in LOSSES[kind]:
        fetched = replace(tokens, **dict.fromkeys(NAMES - {*loss_fn.field_names, *OF_THE_RANK}))
        torch.testing.assert_close(loss_fn(curr, fetched, counts), loss_fn(curr, tokens, counts), atol=0, rtol=0)
