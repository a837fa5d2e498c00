"""Which log-probabilities a step computes, where they have to be finite, and whom they leave out of the loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_grpo.algorithms.records import StepCheck
from megatron_grpo.algorithms.stages import add_logprobs, build_batch
from megatron_grpo.batch.step_batch import StepBatch
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.errors import RunError
from megatron_grpo.config.schema import Config, GRPOConfig, LossConfig
from megatron_grpo.observability.timing import StepTimer
from tests.support.fake_models import FakePolicy
from tests.support.fake_rollouts import FakeRay, FakeRollouts, add_entry, by_sequence, stored_names
from tests.support.trajectories import failed_trajectory, make_trajectory

LENGTHS = [3, 1, 2, 4]


class Stage:
    """A step of four responses, of which the third is not in the loss."""

    def __init__(self, folder: Path, loss: LossConfig | None = None, *, replicas: int = 1, **grpo: Any) -> None:
        self.config = Config(
            grpo=GRPOConfig(num_prompts_per_step=2, num_generations_per_prompt=2, **grpo), loss_fn=loss or LossConfig()
        )
        self.config.policy.parallel.data = replicas
        self.rollouts: Any = FakeRollouts()
        self.trajectories = [
            make_trajectory(length, prompt_tokens=1 + i, prompt_idx=i, reward=None if i == 2 else 1.0)
            for i, length in enumerate(LENGTHS)
        ]
        self.policy = FakePolicy(shape=None, reference_offset=-0.5)  # type: ignore[arg-type]
        self.folder = folder
        self.timer = StepTimer()

    def run(self) -> tuple[StepBatch, dict[str, float]]:
        groups = self.rollouts.put([self.trajectories[:2], self.trajectories[2:]])
        batch = build_batch(self.config, groups, self.rollouts)
        check = StepCheck(self.folder, self.rollouts.fetch, groups, step=1)
        return batch, add_logprobs(self.config, batch, self.policy, self.rollouts, check, self.timer)


PENALTY = {"reference_policy_kl_penalty": 0.1}


@pytest.mark.parametrize(
    ("loss", "grpo", "models"),
    [
        ({}, {}, []),
        ({}, {"num_iterations": 2}, ["policy says"]),
        (PENALTY, {}, ["reference says"]),
        ({**PENALTY, "use_kl_in_reward": True}, {}, ["policy says", "reference says"]),
        ({}, {"seq_logprob_error_threshold": 1.5}, ["policy says"]),
    ],
)
def test_what_nobody_looks_at_is_not_computed(
    loss: dict[str, Any], grpo: dict[str, Any], models: list[str], tmp_path: Path
) -> None:
    stage = Stage(tmp_path, LossConfig(**{"reference_policy_kl_penalty": 0.0, **loss}), **grpo)
    batch, _ = stage.run()
    assert stage.policy.log == models
    entries = {"policy says": "prev_logprobs", "reference says": "reference_logprobs"}
    assert stored_names(batch) - {"token_ids", "sampled", "generation_logprobs"} == {entries[line] for line in models}
    assert ("logprobs" in stage.timer.seconds) == bool(models)


@pytest.mark.parametrize(("in_reward", "top_p"), [(True, 0.9), (True, 1.0), (False, 0.9)])
def test_a_penalty_in_the_reward_compares_whole_distributions(in_reward: bool, top_p: float, tmp_path: Path) -> None:
    """A filter of sampling costs a further pass; without it they are those of the pass before the step."""
    stage = Stage(tmp_path, LossConfig(**PENALTY, use_kl_in_reward=in_reward), num_iterations=2)
    stage.config.generation.top_p = top_p
    batch, _ = stage.run()
    assert ("unfiltered_logprobs" in batch.fields) == (in_reward and top_p < 1)
    assert stage.policy.log.count("policy says without filter") == (in_reward and top_p < 1)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("in_reward", [True, False])
@pytest.mark.parametrize("entry", ["prev_logprobs", "reference_logprobs"])
def test_where_they_have_to_be_finite(
    entry: str, in_reward: bool, number: int, tmp_path: Path, fake_ray: FakeRay
) -> None:
    """In the loss; a penalty in the reward also looks at the third, which is not in the loss."""
    stage = Stage(tmp_path, LossConfig(**PENALTY, use_kl_in_reward=in_reward), num_iterations=2)
    compute = stage.policy.add_field

    def with_a_hole(batch: StepBatch, field: str) -> Any:
        stage.policy.logprobs = {number: math.nan} if field == entry else {}
        finite = compute(batch, field)
        stage.policy.logprobs = {}
        return finite

    stage.policy.add_field = with_a_hole  # type: ignore[method-assign]
    if number == 2 and not in_reward:
        stage.run()
        assert list(tmp_path.iterdir()) == []
        return
    with pytest.raises(
        RunError, match=rf"a value of {entry} is not finite for 1 response\(s\) to prompt\(s\) {number}"
    ):
        stage.run()
    assert fake_ray.gets == 1, "one shard's numbers come to the driver, for the file"


ROWS = st.tuples(
    st.lists(st.sampled_from([0.0, 0.1, -0.4, 1.0]), max_size=4),
    st.booleans(),
    st.sampled_from([True] * 4 + [False]),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(ROWS, min_size=2, max_size=8), replicas=st.integers(1, 2), threshold=st.sampled_from([1.05, 1.5, 2.0])
)
def test_inconsistent_responses_against_a_loop(
    rows: list[tuple[list[float], bool, bool]], replicas: int, threshold: float, tmp_path: Path
) -> None:
    """`rows` are the errors of each response's tokens, whether anybody scored it, and whether it came about at all."""
    if len(rows) % replicas:
        rows = rows[1:]
    stage = Stage(tmp_path, replicas=replicas, seq_logprob_error_threshold=threshold)
    stage.trajectories = [response(errors, scored, came_about) for errors, scored, came_about in rows]
    errors_of = [errors if came_about else [] for errors, _, came_about in rows]
    compute = stage.policy.add_field

    def with_errors(batch: StepBatch, field: str) -> Any:
        finite = compute(batch, field)
        if field != "prev_logprobs":
            return finite
        pieces = by_sequence(batch, "prev_logprobs")
        shifted = [piece.copy() for piece in pieces]
        for piece, errors in zip(shifted, errors_of, strict=True):
            piece[len(piece) - len(errors) :] += np.array(errors, dtype=np.float32)
        add_entry(batch, "prev_logprobs", np.concatenate(shifted))
        return finite

    stage.policy.add_field = with_errors  # type: ignore[method-assign]
    batch, metrics = stage.run()
    stays, means = [], []
    for (_, scored, came_about), errors in zip(rows, errors_of, strict=True):
        inside = scored and came_about and bool(errors)
        mean = sum(math.exp(abs(error)) for error in errors) / len(errors) if inside else 0.0
        means.append(mean)
        stays.append(scored and came_about and not (inside and mean > threshold))
    assert batch.in_loss.tolist() == stays
    assert metrics["num_masked_seqs"] == sum(mean > threshold for mean in means)
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(max(means), rel=1e-5)


def response(errors: list[float], scored: bool, came_about: bool) -> Trajectory:
    """Of as many tokens as there are errors."""
    if not came_about:
        return failed_trajectory(prompt_tokens=2)
    return make_trajectory(len(errors), prompt_tokens=2, reward=1.0 if scored else None)
