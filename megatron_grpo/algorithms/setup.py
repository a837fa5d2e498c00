"""Set-up of a run: its processes, the checkpoint that it continues from, and the first refit."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ray.cloudpickle import register_pickle_by_value

from megatron_grpo.algorithms.context import GRPOSaveState, SamplingRun, TrainingRun, make_save_state
from megatron_grpo.algorithms.elastic import EngineResizer
from megatron_grpo.algorithms.node_reports import check_nodes
from megatron_grpo.algorithms.placement import Placement, publish
from megatron_grpo.algorithms.records import RecordedSteps, RolloutDumps, describe_run
from megatron_grpo.algorithms.sample_buffer import OrderedBuffer, Oversampling
from megatron_grpo.batch.finished_samples import FINISHED_FOLDER
from megatron_grpo.batch.generation_requests import make_sampling_settings
from megatron_grpo.batch.special_tokens import StopConditions
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.cluster.phases import phase
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.cluster.wait_notices import announce_waits
from megatron_grpo.config.algorithms import Algorithm
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.loop_schema import SampledLoopConfig
from megatron_grpo.config.outside_text import describe_error
from megatron_grpo.config.schema import Config
from megatron_grpo.data.load_prompts import PromptData
from megatron_grpo.data.loader import BatchLoader
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.image_processor import require_own_processor
from megatron_grpo.models.source import fetch_model_folder, is_prepared
from megatron_grpo.observability.run_files import write_json
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.observability.timing import StepTimer
from megatron_grpo.preflight.conversation_checks import load_examined_prompts
from megatron_grpo.preflight.engine_checks import explain_fixed_engines
from megatron_grpo.preflight.environment_checks import check_user_code
from megatron_grpo.preflight.script_checks import find_processor_problems
from megatron_grpo.prepare.models import prepare
from megatron_grpo.rollouts.engine_replacer import RestoreEngines, refuse_to_restore
from megatron_grpo.rollouts.pool import RolloutPool
from megatron_grpo.run.checkpoint_files import STATE_FILE, CheckpointError, copy_images, read_loader_state, read_state
from megatron_grpo.run.checkpoints import read_by_ranks
from megatron_grpo.run.directory import ENGINES_FILE, POLICY_FOLDER, VALUE_FOLDER, record_start
from megatron_grpo.run.exports import export_checkpoint_model
from megatron_grpo.run.launch import (
    Models,
    restart_models,
    restore_from_folder,
    start_engines,
    start_models,
    start_rollouts,
)
from megatron_grpo.run.lifetime import Startup, open_run
from megatron_grpo.run.user_objects import Callbacks, UserObjects
from megatron_grpo.weight_sync.refit_checks import Canary
from megatron_grpo.weight_sync.transport import WeightTransport, make_transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Processes:
    """Processes of a run, of which all but the ranks outlive a restart."""

    folder: Path  # of the policy's model
    models: Models | None  # None: the run only samples
    generation: VllmGeneration | None  # None: the rollouts are read from a recording
    transport: WeightTransport | None  # None: there is no refit
    rollouts: RolloutPool
    placement: Placement

    def restart_ranks(self, cluster: RayCluster) -> None:
        """Replace all ranks; the others forget what they did for them.

        Raises ModelLostError if a rank is lost again, and RunError if ranks do not start, or another process fails.
        """
        assert self.models is not None, "without models no rank is lost"
        with announce_waits(), phase("restarting the ranks"):
            self.rollouts.abandon()
            self.placement.sleep_engines(StepTimer(), keep_weights=False)
            restart_models(self.models, cluster)
            if self.transport is not None:
                self.transport.disconnect()
            for model in self.models.by_name.values():
                model.wait_ready()


@contextmanager
def setup(config: Config, startup: Startup | None = None, *, processor: Any = None) -> Iterator[Any]:
    """Start or continue a run; leaving the context ends its processes.

    Yields a run of the algorithm's type (`Algorithm.run`). With debug.train=false it is a SamplingRun without models,
    whose engines have the weights of the model folder. Without a `startup` from `open_run` Ray starts and ends here.
    `processor`: the model's own processor of images and text, whose tokenizer replaces the folder's; None: none.

    Raises ConfigError if the run's folder, the checkpoint to start from, the processor or a reward function cannot be
    used, and RunError if a process did not start; the message says which.
    """
    with ExitStack() as stack:
        if startup is None:
            objects = UserObjects()
            if processor is not None:
                if problems := list(find_processor_problems(processor)):
                    raise ConfigError(problems)
                require_own_processor(processor, fetch_model_folder(config.policy.model.path))
                objects = UserObjects(tokenizer=processor.tokenizer)
            check_user_code(config)
            startup = stack.enter_context(open_run(config, objects))
        processes = stack.enter_context(start_processes(config, startup))
        yield stack.enter_context(begin_run(config, startup, processes))


@contextmanager
def start_processes(config: Config, startup: Startup) -> Iterator[Processes]:
    """Begin to start all processes at the same time; leaving the context ends them."""
    _send_own_modules(config.method)
    if is_prepared(config):
        with startup.part("prepare"):
            assert config.prepare.name is not None
            prepare(config.prepare.name, config.prepare.folder)
    paths = [("policy.model.path", config.policy.model.path), ("value.model.path", config.value.model.path)]
    paths += [
        (f"env.{name}.reward_funcs", path) for name, task in config.env.items() for path in task.reward_model_folders
    ]
    for key, path in paths:
        if path is not None:
            export_checkpoint_model(path, key)
    folder = fetch_model_folder(config.policy.model.path)
    for remark in check_nodes(config, folder, startup.run_dir):
        logger.warning("%s", remark)
    with ExitStack() as stack:
        yield _start_processes(config, folder, startup, stack)


@contextmanager
def begin_run(config: Config, startup: Startup, processes: Processes, *, is_restart: bool = False) -> Iterator[Any]:
    """Load the newest checkpoint, publish its weights, and yield the run.

    `is_restart`: the run had begun and has lost ranks, which are replaced first.
    """
    began, parts = (time.time(), {}) if is_restart else (startup.began, startup.parts)
    with ExitStack() as stack:
        if is_restart:
            processes.restart_ranks(startup.cluster)
        run = _make_run(config, startup, processes, stack, is_restart=is_restart)
        startup.write_summary = run.logger.write_summary
        if not is_restart:
            # Only now the folder records the run as started: every step that can fail on a mistake is done.
            record_start(startup.run_dir, config, startup.user_objects.tokenizer)
            if startup.engine_settings:
                write_json(startup.run_dir / ENGINES_FILE, startup.engine_settings)
        # Objects made so far live until the end; each scan of them would take the garbage collector 0.3 s.
        gc.freeze()
        stack.callback(gc.unfreeze)
        changes = [] if is_restart else startup.changes
        run.logger.log_start(startup_s=time.time() - began, parts=parts, changes=changes)
        yield run


def _send_own_modules(method: Algorithm) -> None:
    """Let other processes get the modules of a user's algorithm as they are here."""
    for path in (method.train, method.run, method.loss):
        module = path.partition(":")[0]
        if module.partition(".")[0] != __name__.partition(".")[0]:
            register_pickle_by_value(import_module(module))


