"""The loop around the steps with steps and validations that fail: what is on disk when the run ends."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_grpo.algorithms.step_report import StepReport
from megatron_grpo.batch.images import StoredImage
from megatron_grpo.batch.trajectory import Trajectory
from megatron_grpo.config.errors import DisagreementError, ModelLostError, RunError, SamplingError
from megatron_grpo.config.loop_schema import EarlyStopConfig
from megatron_grpo.config.schema import LossConfig
from megatron_grpo.models.image_store import store_image
from megatron_grpo.run.checkpoint_files import CheckpointError, read_state, verify_checkpoint
from megatron_grpo.weight_sync.refit_calls import PolicyLostError, RefitError
from tests.support.damage import flip
from tests.support.loop_run import CHECKPOINTING, LIMITS, SOUND, Run, validating
from tests.support.recorded_run import make_facts
from tests.support.trajectories import failed_trajectory, make_trajectory, plain_groups


def test_the_steps_before_one_that_cannot_be_sampled_are_saved_as_they_were(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(SamplingError, match="too few"):
        run.train(steps=3, error=SamplingError("too few"))
    assert run.checkpointer.list_steps() == [2, 3]
    state, loader = run.saved(3)
    assert state["metrics"]["loss"] == 0.5
    assert state["save_state"]["total_steps"] == 3
    assert (state["save_state"]["generation_batches"], loader["position"], state["batch_cache"]) == (0, 3, [])


def test_the_state_before_a_step_that_is_recorded_is_saved(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.config.checkpointing = run.checkpointer.config = replace(run.config.checkpointing, save_period=100)
    run.config.logger = replace(run.config.logger, replay_every=5)
    run.train()
    assert run.checkpointer.list_steps() == [4, 9], "9 because it is the last"


def test_a_refused_step_has_a_line_and_the_steps_before_are_saved(tmp_path: Path) -> None:
    run, lines = Run(tmp_path), []
    run.logger.log_step = lambda *line: lines.append(line)
    figures = {"token_mult_prob_error": 9.2, "optimizer_steps": 0.0}
    with pytest.raises(
        DisagreementError, match=r"apart; checkpoints/step_3 is the last one: the run goes on from there"
    ):
        run.train(steps=3, error=DisagreementError("too far apart", figures))
    (step, metrics, timing, throughput) = lines[-1]
    assert (step, metrics, throughput) == (4, figures, {})
    assert timing.keys() == {"total"}
    state, loader = run.saved(3)
    assert (state["save_state"]["total_steps"], loader["position"]) == (3, 3), "its prompts are sampled again"


def test_a_step_that_is_off_leaves_weights_by_which_the_next_one_is_examined(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.report = replace(run.report, needs_checkpoint=True)
    run.train(steps=1)
    assert run.checkpointer.list_steps() == [1], "whatever checkpointing.save_period says"


def test_a_failure_that_may_have_touched_the_weights_saves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(RunError, match="gradient"):
        run.train(steps=3, error=RunError("a gradient is not finite"))
    assert run.checkpointer.list_steps() == [2]


def test_a_step_whose_weights_are_not_published_counts_and_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models have learnt from it: the state that goes with their weights is the one after the step."""
    validating(monkeypatch, {"val_accuracy": 0.4})
    run = Run(tmp_path, replace(LIMITS, val_period=3))
    run.refit_fails = {3: RefitError("generation engine 0 died")}
    with pytest.raises(RefitError, match="engine 0 died"):
        run.train()
    assert run.checkpointer.list_steps() == [2, 3]
    state, loader = run.saved(3)
    assert (state["save_state"]["total_steps"], state["save_state"]["total_valid_tokens"]) == (3, 9)
    assert (state["metrics"], loader["position"], state["batch_cache"]) == (SOUND, 3, [])
    assert [line for line in run.logged if line.startswith(("step", "validation"))] == ["step 1", "step 2", "step 3"]
    again = Run(tmp_path, run.config.grpo)
    again.state = state["save_state"]
    again.train(steps=4)
    lines = [line for line in again.logged if line.startswith(("step", "validation"))]
    assert lines == ["validation 3", "step 4"], "what could not be validated then is validated now"


