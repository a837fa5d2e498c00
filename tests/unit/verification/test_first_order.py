"""The doctor on further defects, the loop that ran, and effects of changes to first order."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_grpo import doctor
from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.schema import Config
from megatron_grpo.observability.run_files import read_lines
from megatron_grpo.run.directory import load_run_config, record_start
from megatron_grpo.verification.doctor import evidence, examination
from megatron_grpo.verification.doctor.evidence import read_rollout
from megatron_grpo.verification.doctor.law import Law
from megatron_grpo.verification.doctor.suspects.effects import compute_effects, make_part_probe
from megatron_grpo.verification.doctor.suspects.parts import list_heads
from megatron_grpo.verification.doctor.suspects.reordered import Axis, list_axes
from megatron_grpo.verification.doctor.suspects.side import Side
from megatron_grpo.verification.oracle import Oracle
from tests.support.planted.cases import CASES, DEFECTS, HEALTHY, Case, examine, fresh, verdict
from tests.support.planted.runs import RUNS
from tests.support.recorded_runs import RecordedRun, make_run, sample_rollouts

STEP = 1e-3
"""Share of a change that is made."""


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Side:
    """The record of two rollouts of a small mixture of experts."""
    run = make_run(tmp_path_factory.mktemp("run"), "qwen3_moe")
    drawn = sample_rollouts(run.versions[0], run.prompts()[:2], samples=1)
    rows = [
        {
            "token_ids": trajectory.token_ids,
            "logprobs": trajectory.logprobs,
            "spans": [tuple(span) for span in trajectory.spans],
        }
        for trajectory in drawn
    ]
    rollouts = [rollout for row in rows if (rollout := read_rollout(row, 0, recomputed=False))]
    recorded = torch.cat([rollout.read_column("logprobs") for rollout in rollouts])
    return Side(
        "engine", Oracle(run.versions[0]), rollouts, [trajectory.tokens for trajectory in rollouts], Law(), recorded
    )


def measure_slope(side: Side, changed: dict[str, torch.Tensor]) -> torch.Tensor:
    """The change of log-probabilities by a small share of a change of the weights, divided by the share."""
    ours = side.oracle.list_tensors()
    sides = []
    for share in (STEP, -STEP):
        with side.oracle.replaced({name: ours[name] + share * (value - ours[name]) for name, value in changed.items()}):
            sides.append(side.predict().double())
    return ((sides[0] - sides[1]) / (2 * STEP)).float()


def check(effects: torch.Tensor, slope: torch.Tensor) -> None:
    assert float((effects - slope).norm()) < 0.03 * float(slope.norm()) + 3e-3


@pytest.mark.parametrize(
    "name",
    [
        "heads of model.layers.1.self_attn.o_proj.weight",
        "8 blocks of rows of model.layers.1.mlp.gate_proj.weight",
        "columns of model.layers.1.mlp.down_proj.weight",
        "model.layers.2.mlp.experts",
    ],
)
def test_the_effect_of_an_order_is_its_slope(side: Side, name: str) -> None:
    tensors = side.oracle.list_tensors()
    (axis,) = [axis for axis in list_axes(tensors, side.oracle.model.config) if axis.name == name]
    present = axis.reorder(tensors, axis.units)
    (effects,) = compute_effects(side, [lambda gradients: axis.predict_effects(gradients, present)], list(present))
    assert effects.columns.shape[1] == axis.count_orders()
    for number in (0, axis.count_orders() // 2, axis.count_orders() - 1):
        changed = axis.reorder(tensors, axis.change_order(axis.units, number))
        check(effects.columns[:, number], measure_slope(side, changed))


def test_the_effect_of_a_head_is_its_slope(side: Side) -> None:
    tensors = side.oracle.list_tensors()
    parts = [part for part in list_heads(tensors, side.oracle.model.config) if "layers.2" in part.name]
    (effects,) = compute_effects(side, [make_part_probe(parts, tensors)])
    for number in (0, 5, len(parts) - 1):
        check(effects.columns[:, number], measure_slope(side, parts[number].scale(tensors, 2.0)))


def test_every_order_of_few_units_is_made_once() -> None:
    axis = Axis("rows", {"weight": 0}, 4)
    start = (2, 0, 1, 3)
    orders = {axis.change_order(start, number) for number in range(axis.count_orders())}
    assert len(orders) == 23
    assert start not in orders
    value = {"weight": torch.arange(8.0).view(4, 2)}
    assert axis.reorder(value, start)["weight"].tolist() == [[4.0, 5.0], [0.0, 1.0], [2.0, 3.0], [6.0, 7.0]]


def test_units_that_the_record_does_not_show_stay() -> None:
    axis = Axis("rows", {"weight": 0}, 6, (1, 4, 5))
    value = {"weight": torch.arange(6.0)[:, None]}
    assert axis.reorder(value, (4, 1, 5))["weight"].flatten().tolist() == [0.0, 4.0, 2.0, 3.0, 1.0, 5.0]


def cases_of(cases: Sequence[Any]) -> list[Any]:
    """Parameters of a test."""
    return [pytest.param(case, id=case.name, marks=[] if case.fast else pytest.mark.slow) for case in cases]


MakeRun = Callable[..., RecordedRun]


@pytest.fixture(scope="module")
def recorded_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RecordedRun]:
    """Runs by name, each made once."""
    runs: dict[str, RecordedRun] = {}

    def of_name(name: str) -> RecordedRun:
        if name not in runs:
            runs[name] = RUNS[name](tmp_path_factory.mktemp("run"))
        return runs[name]

    return of_name


@pytest.fixture
def make(recorded_runs: Callable[[str], RecordedRun], tmp_path: Path) -> MakeRun:
    """Makes a run with an empty record, by its name and changes of its configuration."""
    return lambda name, *overrides: fresh(recorded_runs(name), tmp_path, *overrides)


@pytest.mark.turns(3)
@pytest.mark.parametrize("case", cases_of(DEFECTS))
def test_a_defect_is_named(case: Case, make: MakeRun) -> None:
    run = make(case.run, *case.overrides)
    case.plant(run)
    answer = examine(run)
    judged = verdict(case, answer)
    assert judged == "named" or (judged.startswith("unnamed") and not case.must), f"{judged}: {answer.texts}"
    assert answer.code in (1, 2)
    assert (answer.code == 1) == bool(answer.diagnosis), "a refusal has no object, and a finding has one"
    assert "Traceback" not in answer.errors


@pytest.mark.turns(3)
@pytest.mark.parametrize("case", cases_of(HEALTHY))
def test_a_healthy_run_is_clean(case: Case, make: MakeRun) -> None:
    run = make(case.run, *case.overrides)
    case.plant(run)
    answer = examine(run)
    assert answer.code == 0, answer.texts
    assert answer.diagnosis["findings"] == []


def test_rollouts_of_a_version_that_is_gone_are_counted(make: MakeRun) -> None:
    """Nothing is wrong in the rollouts that can be scored, and the exit code says that these are not all."""
    run = make("dense")
    newest = len(run.versions) - 1
    drawn = sample_rollouts(run.versions[newest], run.prompts(), version=newest)
    stale_rollouts = [
        replace(trajectory, spans=[span._replace(version=7) for span in trajectory.spans]) for trajectory in drawn[:3]
    ]
    run.write(newest + 1, [*stale_rollouts, *drawn[3:]])
    answer = examine(run)
    assert (answer.code, answer.diagnosis["findings"], answer.diagnosis["unseen_rollouts"]) == (3, [], 3)
    assert any("of version 7; 3 rollouts have no other tokens" in remark for remark in answer.diagnosis["remarks"])


def test_the_engine_of_the_rollouts_that_differ_is_named(make: MakeRun) -> None:
    run = make("dense")
    newest = len(run.versions) - 1
    right, behind = (
        sample_rollouts(run.versions[number], run.prompts(), version=newest) for number in (newest, newest - 1)
    )
    run.write(
        newest + 1,
        [replace(trajectory, engine=1) for trajectory in behind[:4]]
        + [replace(trajectory, engine=0) for trajectory in right[4:]],
    )
    assert "(in 4 of 8 rollouts: all of engine 1)" in examine(run).texts


def test_there_are_enough_kinds() -> None:
    assert len({case.name for case in DEFECTS}) == len(DEFECTS) >= 20
    assert sum(case.must for case in DEFECTS) >= 0.8 * len(DEFECTS)
    assert len({case.name for case in HEALTHY}) == len(HEALTHY) >= 12


def test_a_recomputed_figure_has_not_the_name_of_the_recorded_one(
    make: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (leak,) = [defect for defect in CASES["trainers"] if defect.name == "packed sequences leak"]
    run = make(leak.run)
    leak.plant(run)
    recorded = read_lines(run.run_dir / "metrics.jsonl")[-1]["token_mult_prob_error"]
    assert recorded > 1.1, "the leak shows"
    doctor.main([str(run.run_dir)])
    text = capsys.readouterr().out
    figures = [float(figure) for figure in re.findall(r"token_mult_prob_error[ =:]+([\d.]+\d)", text)]
    assert figures, text
    assert figures == pytest.approx([recorded] * len(figures), rel=1e-3)


ROW = {
    "spans": [[1, 3, 4], [3, 5, 3], [5, 6, 4]],
    "token_ids": [7] * 6,
    "logprobs": [0.0] * 5,
    "prev_logprobs": [0.0] * 5,
    "prompt_idx": 0,
    "group": 0,
    "sample": 0,
}


@pytest.fixture(params=["ppo", "grpo", "distillation"])
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Config]:
    """The configuration of a run of each algorithm, as it is read from its folder."""
    recipe = {"grpo": "quickstart"}.get(request.param, f"quickstart_{request.param}")
    loop = {"distillation": "grpo"}.get(request.param, request.param)

    def read(**keys: Any) -> Config:
        settings = [f"{loop}.async_grpo.{name}={value}" for name, value in keys.items()]
        config = compose_typed([f"+exp={recipe}", f"run_dir={tmp_path}", *settings]).require()
        record_start(tmp_path, config)
        assert yaml.safe_load((tmp_path / "config.yaml").read_text())["algorithm"] == request.param
        return load_run_config(tmp_path, [])

    return read


@pytest.mark.parametrize("is_recomputed", [True, False])
def test_tokens_behind_an_old_cache_are_scored_only_if_it_was_recomputed(
    recorded: Callable[..., Config], is_recomputed: bool
) -> None:
    config = recorded(enabled=True, recompute_kv_cache_after_weight_updates=is_recomputed)
    (rollout,) = evidence.select_scored([ROW], 4, config, most_tokens=100)
    assert rollout.indices.tolist() == ([0, 1, 4] if is_recomputed else [0, 1])


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_steps_are_judged_by_the_limits_of_their_loop(
    recorded: Callable[..., Config], is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class SeenError(Exception):
        pass

    def judge(*_: Any, has_older_tokens: bool) -> None:
        raise SeenError(has_older_tokens)

    config = recorded(enabled=is_asynchronous)
    monkeypatch.setattr(examination, "find_suspicious_steps", judge)
    monkeypatch.setattr(examination, "read_model_shape", lambda model: None)
    with pytest.raises(SeenError) as error_info:
        examination.examine_run(tmp_path, config, tmp_path, tmp_path)
    assert error_info.value.args == (is_asynchronous,)
