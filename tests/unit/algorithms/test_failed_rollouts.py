"""A rollout that failed twice goes through a whole step of GRPO, and touches nothing but the figures that count it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.support.grpo_run import EVERYTHING, KL_IN_REWARD, Run
from tests.support.trajectories import failed_trajectory, make_trajectory

pytestmark = pytest.mark.usefixtures("fake_ray")


class TestAFailedRollout:
    """One of four samples failed twice: no sampled token, no reward, a reason."""

    REWARDS = (1.0, 0.0, 0.25)

    def run(self, folder: Path, *options: str) -> Run:
        run = Run(folder, "grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=4", *options)
        rollouts = [make_trajectory(2 + i, prompt_idx=0, group=0, sample=i, reward=float(i)) for i in range(4)]
        partial = [
            make_trajectory(2 + i, prompt_idx=1, group=1, sample=i, reward=reward)
            for i, reward in enumerate(self.REWARDS)
        ]
        run.trajectories = [*rollouts, *partial, failed_trajectory(prompt_idx=1, group=1, sample=3)]
        return run

    def test_the_others_are_compared_with_each_other(self, tmp_path: Path) -> None:
        run = self.run(tmp_path, "grpo.normalize_rewards=false")
        report = run.step()
        (lesson,) = run.policy.lessons
        advantages, masks = lesson.entry("advantages"), lesson.entry("loss_mask")
        a, b, c = self.REWARDS
        expected = [a - (b + c) / 2, b - (a + c) / 2, c - (a + b) / 2]
        assert [advantages[4 + i][-1] for i in range(3)] == pytest.approx(expected)
        assert (advantages[7], masks[7]) == ([0.0], [0.0])
        assert [sum(mask) for mask in masks[:7]] == [2, 3, 4, 5, 2, 3, 4]
        assert report.metrics["valid_tokens"] == 23
        assert report.metrics["reward"] == pytest.approx((0 + 1 + 2 + 3 + a + b + c) / 7)
        assert report.metrics["failed_rollouts"] == 1
        assert "unscored_rate" not in report.metrics, "it was never there to be scored"
        assert report.metrics["groups_without_signal"] == 0
        assert all(map(math.isfinite, report.metrics.values()))

    @pytest.mark.parametrize(
        "options",
        [
            [],
            EVERYTHING,
            [*KL_IN_REWARD, "grpo.normalize_rewards=false"],
            [*KL_IN_REWARD, "grpo.adv_estimator.name=reinforce_plus_plus"],
            ["grpo.adv_estimator.name=reinforce_plus_plus", "grpo.adv_estimator.minus_baseline=true"],
            ["grpo.use_dynamic_sampling=true"],
            ["policy.parallel.data=2", "policy.train_global_batch_samples=4"],
        ],
        ids=["plain", "everything", "penalty", "reinforce++", "with baseline", "dynamic sampling", "two replicas"],
    )
    def test_it_is_as_good_as_one_that_nobody_scored(self, options: list[str], tmp_path: Path) -> None:
        """A failed rollout's tokens are in no baseline and no loss, so nothing else may change by a bit."""
        lessons = []
        for failed in (True, False):
            run = self.run(tmp_path, *options)
            if not failed:
                run.trajectories[7] = make_trajectory(5, prompt_idx=1, group=1, sample=3, reward=None, correct=None)
            run.policy.reference_offset = -0.125
            metrics = run.step().metrics
            entries = [
                [lesson.entry(name)[: 3 + 4 * (len(lesson.sequences) > 4)] for name in ("advantages", "loss_mask")]
                for lesson in run.policy.lessons
            ]
            figures = {name: metrics[name] for name in ("reward", "valid_tokens", "reward_std", "optimizer_steps")}
            lessons.append((entries, figures, metrics["loss"]))
        assert lessons[0][:2] == lessons[1][:2]
        assert lessons[0][2] == pytest.approx(lessons[1][2], rel=1e-6), (
            "rectangles of another width are summed otherwise"
        )

    def test_a_group_of_failures_teaches_nothing(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        run.trajectories[4:] = [failed_trajectory(prompt_idx=1, group=1, sample=i) for i in range(4)]
        report = run.step()
        assert run.in_loss() == [2, 3, 4, 5, 0, 0, 0, 0]
        assert report.metrics["groups_without_signal"] == 0.5
        assert all(map(math.isfinite, report.metrics.values()))
