"""Healthy runs of other families and options, for the doctor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from megatron_grpo.batch.trajectory import Span, Trajectory
from tests.support.planted import Plant, dtype_of, engine, write
from tests.support.planted_engines import truncated
from tests.support.planted_healthy import ASYNC, Healthy
from tests.support.planted_more import min_p
from tests.support.recorded_runs import RecordedRun, sampled, scored


def both_sides(change: Callable[[Tensor], Tensor], **options: float) -> Plant:
    """Both sides choose tokens in the same way, and training records its log-probabilities."""

    def plant(run: RecordedRun) -> None:
        version, right = len(run.versions) - 1, run.versions[-1]
        more = {"version": version, "samples": run.samples, "choose": change, "dtype": dtype_of(run)}
        drawn = sampled(right, run.prompts(), **more, **options)
        write(run, drawn, scored(right, drawn, choose=change, dtype=dtype_of(run)), recorded=True)

    return plant


def changed(edit: Callable[[list[Trajectory]], list[Trajectory]]) -> Plant:
    """Rollouts that the run itself left in another form."""

    def plant(run: RecordedRun) -> None:
        version, right = len(run.versions) - 1, run.versions[-1]
        drawn = edit(sampled(right, run.prompts(), version=version, samples=run.samples))
        write(run, drawn, scored(right, drawn), recorded=True)

    return plant


def greedy(run: RecordedRun) -> None:
    """The likeliest token is taken, so that samples are equal; reported are the model's own log-probabilities."""
    version, right = len(run.versions) - 1, run.versions[-1]
    drawn = sampled(right, run.prompts(), version=version, temperature=1e-4, reported=1.0)
    write(run, drawn, scored(right, drawn), recorded=True)


def shortened(length: int) -> Callable[[list[Trajectory]], list[Trajectory]]:
    """Responses that a limit of their length ends."""

    def shorten(one: Trajectory) -> Trajectory:
        ((start, end, version),) = one.spans
        end = min(end, start + length)
        reason = one.stop_reason if len(one.token_ids) == end else "length"
        ids, logprobs = one.token_ids[:end], one.logprobs[: end - start]
        return replace(one, token_ids=ids, logprobs=logprobs, spans=[Span(start, end, version)], stop_reason=reason)

    return lambda rollouts: [shorten(one) for one in rollouts]


def failed(rollouts: list[Trajectory]) -> list[Trajectory]:
    """An environment failed on two rollouts."""
    return [
        replace(one, failure="the environment failed") if place in (2, 5) else one for place, one in enumerate(rollouts)
    ]


def of_two_engines(rollouts: list[Trajectory]) -> list[Trajectory]:
    return [replace(one, engine=place % 2) for place, one in enumerate(rollouts)]


def sure_of_itself(run: RecordedRun) -> None:
    """The policy is sure of its tokens, so that samples of a prompt are equal by chance alone."""

    version, right = len(run.versions) - 1, run.versions[-1]
    drawn = sampled(right, run.prompts(), version=version, samples=run.samples, temperature=0.02)
    write(run, drawn, scored(right, drawn, temperature=0.02), recorded=True)


def of_mixed_versions(run: RecordedRun) -> None:
    """Some groups are of the version before, as a queue of an asynchronous run has them."""
    version = len(run.versions) - 1
    older, newer = (sampled(run.versions[number], run.prompts(), version=number) for number in (version - 1, version))
    drawn = [*older[:2], *newer[2:]]
    write(run, drawn, scored(run.versions[version], drawn), recorded=True)


def stopped_at(token: int) -> Callable[[list[Trajectory]], list[Trajectory]]:
    """Responses that end at the first such token."""

    def stop(one: Trajectory) -> Trajectory:
        ((start, _, version),) = one.spans
        places = np.flatnonzero(one.token_ids[start:] == token)
        if not len(places):
            return one
        end = start + int(places[0]) + 1
        ids, logprobs = one.token_ids[:end], one.logprobs[: end - start]
        return replace(one, token_ids=ids, logprobs=logprobs, spans=[Span(start, end, version)], stop_reason="stop")

    return lambda rollouts: [stop(one) for one in rollouts]


OPTIONS: Sequence[Healthy] = (
    Healthy("greedy", "dense", greedy, ("generation.temperature=0",)),
    Healthy("top_p", "dense", both_sides(truncated(0.9)), ("generation.top_p=0.9",)),
    Healthy("min_p", "llama", both_sides(min_p(0.05)), ("generation.min_p=0.05",)),
    Healthy("a policy that is sure of itself", "dense", sure_of_itself, ("generation.temperature=0.02",)),
    Healthy("rollouts that failed", "dense", changed(failed)),
    Healthy("responses of a single token", "dense", changed(shortened(1))),
    Healthy("responses that a limit ends", "llama", changed(shortened(5))),
    Healthy("two engines", "dense", changed(of_two_engines)),
    Healthy("another stop token", "dense", changed(stopped_at(60)), ("generation.stop_token_ids=[60]",)),
    Healthy("eight samples a prompt", "llama", engine(), ("grpo.num_generations_per_prompt=8",)),
    Healthy("a system prompt", "dense", engine(recorded=True), ("data.system_prompt=be brief",)),
    Healthy("plain text", "llama", engine(), ("data.apply_chat_template=false",)),
    Healthy("asynchronous, groups of two versions", "dense", of_mixed_versions, ASYNC),
    Healthy("adapters in bfloat16", "bfloat16 adapters", engine()),
    Healthy("sinks and windows", "gpt_oss", engine(recorded=True)),
    Healthy("rotary embeddings of a part", "glm4", engine()),
    Healthy("experts in every layer", "mixtral", engine()),
)
