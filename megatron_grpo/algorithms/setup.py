"""Everything a run needs, brought up side by side where it can be and taken down in one place."""

from __future__ import annotations

import gc
import importlib
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_grpo.algorithms.checkpointer import POLICY_FOLDER, VALUE_FOLDER, Checkpointer
from megatron_grpo.algorithms.loss_functions import ClippedPGLossFn
from megatron_grpo.algorithms.run_directory import claimed_run_directory
from megatron_grpo.algorithms.save_state import GRPOSaveState, default_grpo_save_state
from megatron_grpo.algorithms.value_loss import MseValueLossFn
from megatron_grpo.cluster.guardian import guarded
from megatron_grpo.cluster.ray_cluster import RayCluster
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.model_shape import ModelShape
from megatron_grpo.config.model_source import is_prepared, model_folder
from megatron_grpo.config.schema import Config
from megatron_grpo.data.datasets import AllTaskProcessedDataset
from megatron_grpo.data.interfaces import DatumSpec, TaskDataSpec
from megatron_grpo.data.jsonl import read_prompts
from megatron_grpo.data.loader import PromptLoader
from megatron_grpo.data.processors import math_data_processor
from megatron_grpo.environments.registry import build_environments
from megatron_grpo.generation.interface import SamplingSettings
from megatron_grpo.generation.vllm_generation import VllmGeneration
from megatron_grpo.models.value_head import as_value_model
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.policy.megatron_policy import MegatronPolicy
from megatron_grpo.policy.value.megatron_value import MegatronValue, ValueSettings
from megatron_grpo.policy.worker import EngineSettings
from megatron_grpo.refit.broadcast import BroadcastTransport
from megatron_grpo.refit.interface import WeightTransport
from megatron_grpo.rollouts.collector import RolloutCollector
from megatron_grpo.rollouts.trajectory import Trajectory


@dataclass(kw_only=True)
class GRPORun:
    """A run that is up: what the loop works with."""

    config: Config
    policy: MegatronPolicy
    transport: WeightTransport
    collector: RolloutCollector
    sampling: SamplingSettings
    loader: PromptLoader
    val_prompts: list[DatumSpec]
    loss_fn: ClippedPGLossFn
    logger: RunLogger
    checkpointer: Checkpointer
    state: GRPOSaveState
    batch_cache: list[list[Trajectory]]
    """Groups that dynamic sampling keeps for the step that is being filled."""

    @property
    def uses_reference(self) -> bool:
        """Whether the loss compares the policy with the reference policy."""
        return needs_reference(self.config)

    def save_models(self, folder: Path) -> None:
        """Write what is trained; `folder` is the policy's part of a checkpoint."""
        self.policy.save_checkpoint(str(folder))


@dataclass(kw_only=True)
class PPORun(GRPORun):
    """The same with a value model."""

    value: MegatronValue
    value_loss_fn: MseValueLossFn

    def save_models(self, folder: Path) -> None:
        super().save_models(folder)
        own = folder.with_name(VALUE_FOLDER)
        own.mkdir()
        self.value.save_checkpoint(str(own))


def needs_reference(config: Config) -> bool:
    """Whether a reference policy is loaded at all."""
    observed = config.algorithm == "ppo" and not config.ppo.skip_reference_policy_logprobs_calculation
    return observed or config.loss_fn.reference_policy_kl_penalty > 0


