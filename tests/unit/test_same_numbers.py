"""benchmarks/same_numbers.py finds every difference but those of the clock; a stand-in for training writes metrics."""

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_grpo.config.overrides import list_config_groups

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = 2
Compared = Callable[..., tuple[int, dict[str, Any]]]
STAND_IN = """
import json, pathlib, sys, time
given = dict(word.split("=", 1) for word in sys.argv[1:])
if given.get("+variant") in UNKNOWN:
    sys.exit("no such option") if FAILS else (print("no such option"), sys.exit(2))
print("training")
time.sleep(SLEEPS)
run_dir = pathlib.Path(given["run_dir"])
run_dir.mkdir(parents=True)
lines = [{"step": step, "loss": LOSS, "timing": {"total": time.time()}} for step in (1, 2)]
run_dir.joinpath("metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
run_dir.joinpath("validation.jsonl").write_text(json.dumps({"step": 0, "val_accuracy": 0.5}) + "\\n")
"""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, with the modules beside it, as if it had been started."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield import_module("same_numbers")
    for name in {"same_numbers", "sides", "header"} - before:
        sys.modules.pop(name, None)


def checkout(
    folder: Path, loss: float = 0.5, unknown: tuple[str, ...] = (), fails: bool = False, sleeps: float = 0
) -> Path:
    """A checkout whose train command only writes metrics."""
    settings = f"LOSS, UNKNOWN, FAILS, SLEEPS = {loss!r}, {unknown!r}, {fails!r}, {sleeps!r}"
    for package in ("megatron_grpo", "conf"):
        (folder / package).mkdir(parents=True, exist_ok=True)
        (folder / package / "__init__.py").touch()
    (folder / "megatron_grpo" / "train.py").write_text(settings + STAND_IN)
    return folder


