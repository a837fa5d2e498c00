"""What the files of recorded rollouts say beside them, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_grpo.batch.rollout_files import RunFacts, StepFacts, StepRecord

RUN = RunFacts(prompts_per_step=2, samples_per_prompt=2, max_num_steps=2, vocab=9, vocabulary=None)


def make_facts(**changes: Any) -> StepFacts:
    """Of a step that sampled what it trains on, and no more; `changes` are fields."""
    return StepFacts(**{"position": {"epoch": 0}, "longest": 4, **changes})


def make_record(facts: StepFacts | None = None, **changes: Any) -> StepRecord:
    """Of a step of `RUN`, whose fields are changed by `changes`."""
    return StepRecord(replace(RUN, **changes), facts or make_facts())
