"""Steps whose probability error leaves the noise: planted series, messages about episodes, a limit, and a resume."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_grpo.algorithms import ppo
from megatron_grpo.algorithms.context import PPORun, ProbErrorState
from megatron_grpo.algorithms.prob_error import NoiseBounds, compare_with_noise, follow_episode
from megatron_grpo.config.errors import DisagreementError
from megatron_grpo.preflight.load import compose_config
from tests.support.fake_rollouts import FakeRay
from tests.support.grpo_run import KL_IN_REWARD, SHAPE, Run
from tests.unit.algorithms.test_ppo_step import make_run, prompts

TOKENS = 1000
LIMIT = 2.0


def empty_state() -> ProbErrorState:
    return ProbErrorState(precision="float32", fresh=[], stale=[], episode=None, episodes=0)


@pytest.fixture(autouse=True)
def without_ray(fake_ray: FakeRay) -> FakeRay:
    return fake_ray


def bounds(*overrides: str, layers: int = 28) -> NoiseBounds:
    return NoiseBounds.from_config(compose_config(["+exp=quickstart", *overrides]), replace(SHAPE, layers=layers))


def row(excess: float, worst: float | None = None, divergence: float = 0.0) -> dict[str, float]:
    """Metrics of a step whose mean exceeds 1 by this, with many tokens to blame unless one worst is named."""
    largest = 1.0 + 10 * abs(excess) if worst is None else worst
    return {
        "token_mult_prob_error": 1.0 + excess,
        "token_mult_prob_error_max": largest,
        "gen_kl_error": divergence,
        "valid_tokens": TOKENS,
    }


def off_steps(
    rounding: NoiseBounds, rows: list[dict[str, float]], ages: Callable[[int], int] = lambda step: 0
) -> list[int]:
    """Numbers of the steps that are off, from 1."""
    state = empty_state()
    differences = [
        compare_with_noise(state, rounding, row, ages(step), None if ages(step) else LIMIT)
        for step, row in enumerate(rows)
    ]
    return [step for step, difference in enumerate(differences, 1) if difference.is_off]


FLOAT32, BFLOAT16 = bounds(), bounds("policy.precision=bfloat16")


def noisy(level: float, steps: int, *, seed: int = 0, spread: float = 0.3) -> list[float]:
    draw = random.Random(seed)
    return [level * math.exp(draw.gauss(0, spread)) for _ in range(steps)]


@pytest.mark.parametrize("level", [1e-7, 1e-6, 2e-5])
def test_healthy_float32_is_never_off(level: float) -> None:
    assert off_steps(FLOAT32, [row(excess) for excess in noisy(level, 500)]) == []


@pytest.mark.parametrize(("layers", "level"), [(2, 0.0055), (8, 0.015), (28, 0.015), (48, 0.03)])
def test_healthy_bfloat16_is_never_off(layers: int, level: float) -> None:
    rounding = bounds("policy.precision=bfloat16", layers=layers)
    assert off_steps(rounding, [row(excess) for excess in noisy(level, 500, spread=0.2)]) == []


def test_rounding_that_grows_a_little_as_the_policy_learns_is_healthy() -> None:
    assert off_steps(BFLOAT16, [row(0.012 * (1 + step / 500)) for step in range(500)]) == []


@pytest.mark.parametrize("excess", [14837.0, 8.2, 0.02, 0.011])
def test_a_run_that_is_wrong_from_its_first_step_is_noticed_there(excess: float) -> None:
    assert off_steps(FLOAT32, [row(excess)] * 3) == [1, 2, 3]


def test_a_run_that_is_wrong_from_its_seventh_step_is_noticed_there() -> None:
    for rounding, level, excess in ((FLOAT32, 1e-6, 0.004), (BFLOAT16, 0.012, 0.1), (BFLOAT16, 0.005, 0.05)):
        rows = [row(level)] * 6 + [row(excess)] * 3
        assert off_steps(rounding, rows) == [7, 8, 9]


def test_an_error_that_grows_by_5_percent_a_step_is_noticed() -> None:
    """Against the latest steps it never stands out."""
    for rounding, level, factor in ((FLOAT32, 1e-5, 20), (BFLOAT16, 0.012, 4)):
        rows = [row(level * 1.05**step) for step in range(200)]
        first = off_steps(rounding, rows)[0]
        assert level * 1.05 ** (first - 1) < factor * level


def test_a_single_token_makes_no_step_stand_out() -> None:
    spike = row(0.012 + 0.15, worst=151.0)
    assert off_steps(BFLOAT16, [row(0.012)] * 9 + [spike] + [row(0.012)] * 9) == []
    two = {**spike, "token_mult_prob_error_max": 76.0}
    assert off_steps(BFLOAT16, [row(0.012)] * 9 + [two]) == [10], "two of them do"
    alone = row(22.0, worst=22001.0)
    assert off_steps(BFLOAT16, [row(0.012)] * 9 + [alone]) == [10], "or one that moves the mean beyond the hard limit"
    assert off_steps(FLOAT32, [row(math.exp(40) / TOKENS, worst=math.exp(40))]) == [1]


def test_a_figure_that_is_not_a_number_is_off_and_no_noise() -> None:
    state = empty_state()
    assert compare_with_noise(state, FLOAT32, row(math.nan), 0, LIMIT).is_off
    assert state["fresh"] == []


ASYNCHRONOUS = [0.0034, 0.016, 0.047, 0.013, 0.0061, 0.03, 0.045, 0.033, 0.015, 0.014, 0.014, 0.015, 0.016, 0.0064]
"""gen_kl_error of steps one update behind, and below of four updates behind, with a learning rate of 1e-3."""
FOUR_BEHIND = [0.0034, 0.035, 0.15, 0.21, 0.3, 0.22, 0.097, 0.28, 0.29, 0.5, 0.42, 0.16, 0.25, 0.061, 0.023]


@pytest.mark.parametrize(("divergences", "age"), [(ASYNCHRONOUS, 1), (FOUR_BEHIND, 4)])
def test_what_is_learnt_while_tokens_are_drawn_is_healthy(divergences: list[float], age: int) -> None:
    """The error itself is up to 25 then; at first all tokens are of the weights that train."""
    rows = [row(3e-7), *(row(20.0, divergence=divergence) for divergence in divergences)]
    ages = lambda step: min(step, age)  # noqa: E731
    assert off_steps(FLOAT32, rows, ages) == []
    assert off_steps(FLOAT32, [row(0.02), *rows[1:]], ages) == [1], "so that a defect shows there as ever"
    assert off_steps(FLOAT32, [*rows, row(20.0, divergence=8.0)], ages) == [len(rows) + 1]


def test_a_policy_that_learns_ever_faster_stays_within_its_noise() -> None:
    rows = [row(1.0, divergence=0.001 * 1.05**step) for step in range(120)]
    assert off_steps(FLOAT32, rows, lambda step: 1) == []


def test_sampling_that_differs_on_purpose_is_measured_first() -> None:
    rounding, state = (
        bounds("generation.repetition_penalty=1.2"),
        empty_state(),
    )
    differences = [compare_with_noise(state, rounding, row(excess), 0, None) for excess in [*noisy(0.6, 100), 4.0]]
    assert [difference.is_off for difference in differences] == [False] * 100 + [True]
    assert "token_mult_prob_error_bound" not in differences[0].metrics, "no number stands for infinity"


def test_coarser_sides_have_wider_bounds() -> None:
    engine = bounds("generation.engine.dtype=bfloat16")
    assert engine == BFLOAT16
    assert bounds("+generation.engine_args.kv_cache_dtype=fp8").first > BFLOAT16.first > FLOAT32.first
    assert bounds(layers=2).first == FLOAT32.first
    assert bounds("policy.precision=bfloat16", layers=2).first < BFLOAT16.first


class Judged(Run):
    """A run whose policy disagrees by a number of nats at every token, from some step on."""

    def steps(self, *nats: float) -> list[Any]:
        reports = []
        for apart in nats:
            self.policy.logprobs = {} if apart == 0 else dict.fromkeys(range(4), -1 / 3 - apart)
            version = self.run.state["total_steps"]  # drawn from the weights that train
            self.trajectories[:] = [
                replace(trajectory, spans=[span._replace(version=version) for span in trajectory.spans])
                for trajectory in self.trajectories
            ]
            reports.append(self.step())
        return reports


TWO_PASSES = "grpo.num_iterations=2"  # so that log-probabilities are computed before the first optimizer step


def list_alarms(reports: list[Any]) -> list[int]:
    return [
        step for step, report in enumerate(reports, 1) if any("disagree more than" in text for text in report.remarks)
    ]


def remarks_by_step(reports: list[Any]) -> dict[int, str]:
    return {step: " ".join(report.remarks) for step, report in enumerate(reports, 1) if report.remarks}


def test_a_message_tells_that_an_episode_begins_and_the_checks_follow_the_next_refit(tmp_path: Path) -> None:
    run = Judged(tmp_path, TWO_PASSES)
    reports = run.steps(0, 0, 0.1, 0.1, 0, 0.1, *[0] * 4, 0.1)
    assert list_alarms(reports) == [3, 11], "a step of calm is no end, three are"
    assert [report.metrics["token_mult_prob_error_off"] for report in reports[:6]] == [0, 0, 1, 1, 0, 1]
    third = run.log.index("checks are due")
    assert run.log[third + 1] == "version 3", "in the very step"
    assert run.log.count("checks are due") == 2
    (text,) = reports[2].remarks
    assert (
        "token_mult_prob_error is 1.10517 (largest of a token: 1.10517), and token_mult_prob_error up to 1.001" in text
    )
    assert "This step's refit compares the canary and all weights." in text
    assert f"a checkpoint is saved after this step, so that python -m megatron_grpo.doctor {tmp_path} step=4" in text
    assert [report.needs_checkpoint for report in reports[:4]] == [False, False, True, False]


def test_an_episode_is_told_when_it_gets_far_worse_and_when_it_is_over(tmp_path: Path) -> None:
    run = Judged(tmp_path, TWO_PASSES, "refit.prob_error_limit=null")
    nats = [0, 0, 0.005, 0.008, 0.04, 0.1, 0.3, 0, 2.0, *[0] * 5, 0.1]
    reports = run.steps(*nats)
    texts = remarks_by_step(reports)
    assert sorted(texts) == [3, 6, 9, 12, 15]
    assert "more than noise explains: token" in texts[3]
    times = (math.exp(0.1) - 1) / (math.exp(0.005) - 1)
    assert f"far more than before: token_mult_prob_error is {math.exp(0.1):.6g}" in texts[6]
    assert (
        f"That is {times:.3g} times as far beyond the bound as reported of the episode that began with step 3."
        in (texts[6])
    )
    assert "This step's refit compares the canary and all weights." in texts[6]
    assert f"doctor {tmp_path} step=6 names the reason" in texts[6]
    assert "far more than before" in texts[9]
    assert texts[12] == (
        "training and generation agree again: 6 of the steps 3 to 9 were beyond the bound (token_mult_prob_error was "
        f"at most {reports[8].metrics['token_mult_prob_error']:.6g}), and the last 3 steps are within it"
    )
    assert "more than noise explains (episode 2 of this run): token" in texts[15]
    assert run.log.count("checks are due") == 4


def test_a_fault_that_comes_and_goes_is_told_each_time_but_saves_few_checkpoints(tmp_path: Path) -> None:
    reports = Judged(tmp_path, TWO_PASSES).steps(*[0, 0.1, 0, 0, 0] * 6)
    assert list_alarms(reports) == [2, 7, 12, 17, 22, 27]
    ends = [step for step, text in remarks_by_step(reports).items() if "agree again: step" in text]
    assert ends == [5, 10, 15, 20, 25, 30]
    assert [step for step, report in enumerate(reports, 1) if report.needs_checkpoint] == [2, 7, 12]


def test_a_checkpoint_without_episodes_goes_on_with_its_noise(tmp_path: Path) -> None:
    run = Judged(tmp_path, TWO_PASSES)
    run.steps(0)
    state: Any = run.run.state["prob_error"]
    del state["episode"], state["episodes"]
    assert list_alarms(run.steps(0, 0.1)) == [2]


def test_a_figure_that_is_not_a_number_is_far_worse_once() -> None:
    state = empty_state()
    ratios = [compare_with_noise(state, FLOAT32, row(excess), 0, LIMIT).ratio for excess in (0.002, math.nan, math.nan)]
    changes = [follow_episode(state, step, 1.0, ratio) for step, ratio in enumerate(ratios, 1)]
    assert [change and change.kind for change in changes] == ["begin", "worse", None]


def test_a_step_off_by_its_worst_token_alone_does_not_hide_what_follows() -> None:
    state = empty_state()
    alone = compare_with_noise(state, FLOAT32, row(math.exp(40) / TOKENS, worst=math.exp(40)), 0, LIMIT)
    assert alone.is_off
    assert follow_episode(state, 1, 1.0, alone.ratio) is not None
    slight = compare_with_noise(state, FLOAT32, row(0.002), 0, LIMIT)
    assert follow_episode(state, 2, 1.0, slight.ratio) is None
    large = compare_with_noise(state, FLOAT32, row(0.02), 0, LIMIT)
    change = follow_episode(state, 3, 1.0, large.ratio)
    assert change is not None
    assert change.kind == "worse"


def test_the_first_step_can_be_examined_at_once(tmp_path: Path) -> None:
    (report,) = Judged(tmp_path, TWO_PASSES, "refit.canary=false", "refit.weight_check_period=null").steps(0.1)
    assert not report.needs_checkpoint
    (text,) = report.remarks
    assert f" would be noise. python -m megatron_grpo.doctor {tmp_path} step=1 names the reason" in text


def test_a_resume_goes_on_with_the_noise_and_the_episode(tmp_path: Path) -> None:
    full, first, second = (Judged(tmp_path, TWO_PASSES) for _ in range(3))
    expected = full.steps(*[1e-4] * 5, 0.1, 0.1, 3.5e-4)
    steps = first.steps(*[1e-4] * 5, 0.1)
    second.run.state = json.loads(json.dumps(first.run.state))
    steps += second.steps(0.1, 3.5e-4)
    assert [report.metrics for report in steps] == [report.metrics for report in expected]
    assert list_alarms(steps) == list_alarms(expected) == [6]
    assert steps[-1].metrics["token_mult_prob_error_off"] == 1, "three times the noise of the first steps"


@pytest.mark.parametrize(
    "recorded", [[], ["debug.rollouts_from=recording", "data.val_path=null", "checkpointing=none"]]
)
def test_noise_that_is_measured_anew_is_told(recorded: list[str], tmp_path: Path) -> None:
    run = Judged(tmp_path, TWO_PASSES, *recorded)
    run.run.state["total_steps"] = 4  # of a checkpoint that lacks it
    (report,) = run.steps(0)
    (text,) = report.remarks
    assert text == "the noise of token_mult_prob_error is measured from this step on, since the checkpoint has none"
    run.run.state["prob_error"]["precision"] = "bfloat16"
    (report,) = run.steps(0)
    assert "since the checkpoint's was measured in bfloat16" in report.remarks[0]


def test_a_run_whose_policy_begins_to_learn_later_measures_nothing_anew(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "ppo.policy_training_start_step=1")
    for number in (1, 2):
        report = ppo.ppo_step(run, prompts())
        assert report is not None
        assert list(report.remarks) == []
        assert ("token_mult_prob_error_off" in report.metrics) == (number == 2)
        run.state["total_steps"] += 1


@pytest.mark.parametrize(
    "options",
    [
        [TWO_PASSES],
        ["policy.train_global_batch_samples=2"],
        ["grpo.seq_logprob_error_threshold=1e9"],
        [*KL_IN_REWARD, "grpo.normalize_rewards=false"],
    ],
)
def test_past_the_limit_nothing_is_learnt_from_a_step(options: list[str], tmp_path: Path) -> None:
    """Of a whole step whose log-probabilities come first; the last two of its responses disagree."""
    run = Run(tmp_path, *options)
    run.policy.logprobs = {2: -1 / 3 - 3.0, 3: -1 / 3 - 3.0}
    with pytest.raises(DisagreementError) as caught:
        run.step()
    error = (1 + math.exp(3.0)) / 2
    assert not run.policy.lessons
    assert not [line for line in run.log if line.startswith(("version", "dump"))]
    metrics = caught.value.metrics
    assert metrics["token_mult_prob_error"] == pytest.approx(error, rel=1e-5)
    assert (metrics["token_mult_prob_error_off"], metrics["optimizer_steps"], metrics["valid_tokens"]) == (1, 0, 12)
    text = str(caught.value)
    assert f"step 1: token_mult_prob_error is {error:.6g} (largest of a token: 20.0855), more than " in text
    assert "refit.prob_error_limit=2:" in text
    assert f"python -m megatron_grpo.doctor {tmp_path} step=1 names the reason" in text


@pytest.mark.parametrize(
    ("options", "stops"),
    [
        (["refit.prob_error_limit=20"], False),
        (["refit.prob_error_limit=null"], False),
        (["generation.repetition_penalty=1.1"], False),
        (["generation.repetition_penalty=1.1", "refit.prob_error_limit=3"], True),
        (["generation.top_p=0.9"], True),
    ],
)
def test_when_the_limit_applies(options: list[str], stops: bool, tmp_path: Path) -> None:
    run = Run(tmp_path, TWO_PASSES, *options)
    run.policy.logprobs = dict.fromkeys(range(4), -1 / 3 - 2.0)
    if stops:
        with pytest.raises(DisagreementError):
            run.step()
    else:
        run.step()


@pytest.mark.parametrize(("base_overrides", "stops"), [([], False), (["refit.prob_error_limit=3"], True)])
def test_the_default_is_not_applied_to_older_tokens(base_overrides: list[str], stops: bool, tmp_path: Path) -> None:
    run = Run(tmp_path, TWO_PASSES, *base_overrides)
    run.run.state["total_steps"] = 2  # the tokens are of version 0
    run.policy.logprobs = dict.fromkeys(range(4), -1 / 3 - 2.0)
    if stops:
        with pytest.raises(DisagreementError):
            run.step()
    else:
        assert "gen_kl_error_bound" in run.step().metrics


def test_a_refused_step_leaves_the_value_model_as_it_was(tmp_path: Path) -> None:
    """Also where only the ranks of the policy know the error."""
    from megatron_grpo.trainer.model_ranks import RefusedStepError

    run, log = make_run(tmp_path, "ppo.policy_training_start_step=0")
    assert isinstance(run, PPORun)
    moments = {"sampling_importance_ratio": 1.0, "sampling_importance_ratio_squared": 1.0}
    figures = {"token_mult_prob_error": 9.2, "token_mult_prob_error_max": 80.0, "loss": 1.0, **moments}

    def refuses(*_: Any) -> Any:
        raise RefusedStepError(figures)

    run.policy.train = refuses  # type: ignore[method-assign]
    with pytest.raises(DisagreementError, match=r"token_mult_prob_error is 9\.2") as caught:
        ppo.ppo_step(run, prompts())
    assert "value learns" not in log
    assert caught.value.metrics["effective_sample_size"] == 1
    assert caught.value.metrics.keys().isdisjoint({"loss", "sampling_importance_ratio_squared"})
