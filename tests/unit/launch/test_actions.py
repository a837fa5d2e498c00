"""Commands after a launch find the job and the run, also in a folder from elsewhere; mistakes are one message."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_grpo.cluster.heartbeat import Heartbeat
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.launch.__main__ import main
from megatron_grpo.launch.launch_request import load_request
from megatron_grpo.launch.ray_jobs import RayTarget
from megatron_grpo.launch.slurm import SlurmTarget
from megatron_grpo.launch.state import describe_run
from megatron_grpo.launch.target import (
    Launch,
    choose_log,
    make_launch_folder,
    read_launch,
    record_launch,
)
from megatron_grpo.run.directory import is_alive, load_run_config

LOGS = [
    *("driver.log", "policy_rank_0.log", "policy_rank_1.log", "generation_engine_0.log", "rollout_worker_0.log"),
    *("generation_engine_0_core.log", "generation_engine_0_worker_0.log", "generation_engine_0_worker_1.log"),
]
QUICKSTART = ("+exp=quickstart", "policy.optimizer.warmup_steps=1")


def make_run(folder: Path, *, beat: float | None = None, launch: Launch | None = None) -> Path:
    """A run's folder with a launch, and a driver on another machine that wrote its heartbeat `beat` seconds ago."""
    make_launch_folder(folder)
    if launch is not None:
        record_launch(replace(launch, run_dir=folder))
    if beat is not None:
        beats = folder / "logs" / "heartbeats"
        beats.mkdir(parents=True)
        record = Heartbeat("driver", 1, "node", "another machine", time.time() - beat, (), 0.0, None)
        (beats / "driver.json").write_text(json.dumps(vars_of(record)))
    return folder


def vars_of(record: Heartbeat) -> dict[str, object]:
    return {name: getattr(record, name) for name in record.__slots__}


def slurm_launch(**changes: object) -> Launch:
    return replace(Launch(Path(), "slurm", "7", "/home/me"), **changes)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands that stand-ins for Slurm's programs were called with."""
    log = tmp_path / "calls"
    (tmp_path / "tools").mkdir()
    for name in ("scancel", "squeue", "sbatch"):
        program = tmp_path / "tools" / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >>{log}\necho 7\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'tools'}:{os.environ['PATH']}")
    return log


@pytest.mark.parametrize(
    ("process", "name"),
    [
        ("policy.1", LOGS[2]),
        ("engine.0", LOGS[3]),
        ("engine.0.worker.1", LOGS[7]),
        ("driver", LOGS[0]),
        ("rollout_worker_0", LOGS[4]),
    ],
)
def test_a_process_is_named_by_words(process: str, name: str) -> None:
    assert choose_log(LOGS, process) == name


@pytest.mark.parametrize("process", ["policy", "policy.7", "", "..", "a/b"])
def test_a_process_that_is_not_one_is_refused(process: str) -> None:
    with pytest.raises(ValueError, match="is not the name of one process"):
        choose_log(LOGS, process)


def test_the_last_launch_counts_and_seeds_have_jobs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", launch=slurm_launch(job="6"))
    record_launch(slurm_launch(run_dir=run, seeds=[3, 5]))
    launch = read_launch(run)
    assert launch is not None
    assert (launch.job, launch.runs) == ("7", [run / "seed_3", run / "seed_5"])
    (run / "seed_5").mkdir()
    of_seed = read_launch(run / "seed_5")
    assert of_seed is not None
    assert (of_seed.job, of_seed.runs) == ("7_1", [run / "seed_5"])
    assert SlurmTarget().find_output(of_seed) == [Path("/home/me/slurm-7_1.out")]
    assert read_launch(tmp_path) is None


@pytest.mark.parametrize("job", ["--help", "7\n8", ""])
def test_a_record_that_names_no_job_is_refused(tmp_path: Path, job: str) -> None:
    run = make_run(tmp_path / "run", launch=slurm_launch(job=job))
    with pytest.raises(ValueError, match="is damaged"):
        read_launch(run)


def test_a_token_is_not_sent_to_a_server_that_a_record_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    launch = Launch(tmp_path, "ray", "7", "/", settings={"address": "http://192.0.2.1:8265"})
    with pytest.raises(ValueError, match="set RAY_API_SERVER_ADDRESS to it if you trust it"):
        RayTarget().describe(launch)


def test_stop_saves_a_run_that_lives_and_cancels_one_that_waits(tmp_path: Path, calls: Path) -> None:
    running = make_run(tmp_path / "running", beat=1, launch=slurm_launch())
    assert main(["stop", str(running)]) == 0
    assert (running / "stop").exists()
    assert not calls.exists()
    waiting = make_run(tmp_path / "waiting", launch=slurm_launch())
    assert main(["stop", str(waiting)]) == 0
    assert calls.read_text() == "scancel 7\n"
    array = make_run(tmp_path / "array", launch=slurm_launch(seeds=[1, 2]))
    make_run(array / "seed_1", beat=1)
    assert main(["stop", str(array)]) == 0
    assert (array / "seed_1" / "stop").exists()
    assert calls.read_text().splitlines()[-1] == "scancel --state=PENDING 7"
    assert main(["stop", str(running), "--now"]) == 0
    assert calls.read_text().splitlines()[-1] == "scancel 7"


