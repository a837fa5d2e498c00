"""Proximal Policy Optimization (Schulman et al. 2017) with a value model: sample, score, value, learn, publish."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.algorithms.dynamic_sampling import dynamic_sampling
from megatron_grpo.algorithms.learning import learn, learn_values
from megatron_grpo.algorithms.ppo_advantages import add_advantages
from megatron_grpo.algorithms.step import begin_step, finish_step, require_finite
from megatron_grpo.config.schema import Config
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.run.context import PPORun
from megatron_grpo.run.loop import train_steps
from megatron_grpo.run.report import StepReport
from megatron_grpo.run.save_state import PPOSaveState
from megatron_grpo.run.setup import setup
from megatron_grpo.run.validation import validate

__all__ = ["PPORun", "PPOSaveState", "dynamic_sampling", "ppo_step", "ppo_train", "run", "setup", "validate"]


def run(config: Config) -> None:
    """One PPO run from start (or resume) to end; ends every process it started, however it ends."""
    with setup(config) as ppo_run:
        assert isinstance(ppo_run, PPORun)
        ppo_train(ppo_run)
        ppo_run.logger.finish()


def ppo_train(run: PPORun) -> None:
    """Train until a limit is reached or early stopping ends it, validating and saving on the way."""
    train_steps(run, lambda batches: ppo_step(run, batches))


def ppo_step(run: PPORun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """One step: sample, score, estimate advantages, train both models, publish. None: no prompts are left.

    In the first ppo.policy_training_start_step steps the policy stays as it is; its weights are published all the same,
    so that versions count steps.
    """
    step = begin_step(run, batches)
    if step is None:
        return None
    with step.timer.phase("values"):
        step.batch.tokens["values"] = run.value.get_values(step.batch)
    require_finite(run, step, "values")
    with step.timer.phase("advantages"):
        add_advantages(run.config, step.trajectories, step.rewards, step.batch)
    require_finite(run, step, "advantages")
    value_metrics = learn_values(run, step)
    learned = learn(run, step) if step.number > run.config.ppo.policy_training_start_step else None
    return finish_step(run, step, learned, value_metrics)