@pytest.mark.parametrize(
    ("steps", "stands"),
    [
        (3, "checkpoints/step_2 is the last one: the run goes on from there when it is started again"),
        (1, "there is no checkpoint: the run begins anew when it is started again"),
    ],
)
def test_a_step_whose_weights_are_lost_with_a_rank_is_not_saved_and_the_message_says_what_is(
    steps: int, stands: str, tmp_path: Path
) -> None:
    run = Run(tmp_path)
    run.refit_fails = {steps: PolicyLostError("policy rank 1 is gone")}
    with pytest.raises(ModelLostError, match=f"^policy rank 1 is gone; {stands}$"):
        run.train()
    assert run.checkpointer.list_steps() == ([2] if steps == 3 else [])
    assert f"the weights of step {steps} were not published; the step is lost" in run.logged


def test_a_refit_that_fails_and_a_save_that_fails_too(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.refit_fails = {1: RefitError("policy rank 1 died")}

    def fail(_: Path) -> None:
        raise RunError("checkpoint: policy rank 1 died")

    run.write = fail
    with pytest.raises(RefitError, match="policy rank 1 died"):
        run.train()
    assert "step 1 could not be saved: checkpoint: policy rank 1 died" in run.logged
    assert run.checkpointer.list_steps() == []


def test_a_disk_that_is_full_ends_the_run_with_one_line(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def fail(_: Path) -> None:
        raise OSError(28, "No space left on device")

    run.write = fail
    with pytest.raises(RunError, match=r"checkpoints/step_2 cannot be written: .*No space left on device"):
        run.train()


def test_a_checkpoint_that_was_damaged_since_is_told_when_its_validation_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validating(monkeypatch, {"val_accuracy": 0.7})
    run = Run(tmp_path, replace(LIMITS, val_at_end=True))

    def damage(text: str) -> None:
        if text.startswith("saved"):
            flip(run.checkpointer.locate(2) / "state.json")

    run.logger.note = damage
    with pytest.raises(RunError, match=r"step_2/state\.json is damaged"):
        run.train(steps=2)


def test_nothing_is_saved_before_the_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(SamplingError):
        run.train(steps=0, error=SamplingError("too few"))
    assert run.checkpointer.list_steps() == []


@pytest.mark.parametrize("error", [RunError("rank 0 died"), OSError(28, "No space left on device")])
def test_the_first_failure_is_the_one_that_is_told(tmp_path: Path, error: Exception) -> None:
    run = Run(tmp_path)

    def fail(_: Path) -> None:
        raise error

    run.write = fail
    with pytest.raises(SamplingError, match="the engine died"):
        run.train(steps=1, error=SamplingError("the engine died"))
    (message,) = [line for line in run.logged if line.startswith("step 1 could not be saved: ")]
    assert str(error) in message


def test_a_validation_that_fails_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validating(monkeypatch, SamplingError("the environment does not answer"))
    run = Run(tmp_path, replace(LIMITS, val_period=3))
    with pytest.raises(SamplingError, match="does not answer"):
        run.train()
    assert [line for line in run.logged if line.startswith("step")] == ["step 1", "step 2", "step 3"]
    assert run.checkpointer.list_steps() == [2, 3]
    validating(monkeypatch, {"val_accuracy": 0.4})
    repaired = Run(tmp_path, run.config.grpo)
    repaired.state = run.saved(3)[0]["save_state"]
    repaired.train(steps=4)
    assert [line for line in repaired.logged if not line.startswith("dump")][:2] == ["validation 3", "step 4"]
    assert repaired.saved(3)[0]["metrics"]["val_accuracy"] == 0.4


def test_a_last_validation_that_fails_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validating(monkeypatch, SamplingError("the environment does not answer"))
    run = Run(tmp_path, replace(LIMITS, val_at_end=True))
    with pytest.raises(SamplingError, match="does not answer"):
        run.train(steps=3)
    assert run.checkpointer.list_steps() == [2, 3]


def test_the_last_validation_is_in_the_checkpoint_it_is_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data ends at step 4, which is saved by then, without what dynamic sampling drew since."""
    validating(monkeypatch, {"val_accuracy": 0.7, "val_reward": 0.6})
    run = Run(tmp_path, replace(LIMITS, val_at_end=True, early_stop=EarlyStopConfig(enabled=True, threshold=0.9)))
    run.train(steps=4)
    state, loader = run.saved(4)
    assert state["metrics"] == {**SOUND, "val_accuracy": 0.7, "val_reward": 0.6}
    assert (state["save_state"]["val_accuracy"], state["save_state"]["early_stop"]["best"]) == (0.7, 0.7)
    assert (state["save_state"]["generation_batches"], loader["position"], state["batch_cache"]) == (0, 4, [])
    again = Run(tmp_path, run.config.grpo)
    again.state = state["save_state"]
    again.train(steps=4)
    assert "validation 4" in run.logged
    assert "validation 4" not in again.logged, "a finished run that is started again validates no second time"


def test_a_run_that_goes_on_from_step_0_does_not_validate_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validating(monkeypatch, {"val_accuracy": 0.3})
    patient = EarlyStopConfig(enabled=True, patience=1)
    run = Run(tmp_path, replace(LIMITS, val_at_start=True, early_stop=patient))
    run.train(steps=0)
    again = Run(tmp_path, run.config.grpo)
    again.state = run.saved(0)[0]["save_state"]
    again.train(steps=2)
    assert (run.logged.count("validation 0"), again.logged.count("validation 0")) == (1, 0)
    assert again.state["total_steps"] == 2, "the same validation twice is no lack of improvement"


def test_a_ranking_metric_that_no_step_has_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.config.checkpointing = replace(CHECKPOINTING, metric_name="los", keep_top_k=2)
    with pytest.raises(RunError, match=r"checkpointing.metric_name=los .* not a metric of a step: loss"):
        run.train()
    assert run.checkpointer.list_steps() == [1]


def test_a_ranking_metric_that_only_some_steps_have_does_not(tmp_path: Path) -> None:
    run = Run(tmp_path, loss=LossConfig(positive_example_nll_weight=0.1))
    run.config.checkpointing = replace(CHECKPOINTING, metric_name="positive_nll", keep_top_k=2)
    run.train(steps=3)
    assert run.checkpointer.list_steps() == [2, 3]


def test_a_figure_of_an_environment_ranks_under_its_whole_name(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.config.checkpointing = replace(CHECKPOINTING, metric_name="env/f2", keep_top_k=2)
    run.report = replace(run.report, metrics={**run.report.metrics, "env/f1": 1.0})
    text = r"checkpointing.metric_name=env/f2 ranks checkpoints, and step 1 has no such figure; it has env/f1"
    with pytest.raises(RunError, match=text):
        run.train()
    assert run.checkpointer.list_steps() == [1]
    run.train(steps=4)  # a run that goes on only notes it: the figure may be a rare one
    assert "Checkpoints of such steps rank last" in run.notes["ranking"]
    run = Run(tmp_path / "right")
    run.config.checkpointing = replace(CHECKPOINTING, metric_name="env/f1", keep_top_k=2)
    run.report = replace(run.report, metrics={**run.report.metrics, "env/f1": 1.0})
    run.train(steps=4)
    assert run.notes == {}


def test_the_rollouts_of_a_step_are_on_disk_before_it_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing goes on beside the step and its validation; a step in the metrics has its rollouts."""
    validating(monkeypatch, {"val_accuracy": 0.4})
    run = Run(tmp_path, replace(LIMITS, val_period=2))
    run.train(steps=2)
    lines = [line for line in run.logged if line.split()[0] in {"dump", "step", "validation"}]
    assert lines == [
        *["dump 1 begins", "dump 1 is there", "step 1"],
        *["dump 2 begins", "validation 2", "dump 2 is there", "step 2"],
    ]


@pytest.mark.parametrize("error", [RunError("the loss is not finite"), ModelLostError("rank 0 is gone")], ids=str)
def test_a_step_that_fails_leaves_its_rollouts(error: RunError, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.dumps.hold(1, [], None, make_facts())
    with pytest.raises(type(error), match=str(error)):
        run.train(steps=0, error=error)
    assert "dump 1 is left" in run.logged


def test_the_failure_that_came_first_is_told_when_the_rollouts_cannot_be_written_either(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def fail() -> None:
        raise RunError("the disk is full")

    run.dumps.write_all = fail
    with pytest.raises(RunError, match="the loss is not finite"):
        run.train(steps=0, error=RunError("the loss is not finite"))
    assert "the rollouts of the step that failed could not be written: the disk is full" in run.logged


def test_a_step_whose_rollouts_cannot_be_written_is_saved_before_the_run_ends(tmp_path: Path) -> None:
    run = Run(tmp_path)

    def fail(_: int) -> None:
        raise RunError("the disk is full")

    run.dumps.finish = fail
    with pytest.raises(RunError, match="the disk is full"):
        run.train()
    assert "step 1" in run.logged
    assert run.checkpointer.list_steps() == [1], "the models have learnt from it"


def test_what_waits_is_saved_with_its_tokens(tmp_path: Path) -> None:
    """The driver holds references; a checkpoint holds what a new run can read."""
    run = Run(tmp_path)
    groups = [[make_trajectory(3, reward=0.5), make_trajectory(1)], [make_trajectory(2, logprobs=[-0.1, -0.2])]]
    groups[0][1].routed = np.array([[3, 1]], dtype=np.uint8)
    run.batch_cache[:] = run.rollouts.put(groups)
    run.train(steps=2)
    state, _ = run.saved(2)
    resumed = [[Trajectory.from_row(row) for row in group] for group in state["batch_cache"]]
    assert plain_groups(resumed) == plain_groups(groups)


def test_what_waits_is_saved_with_its_images(tmp_path: Path) -> None:
    """Another folder can go on from the checkpoint, whose manifest has the images."""
    run, contents = Run(tmp_path / "run"), [b"of the prompt", b"of a turn"]
    images = [StoredImage(store_image(tmp_path / "run" / "images", content), 2, 2) for content in contents]
    store_image(tmp_path / "run" / "images", b"of another prompt")
    groups = [[make_trajectory(3, images=images[:1]), make_trajectory(1, images=images)]]
    run.batch_cache[:] = run.rollouts.put(groups)
    run.train(steps=2)
    checkpoint = run.checkpointer.locate(2)
    state = read_state(checkpoint)
    resumed = [[Trajectory.from_row(row) for row in group] for group in state["batch_cache"]]
    assert plain_groups(resumed) == plain_groups(groups)
    assert {file.read_bytes() for file in (checkpoint / "images").iterdir()} == set(contents)
    flip(checkpoint / "images" / images[1].digest)
    with pytest.raises(CheckpointError, match=images[1].digest):
        verify_checkpoint(checkpoint)


def test_a_step_that_teaches_nothing_is_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.report = StepReport({**SOUND, "valid_tokens": 0.0}, {}, {}, [])
    run.train(steps=2)
    assert run.logged.count("step 1: no response is in the loss, so nothing is learnt from it") == 1
    assert run.logged.count("step 2: no response is in the loss, so nothing is learnt from it") == 1
    assert run.state["total_valid_tokens"] == 0


def test_engines_that_were_replaced_are_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.report = replace(run.report, remarks=("generation engine 1 was replaced: it burns",))
    run.train(steps=1)
    assert "step 1: generation engine 1 was replaced: it burns" in run.logged


def test_responses_that_nobody_scored_are_told_once(tmp_path: Path) -> None:
    """Not those that failed: they have a reason, and figures of their own."""
    run = Run(tmp_path)
    failed, fine = failed_trajectory(prompt_idx=1), make_trajectory(prompt_idx=2)
    run.report = StepReport(SOUND, {}, {}, [failed.outcome, fine.outcome])
    run.train(steps=1)
    assert run.notes == {}
    unscored = make_trajectory(prompt_idx=7, reward=None)
    run = Run(tmp_path / "other")
    run.report = StepReport(SOUND, {}, {}, [trajectory.outcome for trajectory in (failed, fine, unscored, unscored)])
    run.train(steps=2)
    assert run.notes["unscored"].startswith(
        "no reward function gave a reward for 2 of 4 responses (row 7 of data.train_path for one)"
    )


def test_periodic_validations_may_begin_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    validating(monkeypatch, {"val_accuracy": 0.4})
    run = Run(tmp_path, replace(LIMITS, val_period=2, val_delay=5))
    run.train()
    assert [line for line in run.logged if line.startswith("validation")] == ["validation 6", "validation 8"]


def test_an_interruption_and_a_full_disk_name_the_last_checkpoint(tmp_path: Path) -> None:
    goes_on = "checkpoints/step_2 is the last one: the run goes on from there when it is started again"
    with pytest.raises(KeyboardInterrupt) as interrupted:
        Run(tmp_path).train(steps=3, error=KeyboardInterrupt())  # type: ignore[arg-type]
    assert interrupted.value.__notes__ == [
        f"{goes_on}; `touch {tmp_path / 'stop'}` would have ended it after a step, saved"
    ]
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "metrics.jsonl"))
    with pytest.raises(RunError, match=f"metrics.jsonl cannot be written: No space left on device; {goes_on}"):
        Run(tmp_path).train(steps=3, error=full)


def test_failed_reward_functions_are_told_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    outcome = make_trajectory(3)
    outcome.reward_errors = 2
    run.report = StepReport(SOUND, {}, {}, [outcome])
    run.train(steps=2)
    assert run.notes["reward errors"].startswith("reward functions failed 2 times in step 1")
