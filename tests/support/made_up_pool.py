"""Rollout workers with real environments over made-up engines, which fail when they are told to."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray

from megatron_grpo.batch.generation_requests import EngineCounts, GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import SampledGroup, Span, Trajectory
from megatron_grpo.cluster.futures import wrap_for_pickling
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.schema import EnvironmentConfig, RolloutsConfig
from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.environments.environment_processes import build_environments
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.rollouts.rollout import compute_sample_seed

SAMPLES, PROMPTS, MAX_LENGTH = 4, 6, 24
SETTINGS = SamplingSettings(max_new_tokens=16)
SEED, STEP = 7, 2


def prompt(idx: int, bad: Sequence[str] = (), task: str = "task") -> DatumSpec:
    return {
        "message_log": [{"role": "user", "content": "", "token_ids": [100 + idx, *range(idx % 3)]}],
        "length": 1 + idx % 3,
        "extra_env_info": {REFERENCE: seed_text(idx, 1), "bad": list(bad)},
        "loss_multiplier": 1.0,
        "idx": idx,
        "task_name": task,
        "prompt": f"prompt {idx}",
    }


def seed_text(idx: int, sample: int) -> str:
    return str(compute_sample_seed(SEED, STEP, idx, sample))


@contextmanager
def pool(
    tasks: Mapping[str, EnvironmentConfig] | None = None,
    *,
    engines: Sequence[Mapping[str, Any]] = ({}, {}),
    generation_timeout_s: float = 60.0,
    spare: Sequence[Mapping[str, Any]] = (),
    **config: Any,
) -> Iterator[RolloutPool]:
    """Rollout workers over one made-up engine for each entry of `engines`, which are its arguments.

    Engines that are lost are replaced by those of `spare`, the arguments of which are used up from the front.
    """
    environments = build_environments(tasks or {"task": EnvironmentConfig(type="addition")})
    actor = ray.remote(num_cpus=0)(MadeUpEngine)
    actors, spares = [actor.remote(**arguments) for arguments in engines], list(spare)

    def restore(lost_engines: Mapping[int, str]) -> None:
        for number, reason in lost_engines.items():
            if not spares:
                raise SamplingError(reason)
            actors[number] = actor.remote(**spares.pop(0))

    settings = RolloutsConfig(**config)
    rollouts = RolloutPool(
        settings,
        actors,
        environments,
        generation_timeout_s=generation_timeout_s,
        max_total_sequence_length=MAX_LENGTH,
        restore=restore,
    )
    rollouts.start()
    try:
        rollouts.wait_ready()
        yield rollouts
    finally:
        rollouts.shutdown()
        for worker in environments.values():
            worker.shutdown()


def collect(rollouts: RolloutPool, prompts: Sequence[DatumSpec], timer: StepTimer | None = None) -> list[SampledGroup]:
    return rollouts.collect(prompts, rollouts.make_settings(SAMPLES, SETTINGS, SEED, STEP), timer or StepTimer())


def row_anywhere(trajectory: Trajectory) -> dict[str, Any]:
    """The row of a rollout that any of the engines may have sampled."""
    return {**trajectory.to_row(), "engine": None}


def expected_trajectory(datum: DatumSpec, group: int, sample: int) -> Trajectory:
    """What the made-up engine and the addition environment make of a sample."""
    ids = np.array(datum["message_log"][0]["token_ids"], dtype=np.int32)
    outputs = []
    for number in range(SAMPLES):
        seed = compute_sample_seed(SEED, STEP, datum["idx"], number)
        request = GenerationRequest(prompt_ids=ids, seed=seed, max_new_tokens=MAX_LENGTH - len(ids))
        outputs.append(made_up_response(request, SETTINGS))
    output = outputs[sample]
    usual = np.median([len(output.token_ids) for output in outputs])
    return Trajectory(
        prompt_idx=datum["idx"],
        group=group,
        sample=sample,
        token_ids=np.concatenate([ids, output.token_ids]),
        spans=[Span(len(ids), len(ids) + len(output.token_ids), VERSION)],
        logprobs=output.logprobs,
        response=output.text,
        stop_reason=output.stop_reason,
        reward=float(sample == 1),
        reward_metrics={"suspect/unusually_short": float(sample == 1 and len(output.token_ids) < usual / 4)},
        correct=sample == 1,
        task_name="task",
    )


VERSION = 3


def made_up_response(request: GenerationRequest, settings: SamplingSettings) -> GenerationOutput:
    """Tokens and log-probabilities drawn with the request's seed; the text is the seed."""
    generator = np.random.default_rng(request.seed)
    limit = min(request.max_new_tokens, settings.max_new_tokens)
    length = int(generator.integers(1, limit + 1))
    return GenerationOutput(
        token_ids=generator.integers(0, 1000, length).astype(np.int32),
        logprobs=-generator.random(length).astype(np.float32),
        text=str(request.seed),
        stop_reason="length" if length == limit else "stop",
        spans=[Span(0, length, VERSION)],
    )


class MadeUpEngine:
    """Yields `chunk` responses at a time, the last requests first.

    Args:
        chunk: responses of one yield.
        stuck: seeds whose requests are never answered, each as often as it is in here.
        refused: seeds whose requests are given up, each as often as it is in here.
        dies_after: yields after which the process ends; None: it does not.
    """

    def __init__(
        self, chunk: int = 5, stuck: Sequence[int] = (), refused: Sequence[int] = (), dies_after: int | None = None
    ) -> None:
        self.chunk, self.stuck, self.refused, self.dies_after = chunk, list(stuck), list(refused), dies_after
        self.calls: list[list[int]] = []
        self.aborted: list[tuple[str, int]] = []
        self._yields = 0

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str
    ) -> AsyncIterator[Any]:
        """As `VllmEngine.generate`."""
        self.calls.append([request.seed for request in requests])
        answers: list[tuple[int, GenerationOutput | str]] = []
        stuck = 0
        for index, request in reversed(list(enumerate(requests))):
            if request.seed in self.stuck:
                self.stuck.remove(request.seed)
                stuck += 1
            elif request.seed in self.refused:
                self.refused.remove(request.seed)
                answers.append((index, "refused by the engine"))
            else:
                answers.append((index, made_up_response(request, settings)))
        for begin in range(0, len(answers), self.chunk):
            if self._yields == self.dies_after:
                os._exit(1)
            self._yields += 1
            yield wrap_for_pickling(answers[begin : begin + self.chunk])
            await asyncio.sleep(0)
        if stuck:
            await asyncio.sleep(600)

    def take_counts(self) -> EngineCounts:
        """As `VllmEngine.take_counts`, of the calls."""
        calls, self.calls = self.calls, []
        return EngineCounts(running=max(map(len, calls), default=0))

    async def abort(self, call: str, indices: list[int]) -> None:
        """As `VllmEngine.abort`, but that nothing ends."""
        self.aborted += [(call, index) for index in indices]

    def break_over(self, stuck: Sequence[int] = (), refused: Sequence[int] = ()) -> None:
        """Fail over more seeds."""
        self.stuck += stuck
        self.refused += refused

    async def history(self) -> tuple[list[list[int]], list[tuple[str, int]]]:
        """Seeds of every call, and what was aborted."""
        return self.calls, self.aborted
