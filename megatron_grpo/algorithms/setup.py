"""Everything a run needs, brought up side by side where it can be and taken down in one place."""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from megatron_grpo.algorithms.checkpointer import Checkpointer
from megatron_grpo.algorithms.loss_functions import ClippedPGLossFn
from megatron_grpo.algorithms.run import GRPORun, PPORun
from megatron_grpo.algorithms.run_directory import POLICY_FOLDER, VALUE_FOLDER, claimed_run_directory, record_start
from megatron_grpo.algorithms.save_state import GRPOSaveState, default_grpo_save_state
from megatron_grpo.algorithms.start_models import start_models
from megatron_grpo.algorithms.value_loss import MseValueLossFn
from megatron_grpo.cluster.guardian import guarded
from megatron_grpo.cluster.signals import terminated_like_interrupted
from megatron_grpo.config.checks.idle import cautions, idle_settings
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.model_source import is_prepared, model_folder
from megatron_grpo.config.schema import Config
from megatron_grpo.data.datasets import AllTaskProcessedDataset
from megatron_grpo.data.interfaces import DatumSpec, TaskDataSpec
from megatron_grpo.data.jsonl import read_prompts
from megatron_grpo.data.loader import PromptLoader
from megatron_grpo.data.processors import math_data_processor
from megatron_grpo.environments.registry import build_environments, check_reward_functions
from megatron_grpo.generation.interface import SamplingSettings
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.policy.megatron_policy import MegatronPolicy
from megatron_grpo.policy.value.megatron_value import MegatronValue
from megatron_grpo.refit.broadcast import BroadcastTransport
from megatron_grpo.rollouts.collector import RolloutCollector
from megatron_grpo.rollouts.trajectory import Trajectory


@contextmanager
def setup(config: Config) -> Iterator[GRPORun]:
    """Bring up a run, continuing the one in config.run_dir if there is one; on leaving, every process is ended.

    Raises:
        ConfigError: the run cannot start from where it is told to.
        RunError: something did not come up; the message says what.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(terminated_like_interrupted())
        check_reward_functions(config.env)  # before processes are started
        run_dir = stack.enter_context(claimed_run_directory(config.run_dir))
        checkpointer = Checkpointer(run_dir, config.checkpointing)
        start_from = _start_from(checkpointer, config)
        changes = record_start(run_dir, config)
        run = _bring_up(config, run_dir, checkpointer, start_from, stack)
        gc.freeze()  # nothing made so far is garbage; looking through all of it takes a third of a second each time
        stack.callback(gc.unfreeze)
        run.logger.started(startup_s=time.monotonic() - started, changes=changes)
        for caution in cautions(config):
            run.logger.note(f"{caution.subject} {caution.text}")
        for idle in idle_settings(config):
            run.logger.note(f"{idle.subject} changes nothing in this run: {idle.text}")
        yield run


def _start_from(checkpointer: Checkpointer, config: Config) -> Path | None:
    path = checkpointer.find()
    if path is not None and config.value_model is not None and not (path / VALUE_FOLDER).is_dir():
        raise RunError(f"{path} is not a checkpoint of PPO: it has no value model")
    return path


def _bring_up(
    config: Config, run_dir: Path, checkpointer: Checkpointer, start_from: Path | None, stack: ExitStack
) -> GRPORun:
    """Start everything, load the checkpoint to start from, and give generation its first weights."""
    if is_prepared(config):
        importlib.import_module(f"megatron_grpo.prepare.{config.prepare.name}").prepare(config.prepare.folder)
    folder = model_folder(config.policy.model.path)
    if config.cluster.ray_address is None:
        stack.enter_context(guarded())
    policy, value, generation = start_models(config, folder, stack)
    environments = build_environments(config.env)
    for environment in environments.values():
        stack.callback(environment.shutdown)
    loader, val_prompts, tokenizer = _load_data(config, folder)
    for model in (policy, value, generation):
        if model is not None:
            model.wait_ready()
    transport = BroadcastTransport(policy, generation, config.refit)
    transport.connect()
    checkpointer.remove_leftovers()
    state, batch_cache = _resume(start_from, config, policy, value, loader)
    transport.publish(state["total_steps"])
    logger = RunLogger(run_dir, config, resume_step=state["total_steps"])
    stack.callback(logger.close)
    run = GRPORun(
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
    )
    if value is None:
        return run
    return PPORun(**vars(run), value=value, value_loss_fn=MseValueLossFn(config.value_loss_fn))


def _resume(
    path: Path | None, config: Config, policy: MegatronPolicy, value: MegatronValue | None, loader: PromptLoader
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
    return state["save_state"], waiting


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

    training, wanted = dataset(data.train_path), config.prompts_per_generation_batch
    if len(training) < wanted:
        text = f"has {len(training)} rows, fewer than the {wanted} prompts that are sampled together"
        raise RunError(f"data.train_path={data.train_path} {text}")
    loader = PromptLoader(
        training,
        prompts_per_batch=wanted,
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
