"""Commands on the folder of somebody else's run start nothing that its configuration names."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo import command, doctor, evaluate, export, plan, replay, report
from megatron_grpo.batch import replay_files
from megatron_grpo.preflight import load
from megatron_grpo.preflight.load import check_overrides, compose_config
from megatron_grpo.run.directory import POLICY_FOLDER, record_start

MARK = "started"
EVIL = f"open({MARK!r}, 'w')\ndef act(**columns): ...\n"
SHELL = ["/bin/sh", "-c", f"id > {MARK}; exit 1"]
RUN = "attacker"
STARTED = {
    "algorithm": "evil:act",
    "loss_fn.objective": "evil.act",
    "grpo.adv_estimator.name": "evil.act",
    "data.processor": "evil.act",
    "data.chat_template": "evil.jinja",
    "policy.megatron": {"fp8_quantizer_factory": "evil.act"},
    "generation.engine_args": {"scheduler_cls": "evil.act"},
    "env.math": {"type": "tools", "options": {"servers": {"x": {"command": SHELL}}}},
    "env.functions": {"type": "reward_functions", "reward_funcs": ["evil.act"], "agent_func": "evil.act"},
    "env.other": {"type": "verifiers", "options": {"python": "./evil.sh", "environment": "x"}},
    "env.own": {"type": "evil:Environment", "options": {"text": "x"}},
    "env.judge": {"type": "judge", "options": {"model": "m", "url": "http://evil", "api_key_variable": "AWS_SECRET"}},
    "cluster.ray_address": "evil:6379",
    "logger.mlflow.tracking_uri": "http://evil",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: a run of somebody else, and modules that leave a mark when they are imported."""
    run_dir = tmp_path / RUN
    (run_dir / "checkpoints" / "step_1" / POLICY_FOLDER).mkdir(parents=True)
    record_start(run_dir, compose_config(["+exp=quickstart", f"run_dir={run_dir}"]))
    change_record(run_dir, STARTED)
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "evil.sh").write_text(f"#!/bin/sh\nid > {MARK}\n")
    (tmp_path / "evil.sh").chmod(0o755)
    (tmp_path / "evil.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(load, "_check_machine", lambda checked, rewards, reach: None)
    return tmp_path


def change_record(run_dir: Path, changes: dict[str, Any]) -> None:
    file = run_dir / "config.yaml"
    values = yaml.safe_load(file.read_text())
    for key, value in changes.items():
        *sections, last = key.split(".")
        node = values
        for section in sections:
            node = node[section]
        node[last] = value
    file.write_text(yaml.safe_dump(values))


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], list[str], set[str]]] = {
    "evaluate": (
        evaluate.main,
        [f"checkpoint={RUN}/checkpoints/step_1", "output=out"],
        {key for key in STARTED if not key.startswith(("logger.", "loss_fn.", "grpo."))},
    ),
    "doctor": (
        doctor.main,
        [RUN],
        {"algorithm", "data.processor", "data.chat_template", "policy.megatron", "generation.engine_args"},
    ),
    "replay": (replay.main, [RUN, "step=1"], {"algorithm", "loss_fn.objective", "policy.megatron"}),
    "train": (command.main, [f"run_dir={RUN}"], set(STARTED)),
    "check": (command.main, [f"run_dir={RUN}", "--check"], set(STARTED)),
    "plan": (
        plan.main,
        ["calibrate", RUN],
        {"algorithm", "loss_fn.objective", "policy.megatron", "generation.engine_args"},
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_lists_what_it_would_start(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main, arguments, keys = COMMANDS[name]
    assert main(arguments) == 2
    message = capsys.readouterr().err
    for key in STARTED:
        assert (f"  {key}" in message) == (key in keys), key
    assert message.count("give trust_run=true if you trust the run") >= len(keys)
    assert not (folder / MARK).exists()


def test_the_record_of_a_step_needs_trust_like_the_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = yaml.safe_load((folder / RUN / "config.yaml").read_text())
    change_record(folder / RUN, {"policy.megatron": {}})
    figures = replay_files.StepFigures.__new__(replay_files.StepFigures)
    object.__setattr__(figures, "config", values)
    monkeypatch.setattr("megatron_grpo.verification.replay.record.read_figures", lambda file: figures)
    assert replay.main([RUN, "step=1"]) == 2
    assert "policy.megatron.fp8_quantizer_factory=evil.act" in capsys.readouterr().err


def test_export_and_report_start_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export.main([f"checkpoint={RUN}/checkpoints/step_1", "output=out"]) == 2
    report.main([RUN, "output=page.html"])
    assert not (folder / MARK).exists()
    assert "trust_run" not in capsys.readouterr().err


def test_trust_lets_code_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_start(folder / RUN, compose_config(["+exp=quickstart", f"run_dir={folder / RUN}"]))
    change_record(folder / RUN, {"data.processor": "evil.act"})
    arguments = [f"run_dir={RUN}", "--check"]
    assert command.main(arguments) == 2
    assert not (folder / MARK).exists()
    command.main([*arguments, "trust_run=true"])
    assert (folder / MARK).exists()
    (folder / MARK).unlink()
    command.main([*arguments, "data.processor=null"])
    assert not (folder / MARK).exists()
    evaluate.main([*COMMANDS["evaluate"][1], "trust_run=maybe"])
    assert "evaluate: trust_run=maybe must be true or false" in capsys.readouterr().err


def test_a_resume_by_the_same_command_line_needs_no_trust(folder: Path) -> None:
    reward_settings = ["env.math.type=reward_functions", "env.math.reward_funcs=[mine.score]", "env.math.options={}"]
    composed = check_overrides(["+exp=quickstart", f"run_dir={folder / RUN}", *reward_settings])
    assert not composed.problems
    assert composed.require().env["math"].reward_funcs == ["mine.score"]
    new = folder / "new"
    new.mkdir()
    record_start(new, composed.require())
    assert not check_overrides([f"run_dir={new}", *reward_settings]).problems
    (problem,) = check_overrides([f"run_dir={new}"]).problems
    assert problem.subject == "env.math.reward_funcs=mine.score"
    assert not check_overrides([f"run_dir={new}", "trust_run=true"]).problems
    (problem,) = check_overrides(["+exp=quickstart", "trust_run=true"]).problems
    assert "leave it out" in problem.text
