"""Group Relative Policy Optimization (Shao et al. 2024): sample groups of responses, score, learn, publish, repeat."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_grpo.algorithms.dynamic_sampling import dynamic_sampling
from megatron_grpo.algorithms.learning import learn
from megatron_grpo.algorithms.step import begin_step, finish_step, refit_policy_generation, require_finite
from megatron_grpo.algorithms.step_advantages import token_advantages
from megatron_grpo.config.schema import Config
from megatron_grpo.data.interfaces import DatumSpec
from megatron_grpo.losses.reward_shaping import scale_rewards
from megatron_grpo.run.context import GRPORun
from megatron_grpo.run.loop import train_steps
from megatron_grpo.run.report import StepReport
from megatron_grpo.run.save_state import GRPOSaveState
from megatron_grpo.run.setup import setup
from megatron_grpo.run.validation import validate

__all__ = [
    "GRPORun",
    "GRPOSaveState",
    "dynamic_sampling",
    "grpo_step",
    "grpo_train",
    "refit_policy_generation",
    "run",
    "scale_rewards",
    "setup",
    "validate",
]


def run(config: Config) -> None:
    """One GRPO run from start (or resume) to end; ends every process it started, however it ends."""
    with setup(config) as grpo_run:
        grpo_train(grpo_run)
        grpo_run.logger.finish()


def grpo_train(run: GRPORun) -> None:
    """Train until a limit is reached or early stopping ends it, validating and saving on the way."""
    train_steps(run, lambda batches: grpo_step(run, batches))


def grpo_step(run: GRPORun, batches: Iterator[list[DatumSpec]]) -> StepReport | None:
    """One step: sample, score, learn, publish. None: no prompts are left."""
    step = begin_step(run, batches)
    if step is None:
        return None
    with step.timer.phase("advantages"):
        step.batch.tokens["advantages"] = token_advantages(run.config, step.trajectories, step.rewards, step.batch)
    require_finite(run, step, "advantages")
    learned = learn(run, step)
    return finish_step(run, step, learned)