def _make_run(
    config: Config, startup: Startup, processes: Processes, stack: ExitStack, *, is_restart: bool
) -> SamplingRun:
    """Read the prompts, load the checkpoint, publish its weights."""
    models, transport = processes.models, processes.transport
    # Processes take long to start, so all began at once; prompts are read meanwhile. A restart reads them again, since
    # its loader must be as a resumed run's.
    with startup.part("prompts"):
        if config.debug.rollouts_from is None:
            objects = startup.user_objects
            data = load_examined_prompts(config, processes.folder, objects.tokenizer, objects.train_rows)
        else:
            recording = RecordedSteps(config.debug.rollouts_from, config.prompts_per_generation_batch)
            data = PromptData(loader=recording, val_prompts=[], stops=StopConditions(), notes=[])
    if not is_restart:
        _wait_ready(startup, processes)
        if transport is not None:
            with startup.part("refit"):
                transport.connect()
    progress = _Progress() if models is None else _resume(config, startup, models, data.loader, is_restart=is_restart)
    if transport is not None:
        # Version N is the weights after N steps, so a resumed run does not start at 0.
        with startup.part("refit"):
            publish(transport, processes.placement, progress.state["total_steps"], StepTimer())
    sampling = _make_sampling_run(config, startup, processes, data, progress, stack)
    if models is None:
        return sampling
    run_type: type[TrainingRun] = resolve_name(config.method.run)
    return run_type.build(sampling, models, transport, data)


def _start_processes(config: Config, folder: Path, startup: Startup, stack: ExitStack) -> Processes:
    # Without training there are no models, with recorded rollouts no engines, and without either no transport.
    models: Models | None = None
    transport: WeightTransport | None = None
    restore: RestoreEngines = refuse_to_restore
    if config.debug.train:
        models = start_models(config, folder, startup.cluster, stack)
        generation = models.generation
        if generation is not None:
            canary = Canary.from_config(config, models.policy.shape)
            transport = make_transport(models.policy, generation, config.refit, startup.run_dir, canary)
            stack.callback(transport.close)
            restore = transport.restore
    else:
        engines = generation = start_engines(config, folder, startup.cluster, stack)
        restore = partial(restore_from_folder, engines)
    user = startup.user_objects
    rollouts = start_rollouts(
        config, folder, generation, stack, rewards=user.rewards, tokenizer=user.tokenizer, restore=restore
    )
    placement = Placement()
    if models is not None and generation is not None and config.generation.is_colocated:
        in_flight = rollouts if config.async_sampling.can_sample_ahead else None
        placement = Placement(generation, list(models.by_name.values()), in_flight)
    return Processes(folder, models, generation, transport, rollouts, placement)


