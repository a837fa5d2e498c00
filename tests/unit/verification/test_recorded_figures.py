"""Figures that a run measured are read first, and which explanation of a record is named."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_grpo import doctor
from megatron_grpo.verification.doctor.diagnosis import FLOAT32, Distance, is_rounding
from megatron_grpo.verification.doctor.evidence import Rollout
from megatron_grpo.verification.doctor.explanation import SCREENED, Search
from megatron_grpo.verification.doctor.law import Law, Tokens
from megatron_grpo.verification.doctor.recorded_figures import (
    RecordedFigures,
    find_suspicious_steps,
    is_beyond,
    read_run_figures,
)
from megatron_grpo.verification.doctor.suspects.side import Candidate, Side, Suspect, fit
from tests.support.recorded_runs import RecordedRun, make_run, sample_rollouts


def write_metrics(run_dir: Path, *errors: float | None, **metrics: Any) -> None:
    rows = [
        {"step": number, "token_mult_prob_error": error, "token_mult_prob_error_max": error, **metrics}
        for number, error in enumerate(errors, start=1)
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_figures_that_were_not_finite_are_not_missing(tmp_path: Path) -> None:
    write_metrics(tmp_path, 1.5, None)
    figures = read_run_figures(tmp_path)
    assert figures[1].excess == 0.5
    assert figures[2].error is not None
    assert math.isnan(figures[2].error)
    assert figures[2].excess == math.inf
    assert read_run_figures(tmp_path / "no") == {}


def test_suspicious_steps_are_those_that_stand_out_or_were_noticed() -> None:
    noise = {number: RecordedFigures(error=1.002 + 1e-4 * number) for number in range(1, 8)}
    two_more = {**noise, 8: RecordedFigures(error=1.2), 9: RecordedFigures(error=9.2)}
    assert find_suspicious_steps(noise, "bfloat16", has_older_tokens=False) == []
    assert find_suspicious_steps(two_more, "bfloat16", has_older_tokens=False) == [9, 8]
    assert find_suspicious_steps(two_more, "bfloat16", has_older_tokens=True) == [9]
    noticed = {**noise, 8: RecordedFigures(error=1.004, is_off=1.0)}
    assert find_suspicious_steps(noticed, "bfloat16", has_older_tokens=True) == [8]
    wrong = dict.fromkeys(range(4), RecordedFigures(error=9.2)) | {4: RecordedFigures(error=1.0 + 3e-7)}
    assert find_suspicious_steps(wrong, "float32", has_older_tokens=False) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("recorded", "computed", "rounding", "beyond"),
    [
        (14837.0, 1e-7, 3e-5, True),
        (math.inf, 0.5, 0.1, True),
        (math.nan, 0.5, 0.1, True),
        (0.003, 0.002, 0.004, False),
        (8.2, 8.0, 3e-5, False),
        (2e-4, 1e-7, 6e-5, False),
        (4e-3, 1e-6, 6e-5, True),
    ],
)
def test_a_recorded_error_has_to_be_explained(recorded: float, computed: float, rounding: float, beyond: bool) -> None:
    assert is_beyond(recorded, computed, rounding) == beyond


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    run = make_run(tmp_path_factory.mktemp("run"), "qwen3", "policy.parallel.tensor=2", "policy.packing=false")
    run.add_version()
    run.write(1, sample_rollouts(run.versions[0], run.prompts()))
    run.write(2, sample_rollouts(run.versions[1], run.prompts(), version=1))
    return run


def examine(run: RecordedRun, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = doctor.main([str(run.run_dir), *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("error", [14838.0, 9.2, 1.004, None])
def test_a_run_is_not_healthy_against_its_record(
    run: RecordedRun, error: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write(2, sample_rollouts(run.versions[1], run.prompts(), version=1))
    write_metrics(run.run_dir, 1.0000003, error)
    code, diagnosis = examine(run, capsys, "step=2")
    (finding,) = diagnosis["findings"]
    assert (code, finding["cause"], finding["name"]) == (1, "layout", "recorded_error")
    assert "python -m megatron_grpo.replay" in finding["key"]
    assert "policy.parallel.tensor=1" in finding["key"]
    assert diagnosis["error"] == pytest.approx(1.0, abs=1e-4), "computed here"
    recorded = diagnosis["recorded_error"]
    assert recorded == error or (error is None and math.isnan(recorded))


def test_the_step_whose_error_stands_out_is_examined(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    run.write(2, sample_rollouts(run.versions[1], run.prompts(), version=1))
    write_metrics(run.run_dir, 9.2, 1.0000003)
    code, diagnosis = examine(run, capsys)
    assert (code, diagnosis["step"]) == (1, 1)
    code, diagnosis = examine(run, capsys, "step=2")
    assert code == 1, "another step of the run is off"
    assert "step(s) 1 (9.2)" in diagnosis["findings"][0]["text"]
    write_metrics(run.run_dir, 1.0000003, 1.0000002)
    code, diagnosis = examine(run, capsys)
    assert (code, diagnosis["step"], diagnosis["findings"]) == (0, 2, [])


def test_every_engine_is_scored_although_few_tokens_are(
    run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second sample of each prompt is of an engine that is a version behind."""
    right, behind = (sample_rollouts(run.versions[number], run.prompts(), version=1) for number in (1, 0))
    run.write(2, [behind[number] if number % 2 else right[number] for number in range(len(right))])
    (run.run_dir / "metrics.jsonl").unlink(missing_ok=True)
    code, diagnosis = examine(run, capsys, "step=2", "tokens=30")
    assert (code, [finding["name"] for finding in diagnosis["findings"]]) == (1, ["version_behind"])


