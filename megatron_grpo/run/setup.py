"""Everything a run needs, brought up side by side where it can be and taken down in one place."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from megatron_grpo.config.schema import Config
from megatron_grpo.data.load_prompts import PromptData, load_prompt_data
from megatron_grpo.data.loader import Batches
from megatron_grpo.data.responses import SamplingSettings, sampling_settings
from megatron_grpo.data.trajectory import Trajectory
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.losses.policy_loss import ClippedPGLossFn
from megatron_grpo.losses.value_loss import MseValueLossFn
from megatron_grpo.models.source import is_prepared, model_folder
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.observability.timers import StepTimer
from megatron_grpo.policy.driver.policy import MegatronPolicy
from megatron_grpo.policy.driver.value import MegatronValue
from megatron_grpo.prepare.by_name import prepare
from megatron_grpo.rollouts.ahead import SamplingAhead
from megatron_grpo.rollouts.coming_steps import ComingSteps
from megatron_grpo.rollouts.oversampling import Oversampling
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.run.callbacks import Callbacks
from megatron_grpo.run.checkpointer import Checkpointer
from megatron_grpo.run.context import GRPORun, PPORun
from megatron_grpo.run.directory import POLICY_FOLDER, VALUE_FOLDER, record_start
from megatron_grpo.run.dumps import RolloutDumps
from megatron_grpo.run.non_finite import FiniteGuard
from megatron_grpo.run.opening import Opening, opened
from megatron_grpo.run.placement import Colocated, Placement
from megatron_grpo.run.processes import start_processes
from megatron_grpo.run.sample_source import SampleSource
from megatron_grpo.run.save_state import GRPOSaveState, default_grpo_save_state
from megatron_grpo.run.startup_parts import StartupParts, since_command


@contextmanager
def setup(config: Config, opening: Opening | None = None) -> Iterator[GRPORun]:
    """Bring up a run, continuing the one in config.run_dir if there is one; on leaving, every process is ended.

    Args:
        config: the run's configuration, checked.
        opening: the run's beginning if it was made already, by `opened`, which then ends Ray as well.

    Raises:
        ConfigError: the run cannot start from where it is told to.
        RunError: something did not come up; the message says what.
    """
    with ExitStack() as stack:
        opening = opening or stack.enter_context(opened(config))
        run = _bring_up(config, opening, stack)
        opening.known.write = run.logger.write_summary
        record_start(opening.run_dir, config)  # not before: a start that failed on a mistake leaves nobody's folder
        gc.freeze()  # nothing made so far is garbage; looking through all of it takes a third of a second each time
        stack.callback(gc.unfreeze)
        run.logger.started(startup_s=since_command(), parts=opening.parts.seconds, changes=opening.changes)
        yield run


def _bring_up(config: Config, opening: Opening, stack: ExitStack) -> GRPORun:
    """Start everything, load the checkpoint to start from, and give generation its first weights."""
    folder = _model(config, opening.parts)
    processes = start_processes(config, folder, opening, stack)
    with opening.parts.part("prompts"):
        data = load_prompt_data(config, folder, opening.given.tokenizer)
    processes.wait_ready(opening.parts)
    start_from = _start_from(opening)
    policy, value, rollouts = processes.policy, processes.value, processes.rollouts
    state, waiting = _resume(start_from, config, policy, value, data.loader)
    placement = _placement(config, policy, value, processes.generation)
    with opening.parts.part("refit"), placement.refit(StepTimer()):
        processes.transport.publish(state["total_steps"])
    logger = RunLogger(opening.run_dir, config, resume_step=None if start_from is None else state["total_steps"])
    stack.callback(logger.close)
    for note in data.notes:
        logger.note(note)
    callbacks = Callbacks(opening.given.callbacks)
    opening.checkpointer.on_publish = callbacks.on_checkpoint
    guard = FiniteGuard(opening.run_dir, rollouts.fetch)
    run = GRPORun(
        config=config,
        policy=policy,
        transport=processes.transport,
        placement=placement,
        rollouts=rollouts,
        samples=_samples(config, rollouts, data, guard, state, waiting),
        dumps=RolloutDumps(rollouts, config.logger, opening.run_dir),
        guard=guard,
        loader=data.loader,
        val_prompts=data.val_prompts,
        loss_fn=ClippedPGLossFn(config.loss_fn),
        logger=logger,
        checkpointer=opening.checkpointer,
        state=state,
        callbacks=callbacks,
    )
    if value is None:
        return run
    return PPORun(**vars(run), value=value, value_loss_fn=MseValueLossFn(config.value_loss_fn))


def _model(config: Config, parts: StartupParts) -> Path:
    """Folder of the model to start from, which is made first if the recipe makes its own."""
    if is_prepared(config):
        with parts.part("prepare"):
            assert config.prepare.name is not None
            prepare(config.prepare.name, config.prepare.folder)
    return model_folder(config.policy.model.path)


def _start_from(opening: Opening) -> Path | None:
    """The checkpoint to start from, once it is verified; None: there is none."""
    if not opening.start_from.done():
        print(
            "waiting until all files of the checkpoint to start from are read and verified", file=sys.stderr, flush=True
        )
    start_from = opening.start_from.result()
    opening.checkpointer.remove_leftovers()
    return start_from


def _resume(
    path: Path | None, config: Config, policy: MegatronPolicy, value: MegatronValue | None, loader: Batches
) -> tuple[GRPOSaveState, list[list[Trajectory]]]:
    """The run's progress and dynamic sampling's cache; models and loader continue where the checkpoint left them."""
    if path is None:
        return default_grpo_save_state(), []
    state, loader_state = Checkpointer.load(path)
    loader.load_state_dict(loader_state)
    policy.load_checkpoint(str(path / POLICY_FOLDER))
    if value is not None:
        value.load_checkpoint(str(path / VALUE_FOLDER))
    groups = [[Trajectory.from_row(row) for row in group] for group in state["batch_cache"]]
    # Those of another size cannot be trained on beside the groups of this run.
    waiting = [group for group in groups if len(group) == config.loop.num_generations_per_prompt]
    return state["save_state"], waiting if config.loop.use_dynamic_sampling else []


def _placement(
    config: Config, policy: MegatronPolicy, value: MegatronValue | None, generation: VllmGeneration
) -> Placement:
    """Who has the devices when, from before the first refit on."""
    if not config.generation.colocated:
        return Placement()
    return Colocated(generation, policy, [] if value is None else [value])


def _samples(
    config: Config,
    rollouts: RolloutPool,
    data: PromptData,
    guard: FiniteGuard,
    state: GRPOSaveState,
    waiting: list[list[Trajectory]],
) -> SampleSource:
    """Where the samples of the steps come from, from here on."""
    settings = sampling_settings(config.generation, data.eos_token_id)
    return SampleSource(
        config=config,
        rollouts=rollouts,
        settings=settings,
        guard=guard,
        state=state,
        waiting=rollouts.put(waiting),
        ahead=_ahead(config, rollouts, settings, data.loader, state),
    )


def _ahead(
    config: Config, rollouts: RolloutPool, settings: SamplingSettings, loader: Batches, state: GRPOSaveState
) -> SamplingAhead | Oversampling | None:
    """What samples while steps train, after the prompts that steps have taken; None: nothing does."""
    loop = config.loop
    if not loop.async_grpo.enabled:
        return None
    kind = SamplingAhead if loop.async_grpo.oversampling_factor is None else Oversampling
    coming = ComingSteps(
        samples_per_prompt=loop.num_generations_per_prompt,
        settings=settings,
        run_seed=loop.seed,
        begun=state["generation_batches"],
        max_num_steps=loop.max_num_steps,
    )
    return kind(rollouts, loader, loop.async_grpo, coming)