def _wait_ready(startup: Startup, processes: Processes) -> None:
    models, generation = processes.models, processes.generation
    trained: dict[str, Any] = dict(models.by_name) if models else {}
    handles = trained | ({} if generation is None else {"engine": generation})
    with startup.part("waiting"):
        for handle in (*handles.values(), processes.rollouts):
            handle.wait_ready()
    startup.engine_settings = [] if generation is None else [start.settings for start in generation.starts.values()]
    for kind, handle in handles.items():  # the seconds of the slowest process of each kind
        for name in dict.fromkeys(name for report in handle.startup_s for name in report):
            startup.parts[f"{kind}_{name}"] = max(report.get(name, 0.0) for report in handle.startup_s)


@dataclass(frozen=True, slots=True)
class _Progress:
    state: GRPOSaveState = field(default_factory=make_save_state)
    is_resumed: bool = False
    batch_cache: list[list[Trajectory]] = field(default_factory=list)


def _resume(config: Config, startup: Startup, models: Models, loader: BatchLoader, *, is_restart: bool) -> _Progress:
    """Load the checkpoint to start from, if there is one, into models and loader."""
    checkpointer, progress = startup.checkpointer, _Progress()
    by_folder = {POLICY_FOLDER: models.policy} | ({} if models.value is None else {VALUE_FOLDER: models.value})
    path: Path | None = None
    if is_restart or startup.start_from.result() is not None:
        # Only now can ranks read what they will load; in damaged checkpoints they find what the driver did not.
        path = checkpointer.find_start(read_contents=read_by_ranks(by_folder), is_restart=is_restart)
    checkpointer.pending = None  # of lost ranks; its folder is a leftover
    checkpointer.remove_leftovers()
    if path is not None:
        progress = _read_progress(config, path)
        waiting = [rollout for group in progress.batch_cache for rollout in group]
        copy_images([image.digest for rollout in waiting for image in rollout.images], path, startup.run_dir)
        loader.load_state_dict(read_loader_state(path))
        for name, model in by_folder.items():
            model.load_checkpoint(str(path / name))
    if isinstance(loader, RecordedSteps):
        loader.require_start(progress.state["total_steps"] + 1)
    return progress


def _read_progress(config: Config, path: Path) -> _Progress:
    """Read the progress in a checkpoint; CheckpointError if no run wrote it."""
    state, loop = read_state(path), config.loop
    try:
        groups = [[Trajectory.from_row(row) for row in group] for group in state["batch_cache"]]
        if lacking := make_save_state().keys() - state["save_state"].keys():
            raise ValueError(f"save_state has no {min(lacking)}")
        if not all(rollout.finite_logprobs for group in groups for rollout in group):
            raise ValueError("a log-probability in batch_cache is not finite")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        text = f"is damaged: it does not hold the state of a run ({describe_error(error)})"
        raise CheckpointError(f"{path / STATE_FILE} {text}") from None
    # Groups of another size cannot share a batch with the groups of this run.
    groups = [group for group in groups if len(group) == loop.num_generations_per_prompt]
    fills_steps = isinstance(loop, SampledLoopConfig) and loop.use_dynamic_sampling
    return _Progress(state["save_state"], True, groups if fills_steps else [])


def _make_sampling_run(
    config: Config,
    startup: Startup,
    processes: Processes,
    data: PromptData,
    progress: _Progress,
    stack: ExitStack,
) -> SamplingRun:
    state, settings = progress.state, make_sampling_settings(config.generation, data.stops)
    rollouts = processes.rollouts
    if startup.notices is not None:
        startup.notices.close()
    logger = RunLogger(startup.run_dir, config, resume_step=state["total_steps"] if progress.is_resumed else None)
    stack.push(logger.__exit__)
    for note in data.notes:
        logger.note(note)
    callbacks = Callbacks(startup.user_objects.callbacks)
    if config.rollouts.keep_finished:
        rollouts.finished_folder = startup.run_dir / FINISHED_FOLDER
    startup.checkpointer.on_complete = partial(callbacks.notify, "on_checkpoint")
    startup.checkpointer.note = startup.checkpointer.uploads.note = logger.note
    resizer: EngineResizer | None = None
    if processes.generation is not None:
        parts = processes.generation, processes.transport, rollouts, startup.cluster, startup.run_dir
        notice_s = config.rollouts.timeout_s if config.generation.elastic else None
        refusal = explain_fixed_engines(config)
        resizer = EngineResizer(*parts, refusal=refusal, drain_notice_s=notice_s, note=logger.note)
    buffer, async_grpo = None, config.async_sampling
    if async_grpo.enabled:
        buffer_type = OrderedBuffer if async_grpo.oversampling_factor is None else Oversampling
        buffer = buffer_type(rollouts, data.loader, config.sampled_loop, settings, state["generation_batches"])
    return SamplingRun(
        config=config,
        run_dir=startup.run_dir,
        placement=processes.placement,
        rollouts=rollouts,
        settings=settings,
        dumps=RolloutDumps(rollouts, config.logger, startup.run_dir, describe_run(config, processes.folder)),
        loader=data.loader,
        val_prompts=data.val_prompts,
        logger=logger,
        checkpointer=startup.checkpointer,
        state=state,
        batch_cache=rollouts.put(progress.batch_cache),
        buffer=buffer,
        callbacks=callbacks,
        resizer=resizer,
    )