def test_a_run_that_refused_a_refit_is_not_healthy(run: RecordedRun, capsys: pytest.CaptureFixture[str]) -> None:
    """No step is wrong then: the run ended before the engines served."""
    run.write(2, sample_rollouts(run.versions[1], run.prompts(), version=1))
    write_metrics(run.run_dir, 1.0000003, 1.0000002)
    summary = run.run_dir / "summary.json"
    reason = "version 2 is not served: generation engine 0, worker 1: lm_head.weight differs"
    summary.write_text(json.dumps({"outcome": "failed", "reason": reason}))
    code, diagnosis = examine(run, capsys)
    assert (code, [finding["name"] for finding in diagnosis["findings"]]) == (1, ["refused_refit"])
    assert "lm_head.weight differs" in diagnosis["findings"][0]["text"]
    summary.write_text(json.dumps({"outcome": "completed", "reason": None}))
    assert examine(run, capsys)[0] == 0
    canary = {"canary_logprob_error": 4e-3, "throughput": {"canary_limit": 1e-4}}
    write_metrics(run.run_dir, 1.0000003, 1.0000002, **canary)
    code, diagnosis = examine(run, capsys)
    assert (code, diagnosis["findings"][0]["name"]) == (1, "canary")
    summary.unlink()
    (run.run_dir / "metrics.jsonl").unlink(missing_ok=True)


