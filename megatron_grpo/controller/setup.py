"""Set-up of a run: starts its models, engines and rollout workers in parallel, and ends them in one place."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron_grpo.config.schema import Config
from megatron_grpo.controller.checkpoints import Checkpointer
from megatron_grpo.controller.context import Colocated, GRPORun, Placement, PPORun, SampleSource, SamplingRun
from megatron_grpo.controller.directory import POLICY_FOLDER, VALUE_FOLDER, record_start
from megatron_grpo.controller.failures import FiniteGuard
from megatron_grpo.controller.lifetime import Startup, StartupParts, since_command, started
from megatron_grpo.controller.oversampling import Oversampling
from megatron_grpo.controller.recordings import RecordedSteps, RolloutDumps, run_facts
from megatron_grpo.controller.sample_buffer import SampleBuffer
from megatron_grpo.controller.save_state import GRPOSaveState, default_grpo_save_state
from megatron_grpo.controller.startup import (
    Models,
    make_transport,
    restore_from_folder,
    start_engines,
    start_models,
    start_recording_workers,
    start_rollouts,
)
from megatron_grpo.controller.user_objects import Callbacks
from megatron_grpo.data.load_prompts import PromptData, load_prompt_data
from megatron_grpo.data.loader import Batches
from megatron_grpo.data.responses import SamplingSettings, sampling_settings
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.value import MseValueLossFn
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.prepare.models import prepare
from megatron_grpo.sampler.pool import RolloutPool
from megatron_grpo.weights.refit.transport import WeightTransport
from megatron_grpo.weights.source import is_prepared, model_folder


@contextmanager
def setup(config: Config, startup: Startup | None = None) -> Iterator[GRPORun]:
    """Bring up a run, continuing the one in config.run_dir if there is one; on leaving, every process is ended.

    Args:
        config: the run's configuration, checked.
        startup: the start-up of `lifetime.started`, which then ends Ray as well; None: this function starts Ray.

    Raises:
        ConfigError: the run cannot start from where it is told to.
        RunError: something did not come up; the message says what.
    """
    with ExitStack() as stack:
        startup = startup or stack.enter_context(started(config))
        run = _bring_up(config, startup, stack)
        _complete_startup(run, startup, stack)
        yield run


@contextmanager
def setup_sampling(config: Config, startup: Startup | None = None) -> Iterator[SamplingRun]:
    """As `setup`, of a run that samples with the weights of the model folder and trains nothing."""
    with ExitStack() as stack:
        startup = startup or stack.enter_context(started(config))
        run = _bring_up_sampling(config, startup, stack)
        _complete_startup(run, startup, stack)
        yield run


def _complete_startup(run: SamplingRun, startup: Startup, stack: ExitStack) -> None:
    """Record a start in the run's folder, now that nothing of it can fail on a mistake."""
    startup.write_summary = run.logger.write_summary
    record_start(startup.run_dir, run.config)
    # Everything made so far stays until the end, and scanning it takes the collector a third of a second each time.
    gc.freeze()
    stack.callback(gc.unfreeze)
    run.logger.started(startup_s=since_command(), parts=startup.parts.seconds, changes=startup.changes)


def _bring_up(config: Config, startup: Startup, stack: ExitStack) -> GRPORun:
    """Start all processes, load the checkpoint to start from, and publish the first weights to the engines."""
    parts, folder = startup.parts, _model(config, startup.parts)
    models = start_models(config, folder, startup.cluster, stack)
    transport: WeightTransport | None = None
    if models.generation is None:
        rollouts = start_recording_workers(config, stack)
    else:
        transport = make_transport(models.policy, models.generation, config.refit, startup.run_dir)
        stack.callback(transport.close)
        rollouts = start_rollouts(
            config, folder, models.generation, stack, rewards=startup.user_objects.rewards, restore=transport.restore
        )
    data = _prompts(config, folder, startup)
    _wait_ready(parts, rollouts, models)
    if transport is not None:
        with parts.part("refit"):
            transport.connect()
    start_from = _checkpoint(startup)
    progress = _resume(start_from, config, models, data.loader)
    placement = _placement(config, models)
    if transport is not None:
        with parts.part("refit"), placement.refit(StepTimer()):
            transport.publish(progress.state["total_steps"])
    sampling = _sampling_run(config, startup, folder, rollouts, placement, data, progress, stack)
    loss_fn = ClippedPGLossFn(config.loss_fn)
    run = GRPORun(**vars(sampling), policy=models.policy, transport=transport, loss_fn=loss_fn)
    if models.value is None:
        return run
    return PPORun(**vars(run), value=models.value, value_loss_fn=MseValueLossFn(config.value_loss_fn))


def _bring_up_sampling(config: Config, startup: Startup, stack: ExitStack) -> SamplingRun:
    """Start engines with the weights of the model folder, and the rollout workers and environments."""
    folder = _model(config, startup.parts)
    generation = start_engines(config, folder, startup.cluster, stack)
    restore = restore_from_folder(generation)
    rollouts = start_rollouts(config, folder, generation, stack, rewards=startup.user_objects.rewards, restore=restore)
    data = _prompts(config, folder, startup)
    with startup.parts.part("waiting"):
        generation.wait_ready()
        rollouts.wait_ready()
    startup.parts.add_slowest("engine", generation.startup_s)
    progress = _Progress(None, default_grpo_save_state(), [])
    return _sampling_run(config, startup, folder, rollouts, Placement(), data, progress, stack)


