"""Runs in which both sides are right, of many kinds, for the doctor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_grpo.batch.trajectory import Span, Trajectory
from tests.support.planted import Plant, engine, write
from tests.support.planted_engines import likeliest
from tests.support.recorded_runs import RecordedRun, sampled, scored


@dataclass(frozen=True)
class Healthy:
    """A healthy run."""

    name: str
    run: str
    """Name of the run (`planted.RUNS`)."""
    plant: Plant
    overrides: tuple[str, ...] = ()
    """Changes of the run's configuration."""


def filtered(run: RecordedRun) -> None:
    """Both sides sample from the five likeliest tokens; one token left them when the policy moved."""
    drawn = sampled(run.versions[-1], run.prompts(), version=len(run.versions) - 1, choose=likeliest(5))
    trained = scored(run.versions[-1], drawn, choose=likeliest(5))
    trained[0][2] = -np.inf
    write(run, drawn, trained, recorded=True)


FIRST = 5
"""Tokens of the first part of a response."""


def of_two_versions(run: RecordedRun) -> None:
    """The weights changed within every response, and the cache was computed anew."""
    version = len(run.versions) - 1
    later = AutoModelForCausalLM.from_pretrained(run.versions[version], dtype=torch.float32).eval()

    def forward(model: Any, ids: list[int], prompt: int) -> Tensor:
        logits: Tensor = (model if len(ids) - prompt < FIRST else later)(torch.tensor([ids])).logits[0, -1].float()
        return logits

    def in_two(one: Trajectory) -> Trajectory:
        ((start, end, _),) = one.spans
        middle = min(start + FIRST, end)
        spans = [Span(start, middle, version - 1), Span(middle, end, version)]
        return replace(one, spans=[span for span in spans if span.end > span.start])

    drawn = [in_two(one) for one in sampled(run.versions[version - 1], run.prompts(), forward=forward)]
    write(run, drawn, scored(run.versions[version], drawn), recorded=False)


def of_version_before(run: RecordedRun) -> None:
    """The step trains on samples of the weights before."""
    version = len(run.versions) - 1
    drawn = sampled(run.versions[version - 1], run.prompts(), version=version - 1)
    write(run, drawn, scored(run.versions[version], drawn), recorded=True)


ANSWER = (40, 41, 42, 43)
"""Tokens with which an environment answers the first part of a response."""


def with_answer(run: RecordedRun, folder: Path, version: int) -> list[Trajectory]:
    """Rollouts of an engine with the weights of a folder, with an environment's tokens between two parts of each."""

    def forward(model: Any, ids: list[int], prompt: int) -> Tensor:
        first = prompt + FIRST
        whole = ids if len(ids) < first else [*ids[:first], *ANSWER, *ids[first:]]
        logits: Tensor = model(torch.tensor([whole])).logits[0, -1].float()
        return logits

    def in_two(one: Trajectory) -> Trajectory:
        ((start, end, _),) = one.spans
        first = start + FIRST
        if end <= first:
            return one
        ids = np.concatenate([one.token_ids[:first], ANSWER, one.token_ids[first:]]).astype(np.int32)
        spans = [Span(start, first, version), Span(first + len(ANSWER), end + len(ANSWER), version)]
        return replace(one, token_ids=ids, spans=spans)

    return [in_two(one) for one in sampled(folder, run.prompts(), version=version, forward=forward)]


def in_turns(run: RecordedRun) -> None:
    """An environment's tokens stand between the two parts of a response."""
    version = len(run.versions) - 1
    drawn = with_answer(run, run.versions[version], version)
    write(run, drawn, scored(run.versions[version], drawn), recorded=False)


def without_metrics(run: RecordedRun) -> None:
    engine()(run)
    (run.run_dir / "metrics.jsonl").unlink()


ASYNC = (
    "grpo.async_grpo.enabled=true",
    "loss_fn.use_importance_sampling_correction=true",
    "grpo.async_grpo.recompute_kv_cache_after_weight_updates=true",
)
HEALTHY: Sequence[Healthy] = (
    Healthy("float32", "dense", engine()),
    Healthy("recorded log-probabilities of the trainer", "dense", engine(recorded=True)),
    Healthy("bfloat16", "bfloat16", engine()),
    Healthy("experts", "experts", engine()),
    Healthy("experts in bfloat16", "bfloat16 experts", engine()),
    Healthy("shared experts and latent attention", "shared experts", engine()),
    Healthy("tied head", "tied", engine()),
    Healthy("biases", "biases", engine()),
    Healthy("adapters after steps", "adapters", engine()),
    Healthy("sliding windows", "gemma", engine()),
    Healthy("a temperature", "colder", engine(recorded=True)),
    Healthy("a filter that training repeats", "dense", filtered, ("generation.top_k=5",)),
    Healthy("asynchronous, two versions in a response", "dense", of_two_versions, ASYNC),
    Healthy("asynchronous, all of the version before", "dense", of_version_before, ASYNC),
    Healthy("several turns", "dense", in_turns),
    Healthy("one sample a prompt", "dense", engine(), ("grpo.num_generations_per_prompt=1",)),
    Healthy("no metrics", "dense", without_metrics),
)