@pytest.fixture
def compared(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> Compared:
    """Calls the script; returns its exit code and the cases by name."""

    def call(*arguments: object) -> tuple[int, dict[str, Any]]:
        code = script.main([*(str(argument) for argument in arguments), f"--steps={STEPS}"])
        return code, {case["name"]: case for case in json.loads(capsys.readouterr().out)["cases"]}

    return call


def write_steps(folder: Path, *rows: dict[str, Any], validation: tuple[dict[str, Any], ...] = ()) -> Path:
    folder.mkdir(parents=True)
    for name, lines in (("metrics.jsonl", rows), ("validation.jsonl", validation)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 0.1, "valid_tokens": 1024.0, **values}


def test_only_the_clock_and_what_is_new_may_differ(script: ModuleType, tmp_path: Path) -> None:
    before = write_steps(tmp_path / "a", row(1, timing={"total": 1.5}, throughput={"samples_per_s": 3.0}), row(2))
    after = write_steps(tmp_path / "b", row(1, timing={"total": 2.5}), row(2, fresh={"one": 1.0}))
    assert script.compare_folders(before, after) == {
        "steps": 2,
        "identical": True,
        "first_difference": None,
        "new_keys": ["fresh.one"],
    }


@pytest.mark.parametrize(
    ("changed", "key", "old", "new"),
    [
        ({"loss": math.nextafter(0.1, 1)}, "loss", 0.1, math.nextafter(0.1, 1)),
        ({"valid_tokens": 1024}, "valid_tokens", 1024.0, 1024),
        ({"loss": None}, "loss", 0.1, None),
        ({"inner": {"one": 2.0}}, "inner.one", 1.0, 2.0),
        ({"inner": {}}, "inner.one", 1.0, "(missing)"),
    ],
)
def test_the_last_digit_and_the_type_count(
    script: ModuleType, tmp_path: Path, changed: dict[str, Any], key: str, old: object, new: object
) -> None:
    rows = [row(step, inner={"one": 1.0}) for step in (1, 2, 3)]
    before = write_steps(tmp_path / "a", *rows)
    after = write_steps(tmp_path / "b", rows[0], rows[1] | changed, rows[2] | {"loss": 7.0})
    folders = script.compare_folders(before, after)
    assert not folders["identical"]
    assert repr(folders["first_difference"]) == repr(
        {"file": "metrics.jsonl", "step": 2, "key": key, "before": old, "after": new}
    )
    assert script.compare_folders(before, after, ignore=[key, "loss"])["identical"]


def test_validation_counts_too(script: ModuleType, tmp_path: Path) -> None:
    before = write_steps(tmp_path / "a", row(1), validation=({"step": 0, "val_accuracy": 0.25},))
    after = write_steps(tmp_path / "b", row(1), validation=({"step": 0, "val_accuracy": 0.5},))
    difference = script.compare_folders(before, after)["first_difference"]
    assert difference == {
        "file": "validation.jsonl",
        "step": 0,
        "key": "val_accuracy",
        "before": 0.25,
        "after": 0.5,
    }


@pytest.mark.parametrize(("new_steps", "old", "new"), [(2, 3, "(missing)"), (4, "(missing)", 4)])
def test_steps_that_are_missing_or_too_many(
    script: ModuleType, tmp_path: Path, new_steps: int, old: object, new: object
) -> None:
    before = write_steps(tmp_path / "a", *(row(step) for step in range(1, 4)))
    after = write_steps(tmp_path / "b", *(row(step) for step in range(1, new_steps + 1)))
    difference = script.compare_folders(before, after)["first_difference"]
    assert (difference["key"], difference["before"], difference["after"]) == ("step", old, new)


def test_no_steps_are_not_the_same_steps(script: ModuleType, tmp_path: Path) -> None:
    folders = script.compare_folders(write_steps(tmp_path / "a"), write_steps(tmp_path / "b"))
    assert not folders["identical"]


def test_every_preset_is_a_case(script: ModuleType) -> None:
    assert set(list_config_groups()["variant"]) < script.CASES.keys()
    assert script.overrides_of("rloo", 3)[:3] == ["+exp=quickstart", "+variant=rloo", "grpo.max_num_steps=3"]
    assert script.overrides_of("ppo", 3)[:2] == ["+exp=quickstart_ppo", "ppo.max_num_steps=3"]


def test_a_baseline_is_run_once(compared: Compared, tmp_path: Path) -> None:
    """The first call runs both sides and keeps what they wrote; the others run one side, and then none."""
    same_loss, other_loss = checkout(tmp_path / "same"), checkout(tmp_path / "other", loss=0.25)
    code, cases = compared(same_loss, same_loss, "--only", "defaults", "ppo", "--keep", tmp_path / "kept")
    assert code == 0
    assert [(case["steps"], case["identical"]) for case in cases.values()] == [(STEPS, True)] * 2
    assert (tmp_path / "kept" / "after" / "ppo" / "log.txt").read_text() == "training\n"
    baseline = tmp_path / "kept" / "before"
    code, cases = compared(baseline, other_loss, "--only", "defaults", "rloo", "--keep", tmp_path / "new")
    assert code == 1
    assert cases["defaults"]["first_difference"]["after"] == 0.25
    assert cases["rloo"]["skipped"] == "before: not recorded"
    assert "identical" not in cases["rloo"]
    code, cases = compared(tmp_path / "kept" / "after", tmp_path / "new" / "after", "--only", "defaults")
    assert code == 1
    assert cases["defaults"]["first_difference"]["before"] == 0.5


def test_records_of_another_command_line_are_no_baseline(compared: Compared, tmp_path: Path) -> None:
    code = checkout(tmp_path / "code")
    record = write_steps(tmp_path / "records" / "defaults", row(1))
    command = ["python", "-m", "megatron_grpo.train", "+exp=quickstart", "grpo.max_num_steps=7", "run_dir=somewhere"]
    (record / "command.txt").write_text(shlex.join(command))
    status, cases = compared(record.parent, code, "--only", "defaults")
    assert status == 1
    assert "grpo.max_num_steps=7" in cases["defaults"]["failed"]


def test_what_the_older_does_not_know_is_skipped_and_what_the_newer_lost_is_not(
    compared: Compared, tmp_path: Path
) -> None:
    all_of_it, part = checkout(tmp_path / "all"), checkout(tmp_path / "part", unknown=("rloo",))
    code, cases = compared(part, all_of_it, "--only", "defaults", "rloo")
    assert code == 0
    assert "no such option" in cases["rloo"]["skipped"]
    assert compared(part, all_of_it, "--only", "rloo")[0] == 1, "then nothing was compared"
    code, cases = compared(all_of_it, part, "--only", "rloo")
    assert code == 1
    assert cases["rloo"]["failed"].startswith("after: exit code 2")


def test_a_run_that_fails_or_hangs_is_a_difference(compared: Compared, tmp_path: Path) -> None:
    works, fails = checkout(tmp_path / "works"), checkout(tmp_path / "fails", unknown=("rloo",), fails=True)
    code, cases = compared(fails, works, "--only", "rloo")
    assert code == 1
    assert cases["rloo"]["failed"] == "before: exit code 1; the end of its output:\nno such option"
    compared(works, works, "--only", "rloo", "--keep", tmp_path / "kept")
    hangs = checkout(tmp_path / "hangs", sleeps=60)
    code, cases = compared(tmp_path / "kept" / "before", hangs, "--only", "rloo", "--deadline=1")
    assert code == 1
    assert cases["rloo"]["failed"].startswith("after: still running after 1 s")


def test_a_revision_is_checked_out(compared: Compared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = checkout(tmp_path / "repository")
    git = ["git", "-C", str(repository), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "one"]):
        subprocess.run([*git, *arguments], check=True)
    checkout(repository, loss=0.25)
    monkeypatch.setattr(sys.modules["sides"], "ROOT", repository)
    code, cases = compared("HEAD", repository, "--only", "defaults")
    assert code == 1
    difference = cases["defaults"]["first_difference"]
    assert (difference["before"], difference["after"]) == (0.5, 0.25)
    worktrees = subprocess.run([*git, "worktree", "list"], check=True, capture_output=True, text=True)
    assert len(worktrees.stdout.splitlines()) == 1
    with pytest.raises(SystemExit, match="neither records nor a checkout nor a revision"):
        compared("no-such-revision", repository)
