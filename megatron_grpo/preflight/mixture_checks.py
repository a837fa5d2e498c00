"""Checks of algorithms that learn from more than their samples."""

from __future__ import annotations

from collections.abc import Iterator
from string import Formatter

from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.rules import Rule


def check_mixture(config: Config) -> Iterator[Rule]:
    """Check settings of CHORD and of self-distillation against each other."""
    if config.teaches_itself:
        yield from _check_hint(config)
    if config.demonstration_config is None:
        return
    chord, data = config.chord, config.policy.parallel.data
    text = "has no demonstrations; give a file with prompts and responses, or use algorithm=grpo"
    yield chord.train_path is None, "chord.train_path=", text
    text = f"leaves some of the policy.parallel.data={data} replicas without a demonstration; use {data} or more"
    yield chord.rows_per_step < data, "chord.rows_per_step=", text
    text = (
        "makes several optimizer steps of one, and demonstrations belong to all samples of a step; use null, and fewer"
    )
    text += " LOOP.num_prompts_per_step"
    yield config.policy.train_global_batch_samples is not None, "policy.train_global_batch_samples=", text
    text = "needs experts that engines chose, and demonstrations have none; use false"
    yield config.policy.moe.replay_routing, "policy.moe.replay_routing=", text
    yield config.logger.replay_every is not None, "logger.replay_every=", "does not record demonstrations; use null"
    yield config.debug.rollouts_from is not None, "debug.rollouts_from=", "has no demonstrations; use null"


def _check_hint(config: Config) -> Iterator[Rule]:
    hint = config.distillation.hint_prompt
    text = "is required with algorithm=self_distillation; give the text of the teacher's prompt, with {} for the prompt"
    text += " and {NAME} for the column with the hint"
    yield hint is None, "distillation.hint_prompt=", text
    fields = _list_fields(hint or "{}{hint}")
    text = "has a brace too many; write braces of the text as {{ and }}"
    yield fields is None, "distillation.hint_prompt=", text
    text = "shows the teacher no column of the row, and without one it knows nothing that the policy does not; write"
    text += " {NAME} for the column with the hint"
    yield fields is not None and not any(fields), "distillation.hint_prompt=", text
    text = "lets agents write prompts of their own, where a hint has no place; use false"
    yield config.generation.endpoint.enabled, "generation.endpoint.enabled=", text
    yield config.data.streaming, "data.streaming=", "gives no row again, for its hint; use false"
    yield config.debug.rollouts_from is not None, "debug.rollouts_from=", "has no rows with hints; use null"
    text = "makes {steps} optimizer steps of one, and the teacher's whole distribution is that of the head before the"
    text += " first; use 1, or distillation.topk_logits_k"
    needs_one = config.distillation.topk_logits_k is None and config.optimizer_steps_per_step > 1
    subject = "policy.train_global_batch_samples=" if config.passes_per_step == 1 else "PASSES="
    yield needs_one, subject, text.format(steps=config.optimizer_steps_per_step)


def _list_fields(text: str) -> list[str] | None:
    """List a text's fields; None: it is no format."""
    try:
        return [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError:
        return None
