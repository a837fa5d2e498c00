"""A run of GRPO on pairs of responses: the run is faked, the arithmetic of its steps is not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_grpo.algorithms import grpo
from megatron_grpo.algorithms.step_report import StepReport
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.models.source import find_model_shape
from megatron_grpo.preflight.load import compose_config
from tests.support.fake_rollouts import FakeRollouts
from tests.support.fake_run import make_run
from tests.support.trajectories import make_trajectory

REWARDS = [1.0, 0.0, 1.0, 0.0]
SHAPE = find_model_shape(compose_config(["+exp=quickstart"]))


class Run:
    """A run of two groups of two responses."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        sizes = ["grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2"]
        self.trajectories = [
            make_trajectory(3, prompt_idx=i // 2, group=i // 2, sample=i % 2, reward=reward)
            for i, reward in enumerate(REWARDS)
        ]
        self.dropped: list[Trajectory] = []
        """Sampled besides these, as groups of their own."""
        self.rollouts = FakeRollouts(lambda prompts, _: [self.sampled(group) for group in range(len(prompts))])
        self.log: list[str] = []
        config = compose_config(["+exp=quickstart", *sizes, *overrides])
        self.run = make_run(config, folder, self.rollouts, SHAPE, self.log)
        self.policy = self.run.policy

    def sampled(self, group: int) -> list[Trajectory]:
        return [trajectory for trajectory in self.trajectories + self.dropped if trajectory.group == group]

    def step(self) -> StepReport:
        report = grpo.grpo_step(self.run, self.prompts())
        assert report is not None
        self.run.state["total_steps"] += 1
        return report

    def prompts(self) -> Iterator[Any]:
        yield [
            {"idx": group} for group in sorted({trajectory.group for trajectory in self.trajectories + self.dropped})
        ]

    def in_loss(self) -> list[float]:
        """Tokens in the loss of each sequence of the only optimizer step."""
        (lesson,) = self.policy.lessons
        return [sum(mask) for mask in lesson.entry("loss_mask")]


EVERYTHING = [
    "grpo.seq_logprob_error_threshold=1.5",
    "loss_fn.reference_policy_kl_penalty=0.1",
    "loss_fn.positive_example_nll_weight=0.1",
    "grpo.num_iterations=2",
]
"""Options with which a step computes all that it can."""
KL_IN_REWARD = ["loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.1"]
