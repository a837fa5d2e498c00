"""Commands take the folder of a run whatever it is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_grpo import doctor, replay, report
from megatron_grpo.config.command_line import parse_arguments

FOLDERS = [
    "outputs/quickstart/2026-11-28_15.04",
    "step_1.5",
    "./run.1/",
    "../lr=0.1",
    "outputs/lr=0.1,kl=0.0",
    "outputs/loss_fn.ratio_clip_max=0.3/",
    "a run with spaces",
    "v1.2=final",
    "policy.precision=float32",
    ".hidden",
    "läufe/käse.2",
]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path(request.param).mkdir(parents=True)
    return str(request.param)


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_doctor_and_report_look_into_the_folder(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([folder, "policy.precision=float32"]) == 2
    assert f"{Path(folder)}/config.yaml does not exist" in capsys.readouterr().err
    assert report.main([folder]) == 2
    assert str(Path(folder)) in capsys.readouterr().err


@pytest.mark.parametrize("folder", FOLDERS, indirect=True)
def test_replay_tells_the_folder_from_its_changes(folder: str) -> None:
    request = replay.read_request([folder, "step=3", "policy.optimizer.lr=0.1", "loss_fn.ratio_clip_max=0.3"])
    assert request.run_dir == Path(folder)
    assert request.overrides == ["policy.optimizer.lr=0.1", "loss_fn.ratio_clip_max=0.3"]


def test_a_folder_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("outputs/run.1", "run.1", "outputs/lr=0.1"):
        assert doctor.main([path]) == 2
        assert f"{path} is not the folder of a run" in capsys.readouterr().err


def test_a_second_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for second in ("other", "outputs/other"):
        assert doctor.main(["run", second]) == 2
        assert f"{second} is not an argument" in capsys.readouterr().err


def test_keys_stay_keys() -> None:
    arguments = ["policy.precision=float32", "~env.math", "+exp=quickstart", "run.1"]
    parsed = parse_arguments(arguments, {}, most_words=1, is_override=lambda name: "." in name or name[0] == "+")
    assert parsed.words == ["run.1"]
    assert parsed.overrides == arguments[:3]