@dataclass(frozen=True, slots=True)
class _Progress:
    """Progress of a run when it starts."""

    resumed_from: Path | None
    """The checkpoint with this progress; None: the run begins."""
    state: GRPOSaveState
    waiting: list[list[Trajectory]]
    """Groups that dynamic sampling keeps."""


def _model(config: Config, parts: StartupParts) -> Path:
    """The model's folder, which is prepared first if the recipe says so."""
    if is_prepared(config):
        with parts.part("prepare"):
            assert config.prepare.name is not None
            prepare(config.prepare.name, config.prepare.folder)
    return model_folder(config.policy.model.path)


def _prompts(config: Config, folder: Path, startup: Startup) -> PromptData:
    """The prompts of the run, or a recording that replaces them."""
    with startup.parts.part("prompts"):
        if config.debug.rollouts_from is None:
            return load_prompt_data(config, folder, startup.user_objects.tokenizer)
        recorded = RecordedSteps(config.debug.rollouts_from, config.prompts_per_generation_batch)
        return PromptData(loader=recorded, val_prompts=[], eos_token_id=None, notes=[])


def _wait_ready(parts: StartupParts, rollouts: RolloutPool, models: Models) -> None:
    with parts.part("waiting"):
        for part in (models.policy, models.value, models.generation, rollouts):
            if part is not None:
                part.wait_ready()
    for kind, model in (("policy", models.policy), ("value", models.value), ("engine", models.generation)):
        if model is not None:
            parts.add_slowest(kind, model.startup_s)


def _checkpoint(startup: Startup) -> Path | None:
    """Wait for the verified checkpoint to start from, then remove leftovers of interrupted writes."""
    if not startup.start_from.done():
        print(
            "waiting until all files of the checkpoint to start from are read and verified", file=sys.stderr, flush=True
        )
    start_from = startup.start_from.result()
    startup.checkpointer.remove_leftovers()
    return start_from


def _sampling_run(
    config: Config,
    startup: Startup,
    folder: Path,
    rollouts: RolloutPool,
    placement: Placement,
    data: PromptData,
    progress: _Progress,
    stack: ExitStack,
) -> SamplingRun:
    """The parts that all runs have, made of the started processes."""
    state, settings = progress.state, sampling_settings(config.generation, data.eos_token_id)
    logger = RunLogger(
        startup.run_dir, config, resume_step=None if progress.resumed_from is None else state["total_steps"]
    )
    stack.callback(logger.close)
    for note in data.notes:
        logger.note(note)
    guard = FiniteGuard(startup.run_dir, rollouts.tokens.fetch)
    callbacks = Callbacks(startup.user_objects.callbacks)
    startup.checkpointer.on_publish = callbacks.on_checkpoint
    return SamplingRun(
        config=config,
        placement=placement,
        rollouts=rollouts,
        samples=SampleSource(
            config=config,
            rollouts=rollouts,
            settings=settings,
            guard=guard,
            state=state,
            waiting=rollouts.tokens.put(progress.waiting),
            buffer=_buffer(config, rollouts, settings, data.loader, state),
            recorded=data.loader if isinstance(data.loader, RecordedSteps) else None,
        ),
        dumps=RolloutDumps(rollouts, config.logger, startup.run_dir, run_facts(config, folder)),
        guard=guard,
        loader=data.loader,
        val_prompts=data.val_prompts,
        logger=logger,
        checkpointer=startup.checkpointer,
        state=state,
        callbacks=callbacks,
    )


def _resume(path: Path | None, config: Config, models: Models, loader: Batches) -> _Progress:
    """The run's progress and dynamic sampling's cache; models and loader continue where the checkpoint left them."""
    if path is None:
        progress = _Progress(None, default_grpo_save_state(), [])
    else:
        state, loader_state = Checkpointer.load(path)
        loader.load_state_dict(loader_state)
        models.policy.load_checkpoint(str(path / POLICY_FOLDER))
        if models.value is not None:
            models.value.load_checkpoint(str(path / VALUE_FOLDER))
        groups = [[Trajectory.from_row(row) for row in group] for group in state["batch_cache"]]
        # Those of another size cannot be trained on beside the groups of this run.
        waiting = [group for group in groups if len(group) == config.loop.num_generations_per_prompt]
        progress = _Progress(path, state["save_state"], waiting if config.loop.use_dynamic_sampling else [])
    if isinstance(loader, RecordedSteps):
        loader.require_reach(progress.state["total_steps"] + 1)
    return progress


def _placement(config: Config, models: Models) -> Placement:
    """Who has the devices when, from before the first refit on."""
    if models.generation is None or not config.generation.colocated:
        return Placement()
    return Colocated(models.generation, models.policy, [] if models.value is None else [models.value])


def _buffer(
    config: Config, rollouts: RolloutPool, settings: SamplingSettings, loader: Batches, state: GRPOSaveState
) -> SampleBuffer | Oversampling | None:
    """The buffer of asynchronous sampling, after the prompts that steps have taken; None: sampling is synchronous."""
    loop = config.loop
    if not loop.async_grpo.enabled:
        return None
    kind = SampleBuffer if loop.async_grpo.oversampling_factor is None else Oversampling
    return kind(rollouts, loader, loop, settings, state["generation_batches"])