@contextmanager
def setup(config: Config) -> Iterator[GRPORun]:
    """Bring up a run, continuing the one in config.run_dir if there is one; on leaving, every process is ended.

    Raises:
        RunError: something did not come up; the message says what.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(_terminated_like_interrupted())
        run_dir, changes = stack.enter_context(claimed_run_directory(config))
        if is_prepared(config):
            importlib.import_module(f"megatron_grpo.prepare.{config.prepare.name}").prepare(config.prepare.folder)
        folder = model_folder(config.policy.model.path)
        if config.cluster.ray_address is None:
            stack.enter_context(guarded())
        cluster = RayCluster(config.cluster)
        stack.callback(cluster.shutdown)
        cluster.start()
        value_model = config.value_model
        cluster.reserve(
            config.policy.parallel, config.generation.parallel, value_model.parallel if value_model else None
        )
        generation = _start_generation(config, folder, cluster)
        stack.callback(generation.shutdown)
        policy = _start_policy(config, folder, cluster)
        stack.callback(policy.shutdown)
        value = _start_value(config, cluster) if value_model else None
        if value is not None:
            stack.callback(value.shutdown)
        environments = build_environments(config.env)
        for environment in environments.values():
            stack.callback(environment.shutdown)
        loader, val_prompts, tokenizer = _load_data(config, folder)
        policy.wait_ready()
        if value is not None:
            value.wait_ready()
        generation.wait_ready()
        transport = BroadcastTransport(policy, generation, config.refit)
        transport.connect()
        checkpointer = Checkpointer(run_dir, config.checkpointing)
        state, batch_cache = _resume(checkpointer, policy, value, loader)
        transport.publish(state["total_steps"])
        logger = RunLogger(run_dir, config, resume_step=state["total_steps"])
        stack.callback(logger.close)
        gc.freeze()  # nothing made so far is garbage; looking through all of it takes a third of a second each time
        stack.callback(gc.unfreeze)
        logger.started(startup_s=time.monotonic() - started, changes=changes)
        if config.generation.temperature == 0:
            logger.note("generation.temperature=0 is greedy: all samples of a prompt are the same and teach nothing")
        parts: dict[str, Any] = {}
        if value is not None:
            parts = {"value": value, "value_loss_fn": MseValueLossFn(config.value_loss_fn)}
        yield (GRPORun if value is None else PPORun)(
            config=config,
            policy=policy,
            transport=transport,
            collector=RolloutCollector(generation, environments, config.policy.max_total_sequence_length),
            sampling=_sampling(config, tokenizer),
            loader=loader,
            val_prompts=val_prompts,
            loss_fn=ClippedPGLossFn(config.loss_fn),
            logger=logger,
            checkpointer=checkpointer,
            state=state,
            batch_cache=batch_cache,
            **parts,
        )


def _start_generation(config: Config, folder: Path, cluster: RayCluster) -> VllmGeneration:
    generation = VllmGeneration(
        str(folder),
        config.generation,
        precision=config.policy.precision,
        max_total_sequence_length=config.policy.max_total_sequence_length,
        actor_options=cluster.engine_options,
        startup_timeout_s=config.cluster.startup_timeout_s,
    )
    generation.start()
    return generation


def _start_policy(config: Config, folder: Path, cluster: RayCluster) -> MegatronPolicy:
    settings = EngineSettings(
        config=config.policy,
        shape=ModelShape.from_folder(folder),
        folder=str(folder),
        reference=config.reference if needs_reference(config) else None,
        temperature=config.generation.temperature,
        decay_steps=config.decay_steps,
        seed=config.loop.seed,
    )
    policy = MegatronPolicy(settings, cluster.policy_options, config.cluster.startup_timeout_s)
    policy.start()
    return policy


def _start_value(config: Config, cluster: RayCluster) -> MegatronValue:
    assert config.value_model is not None
    folder = model_folder(config.value_model.model.path, "value.model.path")
    settings = ValueSettings(
        config=config.value_model,
        shape=as_value_model(ModelShape.from_folder(folder, reward_models=True)),
        folder=str(folder),
        decay_steps=config.value_decay_steps,
        seed=config.loop.seed,
    )
    value = MegatronValue(settings, cluster.value_options, config.cluster.startup_timeout_s)
    value.start()
    return value


def _load_data(config: Config, folder: Path) -> tuple[PromptLoader, list[DatumSpec], Any]:
    """The training loader, the validation prompts and the tokenizer."""
    from transformers import AutoTokenizer  # here: seconds to import, spent while the other processes start

    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = config.data
    spec = TaskDataSpec(
        task_name=data.task_name,
        prompt_key=data.prompt_key,
        answer_key=data.answer_key,
        apply_chat_template=data.apply_chat_template,
        system_prompt=data.system_prompt,
    )
    processors = dict.fromkeys(config.env, (spec, math_data_processor))

    def dataset(path: str) -> AllTaskProcessedDataset:
        rows = read_prompts(path, spec, task_names=set(config.env))
        return AllTaskProcessedDataset(rows, tokenizer, spec, processors, data.max_input_seq_length)

    loader = PromptLoader(
        dataset(data.train_path),
        prompts_per_batch=config.prompts_per_generation_batch,
        shuffle=data.shuffle,
        seed=config.loop.seed,
    )
    val_prompts: list[DatumSpec] = []
    if data.val_path is not None:
        held_out = dataset(data.val_path)
        prompts = (held_out[idx] for idx in range(len(held_out)))
        val_prompts = [prompt for prompt in prompts if prompt["loss_multiplier"] > 0][: config.loop.max_val_samples]
    return loader, val_prompts, tokenizer


def _sampling(config: Config, tokenizer: Any) -> SamplingSettings:
    generation = config.generation
    stops = set(generation.stop_token_ids)
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    return SamplingSettings(
        max_new_tokens=generation.max_new_tokens,
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        stop_token_ids=tuple(sorted(stops)),
        stop_strings=tuple(generation.stop_strings),
    )


def _resume(
    checkpointer: Checkpointer, policy: MegatronPolicy, value: MegatronValue | None, loader: PromptLoader
) -> tuple[GRPOSaveState, list[list[Trajectory]]]:
    """The run's progress and dynamic sampling's cache; models and loader continue where the checkpoint left them."""
    checkpointer.remove_leftovers()
    path = checkpointer.find()
    if path is None:
        return default_grpo_save_state(), []
    policy.load_checkpoint(str(path / POLICY_FOLDER))
    if value is not None:
        if not (path / VALUE_FOLDER).is_dir():
            raise RunError(f"{path} is not a checkpoint of PPO: it has no value model")
        value.load_checkpoint(str(path / VALUE_FOLDER))
    state, loader_state = Checkpointer.load(path)
    loader.load_state_dict(loader_state)
    save_state: GRPOSaveState = state["save_state"]
    return save_state, [[Trajectory.from_row(row) for row in group] for group in state["batch_cache"]]


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM (Slurm's preemption, `kill`) unwind like Ctrl-C, so that every process is ended."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    previous: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
