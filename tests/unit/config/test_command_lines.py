"""Arguments of commands: texts as they are written, folders of runs, and jobs read within limits."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from megatron_grpo import doctor, replay, report
from megatron_grpo.config.command_line import parse_arguments
from megatron_grpo.config.job import read_job_file
from megatron_grpo.config.outside_files import YAML_BYTES
from megatron_grpo.config.overrides import read_overrides
from megatron_grpo.preflight.load import compose_config
from tests.support.forked import as_ordinary_user


def problem_of(*overrides: str) -> tuple[str, str]:
    (problem,) = read_overrides(overrides).problems
    return problem.subject, problem.text


@pytest.mark.parametrize(
    "text",
    [
        "/data/a=b.jsonl",
        "/data/run(1)/x",
        "/data/übung/数学.jsonl",
        "/data/it's;50%#1",
        "2026_01",
        "1e5",
        "true",
        "007",
        "/a\\b",
        "Think {step} by [step",
        "(" * 3000,
        "",
    ],
)
def test_a_text_is_taken_as_it_is_written(text: str) -> None:
    """Signs that Hydra's grammar has a meaning for need no quotes, and what looks like a number stays a text."""
    config = compose_config(["+exp=quickstart", f"logger.wandb.project={text}"])
    assert config.logger.wandb.project == text


def test_a_quoted_text_is_taken_without_its_quotes() -> None:
    config = compose_config(["+exp=quickstart", 'logger.wandb.project="Think, then answer."'])
    assert config.logger.wandb.project == "Think, then answer."


def test_a_leading_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    for override in ("run_dir=~/runs/1", "run_dir='~/runs/1'"):
        assert compose_config(["+exp=quickstart", override]).run_dir == "/home/somebody/runs/1"
    assert compose_config(["+exp=quickstart", "data.val_path=~"]).data.val_path == "/home/somebody"


@pytest.mark.parametrize("key", ["grpo.seed", "policy.optimizer.lr", "nowhere"])
@pytest.mark.parametrize("value", ["9" * 5000, "[" * 3000, "{a:" * 3000, "[" * 3000 + "]" * 3000])
def test_endless_values_are_refused_at_once(key: str, value: str) -> None:
    begin = time.monotonic()
    read = read_overrides([f"{key}={value}"])
    assert read.accepted == []
    assert sum(len(problem.subject) + len(problem.text) for problem in read.problems) < 500
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    "overrides",
    [("+variant=dapo", "+variant=gspo"), ("+exp=quickstart", "exp=quickstart_ppo"), ("env=math", "env=addition")],
)
def test_of_a_group_one_option_is_chosen(overrides: tuple[str, str]) -> None:
    """Hydra would take the last one, without a word."""
    subject, text = problem_of(*overrides)
    assert subject == " ".join(override.lstrip("+") for override in overrides)
    assert "a run takes one" in text
    assert read_overrides([overrides[0], overrides[0]]).problems == [], "twice the same is not a contradiction"


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


LAUGHS = "a0: &a0 [ha, ha, ha]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))


def reason(path: Path | str) -> str:
    try:
        read_job_file(str(path))
    except ValueError as error:
        return str(error)
    return "was read"


def test_fields_are_read_as_yaml_has_them(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("a: 1\nb: [x, 2.5]\nc: {d: null}\n")
    assert read_job_file(str(tmp_path / "job.yaml")) == {"a": 1, "b": ["x", 2.5], "c": {"d": None}}
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_job_file(str(tmp_path / "empty.yaml")) == {}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a: &a [*a]", "anchors or aliases"),
        (LAUGHS, "anchors or aliases"),
        ("base: &b {x: 1}\nmore: {<<: *b}", "anchors or aliases"),
        ("a: " + "[" * 3000, "nested more than 20 deep"),
        ("a: " + "{b: " * 3000, "nested more than 20 deep"),
        ("a: 1\na: 2", "has a twice"),
        ("a: " + "9" * 5000, "is not valid YAML"),
        ("[1, 2]", "must be a mapping of fields, not list"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ("a: \x00", "is not valid YAML"),
    ],
)
def test_what_is_no_job_is_told_at_once(tmp_path: Path, content: str, text: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(content)
    begin = time.monotonic()
    assert text in reason(file)
    assert time.monotonic() - begin < 2


def test_a_file_that_is_no_text_or_too_large(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xff\xfe\x00")
    assert reason(file) == "is not UTF-8 text"
    with file.open("wb") as opened:
        opened.truncate(YAML_BYTES * 50)
    assert reason(file) == "has 50 MiB; a job is a few fields in YAML"
    assert "no such file" in reason(tmp_path)
    assert "cannot be read: File name too long" in reason("/tmp/" + "x" * 300)


def test_a_file_of_somebody_else() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        file = Path(folder, "job.yaml")
        file.write_text("a: 1")
        assert as_ordinary_user(lambda: reason(file)) == "was read"
        file.chmod(0)
        assert as_ordinary_user(lambda: reason(file)) == "cannot be read: Permission denied"


def test_the_home_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "job.yaml").write_text("a: 1")
    assert read_job_file("~/job.yaml") == {"a": 1}