def test_settings_that_engines_reported_are_compared(
    run: RecordedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def other_epsilon(model: Any) -> None:
        for module in model.modules():
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = 0.0123

    run.write(2, sample_rollouts(run.versions[1], run.prompts(), version=1, prepare=other_epsilon))
    (run.run_dir / "metrics.jsonl").unlink(missing_ok=True)
    engines = run.run_dir / "engines.json"
    engines.write_text(json.dumps([{"model": {"rms_norm_eps": 0.0123, "vocab_size": 99999}, "dtype": "torch.float32"}]))
    code, diagnosis = examine(run, capsys, "step=2")
    (finding,) = diagnosis["findings"]
    assert (code, finding["name"], finding["cause"]) == (1, "engine_settings", "layer")
    assert "rms_norm_eps=0.0123" in finding["text"]
    engines.write_text("[")
    assert doctor.main([str(run.run_dir), "step=2"]) == 2
    assert "engines.json is damaged" in capsys.readouterr().err
    engines.unlink()
    assert replace(run).run_dir.is_dir()


COUNT = 40


def make_side(recorded: Tensor, rollouts: int = 4) -> Side:
    """A side whose rollouts have equally many tokens; nothing computes it."""
    size = len(recorded) // rollouts
    tokens = Tokens(torch.zeros(size + 1, dtype=torch.int64), torch.arange(1, size + 1), torch.ones(size).long())
    rollout: Any = Rollout({"group": 0, "sample": 0}, tokens, torch.arange(size))
    oracle: Any = None
    return Side("engine", oracle, [rollout] * rollouts, [tokens] * rollouts, Law(), recorded)


def candidate(name: str, predicted: Tensor, assumes: int = 1, tensors: int = 1) -> Candidate:
    suspect = Suspect(name, "weights", f"is {name}", "a key", assumes, tensors=tensors)
    return suspect, lambda side: predicted[: len(side.recorded)]


def search(recorded: Tensor, base: Tensor, rounding: Distance = FLOAT32) -> Search:
    return Search(make_side(recorded), base, rounding, time.monotonic() + 60)


def numbers(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(COUNT, generator=torch.Generator().manual_seed(seed))


BASE = numbers(0) - 3
RECORDED = BASE + numbers(1, 0.1)


def test_what_reproduces_the_record_is_named_and_what_comes_near_is_mentioned() -> None:
    tried = search(RECORDED, BASE)
    near, far = RECORDED + numbers(2, 0.003), BASE + 0.3 * (RECORDED - BASE)
    tried_out = [candidate("near", near), candidate("far", far), candidate("exact", RECORDED + 1e-6)]
    assert tried.try_groups([lambda _: iter(tried_out)])
    finding = tried.conclude()
    assert (finding.name, round(finding.explained, 3)) == ("exact", 1.0)
    assert [text.partition(":")[0] for text in finding.others] == ["is near"]


def test_of_equal_explanations_the_one_that_assumes_least_is_named() -> None:
    tried = search(RECORDED, BASE)
    tried.try_groups([lambda _: iter([candidate("set", RECORDED, 5), candidate("tensor", RECORDED + 1e-6, 1)])])
    finding = tried.conclude()
    assert finding.name == "tensor"


def test_of_equal_explanations_that_assume_as_much_the_one_with_the_fewest_tensors_is_named() -> None:
    tried = search(RECORDED, BASE)
    wide, narrow = candidate("projections", RECORDED, 2, 3), candidate("projection", RECORDED + 1e-6, 2, 1)
    tried.try_groups([lambda _: iter([wide, narrow, candidate("order", RECORDED, 3, 1)])])
    finding = tried.conclude()
    assert finding.name == "projection"
    assert "is projections: 100.0%" in finding.others


def test_what_leaves_much_of_the_gap_is_only_mentioned() -> None:
    """77% were once enough for innocent tensors."""
    tried = search(RECORDED, BASE)
    assert not tried.try_groups([lambda _: iter([candidate("innocent", BASE + 0.77 * (RECORDED - BASE))])])
    assert tried.conclude() is None
    assert tried.describe_mentioned() == ["is innocent: 77.0%"]


def test_what_leaves_a_little_is_named_as_not_all() -> None:
    tried = search(RECORDED, BASE)
    tried.try_groups([lambda _: iter([candidate("most", BASE + 0.9 * (RECORDED - BASE))])])
    finding = tried.conclude()
    assert "something else differs, too" in finding.text


def test_near_rounding_a_small_gain_is_no_explanation() -> None:
    """A difference a little above rounding is within it after any gain."""
    rounding = Distance(0.05, 1.0)
    recorded = BASE + numbers(3, 0.07)
    tried = search(recorded, BASE, rounding)
    assert not tried.try_groups([lambda _: iter([candidate("innocent", BASE + 0.3 * (recorded - BASE))])])
    assert tried.conclude() is None


def test_the_closest_on_the_rollouts_that_differ_most_are_tried_on_all() -> None:
    count = 8 * SCREENED
    base, recorded = torch.full((count,), -2.0), torch.full((count,), -2.0)
    recorded[: count // 2] += torch.linspace(0.1, 0.5, count // 2)
    sizes: list[int] = []

    def group(part: Side) -> Iterator[Candidate]:
        def predict(side: Side) -> Tensor:
            sizes.append(len(side.recorded))
            return side.recorded

        for number in range(20):
            yield Suspect(f"suspect {number}", "weights", f"is {number}", "a key"), predict

    side = make_side(recorded, rollouts=32)
    tried = Search(side, base, FLOAT32, time.monotonic() + 60)
    tried.try_groups([group])
    assert sizes[:20] == [SCREENED] * 20
    assert set(sizes[20:]) == {count}
    assert len(sizes) < 40


def test_a_search_ends_in_time_and_says_so() -> None:
    tried = Search(make_side(RECORDED), BASE, FLOAT32, time.monotonic() - 1)
    tried.try_groups([lambda _: iter([candidate("first", BASE), candidate("second", RECORDED)])])
    assert tried.ran_out_of_time
    assert [explanation.suspect.name for explanation in tried.explanations] == ["first"]


def test_rounding_moves_the_same_tokens_the_same_way_and_a_wrong_tensor_does_not() -> None:
    coarse = BASE + numbers(4, 0.01)
    another_program = coarse + numbers(5, 0.005)
    assert is_rounding(make_side(another_program), BASE, coarse)
    wrong_tensor = BASE + numbers(6, 0.01)
    assert not is_rounding(make_side(wrong_tensor), BASE, coarse), "as large, and elsewhere"
    larger = BASE + 10 * (coarse - BASE)
    assert not is_rounding(make_side(larger), BASE, coarse)
    one_sided = BASE + (coarse - BASE).abs()
    assert not is_rounding(make_side(one_sided), BASE, coarse)
    one_rollout = torch.cat([coarse[:10], BASE[10:]])
    assert not is_rounding(make_side(one_rollout), BASE, coarse)


def test_a_number_is_fitted_until_it_predicts_the_record() -> None:
    side = make_side(BASE * 1.234567)
    fitted = fit(side, [0.5, 1.0, 2.0, 4.0], lambda tried: (BASE * number for number in tried))
    assert abs(fitted - 1.234567) < 1e-5
