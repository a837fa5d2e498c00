"""Steps that data_plane.py measures: real steps of GRPO between made-up ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import ray
import torch
from data_plane_parts import MadeUpPrompts, Sizes, made_up, measure_parts, run_side, start_ray

from megatron_grpo.algorithms.context import GRPORun, make_save_state
from megatron_grpo.algorithms.grpo import grpo_step
from megatron_grpo.algorithms.loop import train_steps
from megatron_grpo.algorithms.placement import Placement
from megatron_grpo.algorithms.records import RolloutDumps, describe_run
from megatron_grpo.algorithms.step_report import StepReport
from megatron_grpo.batch.generation_requests import EngineCounts, GenerationOutput, GenerationRequest, SamplingSettings
from megatron_grpo.batch.token_batch import TokenBatch, TokenFields
from megatron_grpo.batch.trajectory import Span
from megatron_grpo.cluster.actor_processes import ActorProcesses
from megatron_grpo.cluster.process_log import driver_log
from megatron_grpo.config.schema import Config
from megatron_grpo.data.loader import PromptLoader, Prompts, PromptSampler
from megatron_grpo.data.processors import DatumSpec
from megatron_grpo.environments.environment_processes import build_environments
from megatron_grpo.losses.loss import GlobalCounts, LossFunction
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.models.families.reading import read_model_shape
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.run.checkpoints import Checkpointer
from megatron_grpo.trainer.actor import RankActor
from megatron_grpo.trainer.messages import RankReport, RankSettings, RankTrainResult
from megatron_grpo.trainer.model_ranks import MegatronPolicy
from megatron_grpo.weight_sync.transfer_modes import TransferReport
from megatron_grpo.weight_sync.transport import WeightTransport

TOGETHER = 16
"""Responses that an engine hands over in one message: as many as end within its pace."""


class MadeUpEngine:
    """Ray actor in the place of `VllmEngine`."""

    async def generate(
        self, requests: list[GenerationRequest], settings: SamplingSettings, call: str
    ) -> AsyncIterator[list[tuple[int, GenerationOutput]]]:
        """Made-up responses, some at a time, in the place of `VllmEngine.generate`."""
        for begin in range(0, len(requests), TOGETHER):
            yield [
                (begin + index, _output(request)) for index, request in enumerate(requests[begin : begin + TOGETHER])
            ]
            await asyncio.sleep(0)

    async def abort(self, call: str, indices: list[int]) -> None:
        """Nothing to abort, in the place of `VllmEngine.abort`."""

    def take_counts(self) -> EngineCounts:
        """Nothing was counted, in the place of `VllmEngine.take_counts`."""
        return EngineCounts()


def _output(request: GenerationRequest) -> GenerationOutput:
    response = made_up(request.seed, request.max_new_tokens)
    return GenerationOutput(
        token_ids=response.token_ids,
        logprobs=response.logprobs,
        text=response.text,
        stop_reason="length" if response.stop_reason == "length" else "stop",
        spans=[Span(0, len(response.token_ids), 0)],
    )


class IdleModel:
    """Stands in for a `ModelRank` on the last pipeline stage; computes nothing."""

    is_output_rank = True
    settings = SimpleNamespace(token_filter=None)

    @property
    def outputs(self) -> dict[str, Any]:
        """The log-probabilities, as `ModelRank.outputs` names them."""
        return {"prev_logprobs": lambda model, batch, microbatches: torch.zeros(sum(batch.lengths))}

    def list_needed_fields(self, loss_fn: LossFunction | None) -> tuple[str, ...]:
        """Names of the stored entries that a last pipeline stage uses, as `ModelRank.list_needed_fields` gives them."""
        return ("token_ids", "sampled") if loss_fn is None else ("token_ids", *loss_fn.field_names)

    def train(
        self,
        batch: TokenBatch,
        microbatches: list[list[int]],
        loss_fn: LossFunction,
        counts: GlobalCounts,
        limit: float | None = None,
    ) -> RankTrainResult:
        """The metrics of one token for every microbatch."""
        unit = torch.ones(1, 1)
        entries = {name: unit for name in batch.fields.as_dict() if name not in ("token_ids", "sampled")}
        unit_counts = GlobalCounts(tokens=1.0, sequences=1.0, all_sequences=1.0)
        _, metrics = loss_fn(unit.clone().requires_grad_(), TokenFields(**entries), unit_counts)
        of_one = {name: float(value) for name, value in metrics.items()}
        return RankTrainResult(grad_norm=1.0, learning_rate=1e-6, metrics=[dict(of_one) for _ in microbatches])


class IdleRank(RankActor):
    """A rank without Megatron-Core: it fetches and returns what a real one does."""

    def start(self, settings: RankSettings, store_address: tuple[str, int]) -> RankReport:
        """Every rank is a replica."""
        torch.set_num_threads(1)
        self.model = cast(Any, IdleModel())
        return RankReport(data_rank=self.rank, device_name="cpu", startup_s={}, processes=ActorProcesses("here", ()))


class IdleTransport(WeightTransport):
    """Sends nothing."""

    def __init__(self) -> None:
        pass

    def connect(self) -> None:
        """Nothing to connect, in the place of `WeightTransport.connect`."""

    def publish(self, version: int) -> TransferReport:
        """The report of a transfer of 0 bytes, in the place of `WeightTransport.publish`."""
        return TransferReport(version, bytes_sent=0, tensors=0, buckets=0, seconds=0.0)

    def admit(self, report: TransferReport) -> TransferReport:
        """The report as it is, in the place of `WeightTransport.admit`: no engine has to be checked."""
        return report

    def require_checks(self) -> None:
        """Nothing, in the place of `WeightTransport.require_checks`: no engine computes anything."""


def measure(sizes: Sizes, folder: Path) -> Any:
    """Figures of steps of these sizes."""
    config = compose_config(sizes.overrides(folder))
    with ExitStack() as stack:
        stack.enter_context(driver_log(Path(config.run_dir), config.logger.level))
        start_ray()
        stack.callback(ray.shutdown)
        run = _bring_up(config, sizes, stack)
        return measure_parts(sizes, lambda mark: _train(run, mark))


def _train(run: GRPORun, mark: Callable[[], None]) -> list[tuple[dict[str, float], float]]:
    reports = []

    def step(run: GRPORun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
        mark()
        report = grpo_step(run, batches)
        assert report is not None
        reports.append((report.timing, report.metrics["response_length"]))
        return report

    train_steps(run, step)
    return reports


def _bring_up(config: Config, sizes: Sizes, stack: ExitStack) -> GRPORun:
    """Bring up a run like `run.setup`, but for the two ends, which are made up."""
    run_dir = Path(config.run_dir)
    policy, rollouts = _policy(config, stack), _rollouts(config, stack)
    policy.wait_ready()
    rollouts.wait_ready()
    logger = RunLogger(run_dir, config)
    stack.callback(logger.close)
    return GRPORun(
        config=config,
        run_dir=run_dir,
        policy=policy,
        transport=IdleTransport(),
        placement=Placement(),
        rollouts=rollouts,
        settings=SamplingSettings(max_new_tokens=config.generation.max_new_tokens),
        dumps=RolloutDumps(rollouts, config.logger, run_dir, describe_run(config, Path(config.policy.model.path))),
        loader=PromptLoader(
            cast(Prompts, MadeUpPrompts(sizes)),
            prompts_per_batch=sizes.prompts,
            order=PromptSampler([len(MadeUpPrompts(sizes))], [1.0], shuffle=True, seed=0),
        ),
        val_prompts=[],
        loss_fn=ClippedPGLossFn(config.loss_fn),
        logger=logger,
        checkpointer=Checkpointer(run_dir, config.checkpointing),
        state=make_save_state(),
        batch_cache=[],
    )


def _policy(config: Config, stack: ExitStack) -> MegatronPolicy:
    """A policy of idle ranks, which begin to start."""
    settings = RankSettings(
        config=config.policy,
        shape=read_model_shape(config.policy.model.path),
        folder=config.policy.model.path,
        temperature=config.generation.temperature,
        decay_steps=config.decay_steps,
        seed=config.loop.seed,
    )
    with patch("megatron_grpo.trainer.model_ranks.RankActor", IdleRank):
        policy = MegatronPolicy(settings, lambda rank: {"num_cpus": 0}, config.cluster.startup_timeout_s)
    stack.callback(policy.shutdown)
    policy.start()
    return policy


def _rollouts(config: Config, stack: ExitStack) -> RolloutPool:
    """Rollout workers before made-up engines, which begin to start."""
    environments = build_environments(config.env)
    for environment in environments.values():
        stack.callback(environment.shutdown)
    engine = ray.remote(num_cpus=0)(MadeUpEngine)
    engines = {number: engine.remote() for number in range(config.generation.parallel.data)}
    rollouts = RolloutPool(
        config.rollouts,
        engines,
        environments,
        generation_timeout_s=config.generation.timeout_s,
        max_total_sequence_length=config.policy.max_total_sequence_length,
    )
    stack.callback(rollouts.shutdown)
    rollouts.start()
    return rollouts


if __name__ == "__main__":
    run_side(sys.argv[1:], measure)
