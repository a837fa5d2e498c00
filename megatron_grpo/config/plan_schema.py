"""The keys of plans, which `python -m megatron_grpo.plan` reads, and `--check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from megatron_grpo.config.section import PathText, Positive, PositiveFloat, Seconds, Section


@dataclass(kw_only=True)
class PlanConfig(Section):
    """What a plan assumes (docs/plan.md); runs do not read these keys."""

    workload: Literal["rl", "pretrain"] = "rl"
    """rl: a step of the recipe's algorithm; pretrain: an optimizer step on plan.global_batch_samples sequences of
    plan.sequence_length tokens, without engines and reference policy."""

    global_batch_samples: Positive | None = None
    """Sequences of an optimizer step with workload=pretrain; null: the samples of the recipe's step."""

    sequence_length: Positive | None = None
    """Tokens of each sequence with workload=pretrain; null: policy.max_total_sequence_length."""

    prompt_tokens: Positive | None = None
    """Mean tokens of a prompt; null: a quarter of data.max_input_seq_length."""

    response_tokens: Positive | None = None
    """Mean tokens of a response; null: half of generation.max_new_tokens."""

    response_sigma: PositiveFloat = 0.6
    """Standard deviation of the logarithm of response lengths, which are log-normal up to generation.max_new_tokens."""

    lengths_from: PathText | None = None
    """Folder of a run that recorded its rollouts, whose lengths replace the log-normal ones; null: log-normal."""

    expert_skew: Annotated[float, Field(ge=1)] = 1.5
    """Tokens of the fullest rank's experts relative to the mean; memory is planned at this and at balanced experts."""

    hardware: PathText | None = None
    """YAML with values that replace those of the profile of cluster.gpu, as `plan calibrate` writes; null: none."""

    timeout_s: Seconds = 1800.0
    """Deadline of all dry runs of a plan."""

    search_s: Seconds = 240.0
    """Seconds for the dry runs of --search, which begins with the layouts of the best estimates."""
