"""Rollout workers with real environments over made-up engines, which fail when they are told to."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import ray

from megatron_grpo.batch.generation_requests import GenerationRequest, SamplingSettings
from megatron_grpo.batch.trajectory import SampledGroup, Span, Trajectory
from megatron_grpo.config.errors import SamplingError
from megatron_grpo.config.schema import EnvironmentConfig, RolloutsConfig
from megatron_grpo.data.processors import REFERENCE, DatumSpec
from megatron_grpo.data.row_text import describe_row
from megatron_grpo.environments.environment_processes import build_environments
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.rollouts.rollout import compute_sample_seed
from tests.support.made_up_engine import VERSION, MadeUpEngine, made_up_response

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
    generation_timeout_s: float = 300.0,
    spare: Sequence[Mapping[str, Any]] = (),
    **config: Any,
) -> Iterator[RolloutPool]:
    """Rollout workers over one made-up engine for each entry of `engines`, which are its arguments.

    Engines that are lost are replaced by those of `spare`, the arguments of which are used up from the front.
    """
    environments = build_environments(tasks or {"task": EnvironmentConfig(type="addition")})
    actor = ray.remote(num_cpus=0)(MadeUpEngine)
    actors = {number: actor.remote(**arguments) for number, arguments in enumerate(engines)}
    spares = list(spare)

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
        **describe_row(datum),
    )
