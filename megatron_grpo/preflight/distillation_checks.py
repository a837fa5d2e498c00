"""Checks of distillation: its teachers, their layouts, and what they have in common with the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from megatron_grpo.config.data_schema import UNSCORED
from megatron_grpo.config.errors import Problem
from megatron_grpo.config.keys import list_changes
from megatron_grpo.config.schema import Config
from megatron_grpo.models import source
from megatron_grpo.models.shape import ModelShape
from megatron_grpo.models.tokenizer_files import explain_other_tokens
from megatron_grpo.preflight.layout_checks import check_split
from megatron_grpo.preflight.rules import Rule, evaluate_rules


@evaluate_rules
def find_distillation_problems(config: Config, shape: ModelShape | None) -> Iterator[Rule]:
    """Check teachers and their layouts; shape None: unknown."""
    for name, environment in config.env.items():
        text = "gives no reward; use it with algorithm=distillation and loss_fn.policy_loss_weight=0"
        yield environment.type == UNSCORED and config.uses_rewards, f"env.{name}.type={UNSCORED}", text
    if not config.named_teachers and not config.teaches_itself:
        return
    loop = config.sampled_loop
    text = "keeps prompts whose rewards differ, and loss_fn.policy_loss_weight=0 uses none; use false"
    yield loop.use_dynamic_sampling and not config.uses_rewards, "LOOP.use_dynamic_sampling=", text
    text = "changes rewards, and loss_fn.policy_loss_weight=0 uses none; use false"
    yield config.loss_fn.use_kl_in_reward and not config.uses_rewards, "loss_fn.use_kl_in_reward=", text
    text = "moves a reference policy that the loss does not use; use false"
    yield loop.sync_ref_model and not config.uses_reference, "LOOP.sync_ref_model=", text
    top_k = config.distillation.topk_logits_k
    text = f"exceeds the {shape.vocab if shape else 0} tokens of the policy; use null for the whole distribution"
    yield shape is not None and (top_k or 0) > shape.vocab, "distillation.topk_logits_k=", text
    text = "is for algorithm=grpo, because the outputs of a teacher are not recorded; use null"
    yield config.logger.replay_every is not None, "logger.replay_every=", text
    if not config.named_teachers:
        return
    yield from _check_teachers(config)
    yield from _check_shares(config)
    longest = config.policy.max_total_sequence_length
    for section, teacher in config.teacher_models.items():
        teacher_shape = source.find_folder_shape(config, teacher.model.path)
        if teacher_shape is None:
            continue
        yield from check_split(f"{section}.parallel", teacher.parallel, teacher_shape)
        positions = teacher_shape.max_positions
        text = f"has {positions} positions, fewer than policy.max_total_sequence_length={longest}"
        yield 0 < positions < longest, f"{section}.model.path=", text


def _check_teachers(config: Config) -> Iterator[Rule]:
    teachers, top_k = config.named_teachers, config.distillation.topk_logits_k
    for task in config.teachers:
        text = f"is the teacher of a task that has no environment; env has {', '.join(config.env)}"
        yield task not in config.env, f"teachers.{task}", text
    text = "is the teacher of no task: each task has its own in teachers; leave it out"
    for key, value in list_changes(config, "teacher"):
        yield "teacher" not in teachers, f"{key}={value}", text
    for section, teacher in teachers.items():
        url, path = teacher.server_url, teacher.model.path
        text = f"is required with algorithm=distillation; give the folder of the teacher, or {section}.server_url"
        yield path is None and url is None, f"{section}.model.path=None", text
        variable = teacher.api_key_variable
        text = f"is for a teacher on a server; needs {section}.server_url"
        yield variable is not None and url is None, f"{section}.api_key_variable={variable}", text
        if url is None:
            continue
        subject = f"{section}.server_url={url}"
        yield not url.startswith(("http://", "https://")), subject, "must be written http://HOST:PORT"
        text = "gives likeliest tokens; needs distillation.topk_logits_k, of at most the server's --max-logprobs"
        yield top_k is None, subject, text
        temperature = config.generation.temperature
        text = f"gives probabilities at temperature 1; needs generation.temperature=1, not {temperature:g}"
        yield temperature not in (0.0, 1.0), subject, text
        text = f"and {section}.server_url both name a teacher; give one"
        yield path is not None, f"{section}.model.path={path}", text


def _check_shares(config: Config) -> Iterator[Rule]:
    """Check that replicas of policy and teachers can have whole partitions."""
    samples = config.policy.train_global_batch_samples or config.samples_per_step
    layouts = {section: teacher.parallel.data for section, teacher in config.teacher_models.items()}
    slices = math.lcm(config.policy.parallel.data, *layouts.values())
    for section, data in layouts.items():
        text = f"and policy.parallel.data={config.policy.parallel.data} do not share the {samples} samples of an"
        text += f" optimizer step evenly; use multiples of {slices}"
        yield data > 1 and samples % slices, f"{section}.parallel.data=", text


def find_teacher_tokenizer_problems(config: Config) -> Iterator[Problem]:
    """Check that folders of teachers have the policy's tokenizer."""
    policy = config.policy.model.path
    folder = source.find_local_folder(policy)
    for section, teacher in config.teacher_models.items():
        path = teacher.model.path
        theirs = source.find_local_folder(path)
        is_made = source.is_made_before_run(config, policy) and source.is_made_before_run(config, path)
        if is_made or folder is None or theirs is None:  # those of the hub are compared once they are downloaded
            continue
        reason = explain_other_tokens(Path(folder), Path(theirs))
        if reason is not None:
            text = f"{reason}; a teacher scores the policy's own tokens,"
            text += f" so give one with the tokenizer of policy.model.path={policy}"
            yield Problem(f"{section}.model.path={path}", text)