def test_a_driver_that_is_silent_is_not_alive(tmp_path: Path) -> None:
    assert is_alive(make_run(tmp_path / "now", beat=1))
    assert not is_alive(make_run(tmp_path / "earlier", beat=3600))


def test_a_run_that_was_not_launched_is_stopped_by_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", beat=1)
    assert main(["stop", str(run)]) == 0
    assert (run / "stop").exists()
    assert main(["stop", str(tmp_path)]) == 2
    assert "was not started by launch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["slrum", "+exp=quickstart"], "slrum is not a target; did you mean slurm?"),
        ([], "nothing is not a target"),
        (["slurm", "+exp=quickstart", "launch.slurm.acount=a"], "did you mean launch.slurm.account?"),
        (["slurm", "+exp=quickstart", "--dryrun"], "--dryrun is not an argument"),
        (["slurm", *QUICKSTART], "sbatch  is not on this machine"),
        (["slurm", *QUICKSTART, "cluster.gpus_per_node=null"], "cluster.gpus_per_node=null  is needed"),
        (["kubernetes", *QUICKSTART, "launch.image=i", "launch.kubernetes.volume=v"], "kubectl  is not on this"),
        (["ray", *QUICKSTART, "launch.spares=1"], "launch.spares=1  is for slurm alone"),
        (["slurm", *QUICKSTART, "launch.generation_nodes=1"], "leaves none of cluster.num_nodes=1 for training"),
        (["slurm", *QUICKSTART, "launch.seeds=[1,1]"], "has a seed twice"),
        (["status", "nothing_here"], "give the folder of a run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_one_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "setting",
    [
        "launch.image=evil",
        "launch.python=evil",
        "launch.slurm.options=[--wrap=evil]",
        "launch.slurm.mounts=[/a:/b]",
        "launch.kubernetes.secrets=[token]",
        "launch.ray.address=http://evil:8265",
    ],
)
def test_what_a_recorded_run_would_start_elsewhere_needs_trust(setting: str, tmp_path: Path) -> None:
    key, _, value = setting.partition("=")
    text = f"algorithm: grpo\npolicy: {{model: {{path: model}}}}\nlaunch: {nest(key.split('.')[1:], value)}\n"
    (tmp_path / "config.yaml").write_text(text)
    load_run_config(tmp_path, [], sections=("policy.",))
    with pytest.raises(ConfigError, match=f"{key}.*give trust_run=true if you trust the run"):
        load_request([f"run_dir={tmp_path}"], "files", SlurmTarget().find_problems)


def nest(names: list[str], value: str) -> str:
    """YAML of a value below sections."""
    return value if not names else f"{{{names[0]}: {nest(names[1:], value)}}}"


def test_engines_need_room_on_nodes_of_their_own() -> None:
    with pytest.raises(ValueError, match="has 8 GPUs for engines, which need 32"):
        load_request(["+exp=llama3_70b_slurm", "launch.generation_nodes=1"], "nothing", SlurmTarget().find_problems)


def test_a_job_elsewhere_needs_no_gpu_here() -> None:
    request = load_request(["+exp=llama3_70b_slurm"], "nothing", SlurmTarget().find_problems)
    assert request.config.cluster.gpus == 8


def test_what_was_submitted_is_in_the_folder_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["slurm", *QUICKSTART, "run_dir=mine", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert not (tmp_path / "mine").exists()
    assert main(["slurm", *QUICKSTART, "run_dir=mine", "--spares=1", "--dry-run"]) == 0
    assert "\nSPARES=1\n" in capsys.readouterr().out
    assert main(["slurm", *QUICKSTART, "run_dir=mine"]) == 0
    folder = tmp_path / "mine" / "launch"
    assert (folder / "job.sbatch").read_text() == script
    assert calls.read_text() == f"sbatch --parsable --chdir={tmp_path} mine/launch/job.sbatch\n".replace(
        " mine", f" {tmp_path}/mine"
    )
    launch = read_launch(tmp_path / "mine")
    assert launch is not None
    assert launch.job == "7"
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o700


def test_the_state_of_a_run_is_read_from_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", beat=1)
    assert list(describe_run(run)) == ["the run has not begun", "processes alive: 1"]
    (run / "config.yaml").write_text("algorithm: grpo\ngrpo: {max_num_steps: 9}\n")
    assert next(describe_run(run)) == "no step yet"
    steps = [{"step": step, "timing": {"total": 2.0}} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    (run / "stop").touch()
    assert list(describe_run(run)) == [
        "step 2 of 9, 2.0 s each lately",
        "processes alive: 1; it will end after this step",
    ]
    killed = make_run(tmp_path / "killed", beat=3600)
    (killed / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    assert list(describe_run(killed))[-1] == "the driver is not alive, and has written no summary: it was killed"
    (killed / "summary.json").write_text(json.dumps({"outcome": "failed", "reason": "no memory"}))
    assert main(["status", str(killed)]) == 0
    assert capsys.readouterr().out == "step 2, 2.0 s each lately\nended: failed: no memory\n"
