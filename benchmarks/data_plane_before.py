"""The side of data_plane.py that is the code of another revision, as it was at 19e7a4f: its driver holds every token.

It runs with that revision's packages: checkers, which see those of today, do not know the names that it imports.
"""
# mypy: ignore-errors

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ray
import torch
from data_plane_parts import MadeUpPrompts, Sizes, made_up, measured, run_side, start_ray

# Names of that revision: they stay when those of today move.
from megatron_grpo.algorithms.checkpointer import Checkpointer
from megatron_grpo.algorithms.grpo import grpo_step
from megatron_grpo.algorithms.loss_functions import ClippedPGLossFn
from megatron_grpo.algorithms.run import GRPORun
from megatron_grpo.algorithms.save_state import make_save_state
from megatron_grpo.algorithms.train_loop import train_steps
from megatron_grpo.config.compose import compose_config
from megatron_grpo.config.model_shape import ModelShape
from megatron_grpo.data.loader import PromptLoader
from megatron_grpo.environments.registry import build_environments
from megatron_grpo.generation import engine_group as vllm_generation
from megatron_grpo.generation.engine_arguments import GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.policy.megatron_policy import MegatronPolicy, PolicySettings
from megatron_grpo.policy.worker import ModelWorker, RankPlace
from megatron_grpo.rollouts.collector import RolloutCollector
from megatron_grpo.trainer import workers
from megatron_grpo.trainer.group import GlobalCounts, StepShare
from megatron_grpo.weight_sync.transport import TransferReport, WeightTransport


class MadeUpEngine:
    """Ray actor in the place of `VllmEngine`."""

    def __init__(self, settings: Any) -> None: ...

    def start(self) -> None:
        """Nothing to start, in the place of `VllmEngine.start`."""

    def shutdown(self) -> None:
        """Nothing to end, in the place of `VllmEngine.shutdown`."""

    def generate(self, requests: list[GenerationRequest], settings: SamplingSettings) -> list[GenerationOutput]:
        """Made-up responses to all requests, in the place of `VllmEngine.generate`."""
        return [_output(request) for request in requests]


def _output(request: GenerationRequest) -> GenerationOutput:
    response = made_up(request.seed, request.max_new_tokens)
    return GenerationOutput(
        token_ids=response.token_ids.tolist(),
        logprobs=response.logprobs.tolist(),
        text=response.text,
        stop_reason=response.stop_reason,
        version=0,
    )


class IdleModel:
    """Stands in for a `PolicyEngine` on the last pipeline stage; computes nothing."""

    def logprobs(self, batch: Any, microbatches: list[list[int]]) -> torch.Tensor:
        """[tokens of the batch], float32: zeros."""
        return torch.zeros(sum(batch.lengths))

    def train(self, batch: Any, microbatches: list[list[int]], loss_fn: Any, counts: GlobalCounts) -> StepShare:
        """The metrics of one token for every microbatch."""
        ones = torch.ones(1, 1)
        one = GlobalCounts(tokens=1.0, sequences=1.0, all_sequences=1.0)
        _, metrics = loss_fn(ones.clone().requires_grad_(), dict.fromkeys(batch.tokens, ones), one)
        of_one = {name: float(value) for name, value in metrics.items()}
        return StepShare(grad_norm=1.0, learning_rate=1e-6, metrics=[dict(of_one) for _ in microbatches])


class IdleRank(ModelWorker):
    """A rank without Megatron-Core: it takes and returns what a real one does."""

    def start(self, settings: Any, store_address: tuple[str, int]) -> RankPlace:
        """Every rank is a replica."""
        torch.set_num_threads(1)
        self.engine = IdleModel()
        return RankPlace(data=self.rank, is_reporter=True, device_name="cpu")


class IdleTransport(WeightTransport):
    """Sends nothing."""

    def __init__(self) -> None:
        pass

    def connect(self) -> None:
        """Nothing to connect, in the place of `WeightTransport.connect`."""

    def publish(self, version: int) -> TransferReport:
        """The report of a transfer of 0 bytes, in the place of `WeightTransport.publish`."""
        return TransferReport(version, bytes_sent=0, tensors=0, buckets=0, seconds=0.0)

    def _connect(self, engines: tuple[int, ...]) -> None:
        raise NotImplementedError

    def _attempt(self, version: int, engines: tuple[int, ...]) -> TransferReport:
        raise NotImplementedError


def measure(sizes: Sizes, folder: Path) -> Any:
    """Figures of steps of these sizes."""
    config = compose_config(sizes.overrides(folder))
    with ExitStack() as stack:
        start_ray()
        stack.callback(ray.shutdown)
        run = _bring_up(config, sizes, stack)
        return measured(sizes, lambda mark: _train(run, mark))


def _train(run: GRPORun, mark: Callable[[], None]) -> list[tuple[dict[str, float], float]]:
    reports = []

    def step(batches: Any) -> Any:
        mark()
        report = grpo_step(run, batches)
        reports.append((report.timing, report.metrics["response_length"]))
        return report

    train_steps(run, step)
    return reports


def _bring_up(config: Any, sizes: Sizes, stack: ExitStack) -> GRPORun:
    """Bring up a run like the revision's `setup`, but for the two ends, which are made up."""
    run_dir, longest = Path(config.run_dir), config.policy.max_total_sequence_length
    settings = PolicySettings(
        config=config.policy,
        shape=ModelShape.from_folder(config.policy.model.path),
        folder=config.policy.model.path,
        reference=None,
        temperature=config.generation.temperature,
        decay_steps=config.decay_steps,
        seed=config.loop.seed,
    )
    with patch.object(workers, "ModelWorker", IdleRank):
        policy = MegatronPolicy(settings, lambda rank: {"num_cpus": 0}, config.cluster.startup_timeout_s)
    stack.callback(policy.shutdown)
    policy.start()
    generation = vllm_generation.VllmGeneration(
        config.policy.model.path,
        config.generation,
        precision=config.policy.precision,
        max_total_sequence_length=longest,
        actor_options=lambda engine: {"num_cpus": 0},
        startup_timeout_s=config.cluster.startup_timeout_s,
    )
    with patch.object(vllm_generation, "VllmEngine", MadeUpEngine):
        generation.start()
    stack.callback(generation.shutdown)
    environments = build_environments(config.env)
    for environment in environments.values():
        stack.callback(environment.shutdown)
    policy.wait_ready()
    generation.wait_ready()
    logger = RunLogger(run_dir, config)
    stack.callback(logger.close)
    return GRPORun(
        config=config,
        policy=policy,
        transport=IdleTransport(),
        collector=RolloutCollector(generation, environments, longest),
        sampling=SamplingSettings(max_new_tokens=config.generation.max_new_tokens),
        loader=PromptLoader(MadeUpPrompts(sizes), prompts_per_batch=sizes.prompts, shuffle=True, seed=0),
        val_prompts=[],
        loss_fn=ClippedPGLossFn(config.loss_fn),
        logger=logger,
        checkpointer=Checkpointer(run_dir, config.checkpointing),
        state=make_save_state(),
        batch_cache=[],
    )


if __name__ == "__main__":
    run_side(sys.argv[1:], measure)
