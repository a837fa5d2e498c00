"""From prompts to scored trajectories: sample every response, then have its environment score it."""

from __future__ import annotations

import hashlib
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from megatron_grpo.config.errors import RunError, SamplingError
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.data.responses import GenerationRequest, SamplingSettings
from megatron_grpo.data.scores import EnvironmentRequest, EnvironmentReturn
from megatron_grpo.data.trajectory import Span, Trajectory
from megatron_grpo.generation.interface import GenerationInterface


class Scorer(Protocol):
    """An environment, however many processes it runs in."""

    def step(self, requests: list[EnvironmentRequest]) -> list[EnvironmentReturn]: ...


class Timer(Protocol):
    """Names the phase that time is spent in."""

    def phase(self, name: str) -> AbstractContextManager[None]: ...


def sample_seed(run_seed: int, step: int, prompt_idx: int, sample: int) -> int:
    """Seed of one response, from what identifies it and nothing else: a resumed run or another layout draws the same.

    Returns:
        An integer in [0, 2^62).
    """
    digest = hashlib.blake2b(struct.pack("<4q", run_seed, step, prompt_idx, sample), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


@contextmanager
def _sampling_only() -> Iterator[None]:
    """What fails here leaves the models as they are."""
    try:
        yield
    except RunError as error:
        raise SamplingError(str(error)) from error


class RolloutCollector:
    """Samples and scores responses.

    Args:
        generation: the engines.
        environments: by task name.
        max_total_sequence_length: prompt and response together.
    """

    def __init__(
        self, generation: GenerationInterface, environments: Mapping[str, Scorer], max_total_sequence_length: int
    ) -> None:
        self.generation = generation
        self.environments = environments
        self.max_total_sequence_length = max_total_sequence_length

    @_sampling_only()
    def collect(
        self,
        prompts: Sequence[DatumSpec],
        *,
        samples_per_prompt: int,
        settings: SamplingSettings,
        run_seed: int,
        step: int,
        timer: Timer,
    ) -> list[Trajectory]:
        """Sample `samples_per_prompt` responses to each prompt; samples of a prompt are neighbours in the result.

        `run_seed`, `step`, the prompt's row and the sample's number decide what is drawn.

        Raises:
            SamplingError: an engine or an environment failed.
        """
        pairs = [(group, sample) for group in range(len(prompts)) for sample in range(samples_per_prompt)]
        prompt_ids = [[token for turn in datum["message_log"] for token in turn["token_ids"]] for datum in prompts]
        with timer.phase("generation"):
            outputs = self.generation.generate(
                [
                    GenerationRequest(
                        prompt_ids=prompt_ids[group],
                        seed=sample_seed(run_seed, step, prompts[group]["idx"], sample),
                        max_new_tokens=self.max_total_sequence_length - len(prompt_ids[group]),
                    )
                    for group, sample in pairs
                ],
                settings,
            )
        trajectories = []
        for (group, sample), output in zip(pairs, outputs, strict=True):
            start, end = len(prompt_ids[group]), len(prompt_ids[group]) + len(output.token_ids)
            trajectories.append(
                Trajectory(
                    prompt_idx=prompts[group]["idx"],
                    group=group,
                    sample=sample,
                    token_ids=prompt_ids[group] + output.token_ids,
                    spans=[Span(start, end, output.version)],
                    logprobs=output.logprobs,
                    response=output.text,
                    stop_reason=output.stop_reason,
                    loss_multiplier=prompts[group]["loss_multiplier"],
                )
            )
        with timer.phase("environment"):
            self._score(prompts, trajectories)
        return trajectories

    def _score(self, prompts: Sequence[DatumSpec], trajectories: list[Trajectory]) -> None:
        by_task: dict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in trajectories:
            by_task[prompts[trajectory.group]["task_name"]].append(trajectory)
        for task, members in by_task.items():
            requests = [
                EnvironmentRequest(
                    prompt=prompts[trajectory.group]["prompt"],
                    response=trajectory.response,
                    stop_reason=trajectory.stop_reason,
                    extra_env_info=prompts[trajectory.group]["extra_env_info"],
                )
                for trajectory in members
            ]
            for trajectory, score in zip(members, self.environments[task].step(requests), strict=True):
                trajectory.reward, trajectory.correct = score.reward, score.correct
                trajectory.reward_parts = score.parts
