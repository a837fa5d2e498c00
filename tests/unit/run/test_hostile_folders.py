"""Run folders that are made to hang, exhaust, overwrite or tell secrets: every command ends with a message."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_grpo import command, doctor, evaluate, export, replay, report
from megatron_grpo.batch.replay_files import locate_figures_file, read_figures
from megatron_grpo.batch.rollout_files import count_rollouts, examine_file, locate_rollouts_file, read_rows
from megatron_grpo.cluster.heartbeat import HeartbeatWriter, read_heartbeats
from megatron_grpo.cluster.process_log import build_log_path
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.outside_files import open_to_append
from megatron_grpo.config.schema import CheckpointingConfig
from megatron_grpo.models.checkpoint_model import find_checkpoint_model
from megatron_grpo.models.source import fetch_model_folder, find_local_folder
from megatron_grpo.observability.run_files import read_steps, write_text
from megatron_grpo.observability.run_logger import RunLogger
from megatron_grpo.observability.summary import write_summary
from megatron_grpo.preflight import load
from megatron_grpo.preflight.load import compose_config
from megatron_grpo.run.checkpoint_files import verify_checkpoint, write_with_checksum
from megatron_grpo.run.checkpoints import Checkpointer, resolve_checkpoint
from megatron_grpo.run.directory import POLICY_FOLDER, compare_data, is_in_use, load_run_config, record_start
from megatron_grpo.verification.doctor.end_reason import read_end_reason
from megatron_grpo.verification.doctor.engine_settings import read_engines
from tests.support.checkpoints import save

SECRET = "s3cr3tvalue"
CHECK_MACHINE = load._check_machine
STEP, ROLLOUTS, FIGURES = "checkpoints/step_1", "rollouts/step_1.parquet", "replay/step_1.parquet"
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int], list[str]]] = {
    "report": (report.main, ["run", "output=page.html"]),
    "doctor": (doctor.main, ["run"]),
    "replay": (replay.main, ["run", "step=1"]),
    "best": (replay.main, ["run", "step=best"]),
    "evaluate": (evaluate.main, [f"checkpoint=run/{STEP}", "output=out"]),
    "export": (export.main, [f"checkpoint=run/{STEP}", "output=out"]),
    "train": (command.main, ["run_dir=run", "--check"]),
    "resume": (command.main, ["+exp=quickstart", "run_dir=run", "--check"]),
}
# What the commands read once they have found a model, by the file that it reads; those with torch take seconds.
READERS: dict[str, list[Callable[[Path], object]]] = {
    "metrics.jsonl": [lambda run: read_steps(run / "metrics.jsonl")],
    "validation.jsonl": [lambda run: read_steps(run / "validation.jsonl")],
    "summary.json": [read_end_reason],
    "engines.json": [read_engines],
    "data.json": [lambda run: compare_data(run, compose_config(["+exp=quickstart", f"run_dir={run}"]))],
    ".lock": [lambda run: is_in_use(str(run)), lambda run: open_to_append(run / ".lock").close()],
    "logs/driver.log": [lambda run: open_to_append(build_log_path(run / "logs", "driver")).close()],
    ROLLOUTS: [
        lambda run: list(read_rows(1, run / ROLLOUTS)),
        lambda run: count_rollouts(run / ROLLOUTS),
        lambda run: examine_file(run / ROLLOUTS),
    ],
    FIGURES: [lambda run: read_figures(run / FIGURES)],
    f"{STEP}/manifest.json": [lambda run: verify_checkpoint(run / STEP)],
    f"{STEP}/state.json": [
        lambda run: verify_checkpoint(run / STEP),
        lambda run: Checkpointer(run, CheckpointingConfig(), look_only=True).find_start(),
        lambda run: resolve_checkpoint(run / "checkpoints/best"),
    ],
    f"{STEP}/dataloader.pt": [lambda run: verify_checkpoint(run / STEP)],
    f"{STEP}/{POLICY_FOLDER}/.metadata": [lambda run: verify_checkpoint(run / STEP)],
    "model/config.json": [
        lambda run: fetch_model_folder(str(run / "model")),
        lambda run: find_local_folder(str(run / "model")),
    ],
    "model/tokenizer.json": [lambda run: fetch_model_folder(str(run / "model"))],
}
FILES = ["config.yaml", "model.json", "chat_template.jinja", "conversation_format.json", "starts.jsonl", *READERS]
BOMB = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{n}: &a{n} {{{', '.join(f'k{i}: *a{n - 1}' for i in range(9))}}}\n" for n in range(1, 12)
)
CONFIGS = {
    "bomb": BOMB,
    "bomb of lists": BOMB.replace("{", "[").replace("}", "]").replace("x: 1, y: 2", "1, 2"),
    "cycle": "policy: &p {model: *p}\nalgorithm: grpo\n",
    "merged": "a: &a {x: 1}\nb: {<<: *a}\n",
    "object": "policy: !!python/object/apply:os.mkdir [started]\n",
    "tag that does not fit": "policy: !!bool maybe\n",
    "date that does not fit": "policy: !!timestamp soon\n",
    "deep": "a: " + "[" * 20_000,
    "deep in blocks": "- " * 5000 + "a",
    "huge number": "a: " + "9" * 10_000,
    "number in base 60": "a: 1" + ":59" * 100_000,
    "float in base 60": "a: 1" + ":59" * 100_000 + ".5",
    "many keys": "".join(f"k{number}: 1\n" for number in range(20_000)),
    "many keys of a section": "x:\n" + "".join(f"  k{number}: 1\n" for number in range(20_000)),
    "long key": "? " + "a_" * 200_000 + "\n: 1\n",
    "keys that are no text": "policy: {1: 2, null: 3, [4]: 5}\n1: {}\n",
    "large": "a: " + "x" * 2**21,
}
OTHER_READERS = ("report", "doctor", "export", "train", "resume")
"""Commands that read a configuration each in a way of its own; the others read it as the doctor does."""


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """A command that waits for ever or takes all memory is ended."""

    def give_up(*_: object) -> None:
        raise AssertionError("the command hangs")

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 3 * 2**30, before[1]))
    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)  # of which a busy machine gives little
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of somebody else's run, which has a model and a checkpoint."""
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    for name in ("model", "rollouts", "replay", "logs", f"{STEP}/{POLICY_FOLDER}"):
        (run_dir / name).mkdir(parents=True)
    (run_dir / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    record_start(run_dir, compose_config(["+exp=quickstart", f"run_dir={run_dir}"]))
    (run_dir / STEP / "state.json").write_text('{"save_state": {"total_steps": 1}, "metrics": {}}')
    return run_dir


@pytest.fixture
def folder(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that folder, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load, "_check_machine", lambda checked, rewards, reach: None)
    return Path(shutil.copytree(recorded, tmp_path / "run"))


def make_special_file(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(path.parents[len(path.parts) - 2] / "proc/self/environ")
        case "endless":
            with path.open("wb") as file:
                file.truncate(2**41)
        case _:
            depth = 900 if kind == "deep" else 100_000
            path.write_text('{"step": 1, "a": ' + "[" * depth + "]" * depth + "}\n")


KINDS = ["pipe", "device", "folder", "link", "endless", "deep", "deeper"]


def run(name: str) -> int:
    main, arguments = COMMANDS[name]
    return main(arguments)


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_configuration_that_explodes_is_refused(kind: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "config.yaml").write_text(CONFIGS[kind])
    for name in OTHER_READERS if kind.startswith("many keys") else COMMANDS:  # a second each
        code = run(name)
        printed = capsys.readouterr()
        assert code in ((0, 2) if name == "report" else (2,)), name
        assert "Traceback" not in printed.err, name
        assert len(printed.err) < 20_000, name
    assert not (folder.parent / "started").exists()


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_never_ends_or_leads_elsewhere_is_not_read(
    file: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PASSWORD_OF_THE_READER", SECRET)
    make_special_file(folder / file, kind)
    text = ""
    for name in COMMANDS if file == "config.yaml" else ("report", "best", "export"):  # the others end before
        run(name)
    for read in READERS.get(file, ()):
        try:
            text += str(read(folder))
        except (ValueError, RunError, OSError) as error:
            text += str(error)
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    pages = [page.read_text() for page in folder.parent.rglob("*.html")]
    assert SECRET not in "".join([text, printed.out, printed.err, *pages])


@pytest.mark.parametrize("file", READERS)
def test_the_readers_read_their_files(file: str, folder: Path) -> None:
    """Otherwise the test above shows nothing: each reader minds what is in its file."""
    if file in (".lock", "logs/driver.log", "model/config.json", "model/tokenizer.json"):
        make_special_file(folder / file, "pipe")
    else:
        (folder / file).unlink(missing_ok=True)
        (folder / file).write_text("3\n")
    outcomes = []
    for read in READERS[file]:
        with suppress(RunError, ConfigError):
            try:
                outcomes.append(read(folder))
            except (ValueError, OSError):
                continue
    assert not outcomes or file in (".lock",), outcomes


def test_interpolations_tell_no_secret(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET", SECRET)
    values = yaml.safe_load((folder / "config.yaml").read_text())
    texts = ["${oc.env:AWS_SECRET}", "${oc.decode:${oc.env:AWS_SECRET}}", "${env:AWS_SECRET}", "$AWS_SECRET"]
    values["data"]["system_prompt"] = " ".join(texts)
    values["logger"]["wandb"]["project"] = texts[0]
    values["policy"]["model"]["path"] = f"{texts[0]}/{texts[3]}"
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    for name in COMMANDS:
        run(name)
    assert load_run_config(folder, [], is_trusted=True).data.system_prompt == " ".join(texts)
    command.main(["run_dir=run", "--cfg", "job"])
    printed = capsys.readouterr()
    assert texts[0] in printed.out
    assert SECRET not in printed.out + printed.err + (folder.parent / "page.html").read_text()


def test_links_of_a_folder_overwrite_nothing(folder: Path) -> None:
    victim = folder.parent / "victim"
    victim.write_text("mine")
    for name in ("report.html", f".report.html.{os.getpid()}", "metrics.jsonl", "starts.jsonl", ".lock"):
        (folder / name).symlink_to(victim)
    (folder / "logs" / "driver.log").symlink_to(victim)
    write_text(folder / "report.html", "again")
    assert (folder / "report.html").read_text() == "again"
    for name in ("metrics.jsonl", "starts.jsonl", ".lock", "logs/driver.log"):
        with pytest.raises(OSError, match=name.replace(".", r"\.")):
            open_to_append(folder / name)
    for name in ("driver.json", "driver.requests"):
        (folder / "logs" / name).symlink_to(victim)
    writer = HeartbeatWriter(folder / "logs", "driver", io.StringIO())
    writer._write()
    assert read_heartbeats(folder / "logs").keys() == {"driver"}
    (folder / "validation.jsonl").symlink_to(folder.parent / "new")
    with pytest.raises(OSError, match="validation"):
        open_to_append(folder / "validation.jsonl")
    assert victim.read_text() == "mine"
    assert not (folder.parent / "new").exists()


def begin_with(run_dir: Path, model: Path) -> None:
    values = yaml.safe_load((run_dir / "config.yaml").read_text())
    values["policy"]["model"]["path"], values["prepare"]["name"] = str(model), None
    (run_dir / "config.yaml").write_text(yaml.safe_dump(values))


@pytest.mark.turns(3)
@pytest.mark.parametrize("kind", ["itself", "another step", "each with the other", "a link"])
@pytest.mark.parametrize("name", ["doctor", "evaluate", "export", "train"])
def test_a_run_that_began_with_its_own_checkpoint_is_refused(
    name: str, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load, "_check_machine", CHECK_MACHINE)
    save(folder, 2)
    shutil.rmtree(folder / STEP)
    checkpoint = model = folder.rename(folder.with_name("first")) / "checkpoints" / "step_2"
    run_dir = checkpoint.parents[1]
    match kind:
        case "another step":
            model = Path(shutil.copytree(checkpoint, checkpoint.with_name("step_1")))
        case "each with the other":
            model = Path(shutil.copytree(run_dir, run_dir.with_name("second"))) / "checkpoints" / "step_2"
            begin_with(model.parents[1], checkpoint)
        case "a link":
            model = run_dir / "checkpoints" / "mine"
            model.symlink_to(checkpoint)
    begin_with(run_dir, model)
    main = COMMANDS[name][0]
    arguments = {
        "doctor": ["first", "trust_run=true"],
        "evaluate": [f"checkpoint={checkpoint}", "output=out", "trust_run=true"],
        "export": [f"checkpoint={checkpoint}", "output=out"],
        "train": ["run_dir=first", "trust_run=true", "--check"],
    }
    assert main(arguments[name]) == 2
    error = capsys.readouterr().err
    assert f"policy.model.path={model} " in error
    assert "is a checkpoint of a run that began with this checkpoint, or with that of a run that did; " in error
    assert f"put the model that it began with into {model.resolve().parents[1]}/config.yaml, policy.model.path" in error
    assert "Traceback" not in error
    assert not (run_dir.parent / "out").exists()


def test_a_long_row_of_runs_is_read(tmp_path: Path) -> None:
    model = tmp_path
    for number in range(102):
        checkpoint = tmp_path / str(number) / "checkpoints" / "step_1"
        (checkpoint / POLICY_FOLDER).mkdir(parents=True)
        (tmp_path / str(number) / "config.yaml").write_text(f"policy: {{model: {{path: '{model}'}}}}\n")
        model = checkpoint
        if number == 100:
            assert find_checkpoint_model(str(model)) is not None
    with pytest.raises(ValueError, match="is a checkpoint of more than 100 runs"):
        find_checkpoint_model(str(model))


@pytest.mark.parametrize(
    ("manifest", "text"),
    [
        ({"files": {"../../config.yaml": {"bytes": 0}}}, "outside the checkpoint"),
        ({"files": {"/proc/self/environ": {"bytes": 0}}}, "outside the checkpoint"),
        ({"files": {"megatron/pipe": {"bytes": 0, "xxh3_128": ""}}}, "is a pipe or device"),
        ({"files": {"megatron/zero": {"bytes": 0, "xxh3_128": ""}}}, "is a pipe or device"),
        ({"files": [1]}, "no files"),
        ({"files": {"a": 1}}, "no size of a"),
        ({"files": {"a": {"bytes": "1"}}}, "no size of a"),
        ({}, "no files"),
    ],
)
def test_a_forged_manifest_leads_nowhere(manifest: dict[str, Any], text: str, folder: Path) -> None:
    checkpoint = folder / STEP
    make_special_file(checkpoint / POLICY_FOLDER / "pipe", "pipe")
    make_special_file(checkpoint / POLICY_FOLDER / "zero", "device")
    write_with_checksum(checkpoint / "state.json", {"save_state": {"total_steps": 1}, "metrics": {}})
    write_with_checksum(checkpoint / "manifest.json", {"format": 1, "step": 1, **manifest})
    with pytest.raises(RunError, match=text):
        verify_checkpoint(checkpoint)


@pytest.mark.parametrize("state", [{}, {"save_state": 3}, {"save_state": {"total_steps": "x"}, "metrics": {}}])
def test_a_forged_state_is_damaged(state: dict[str, Any], folder: Path) -> None:
    checkpoint = folder / STEP
    write_with_checksum(checkpoint / "state.json", state)
    write_with_checksum(checkpoint / "manifest.json", {"format": 1, "step": 1, "files": {}})
    with pytest.raises(RunError, match=r"state\.json is damaged"):
        verify_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"reward": 1}', "no number under step"),
        ('{"step": true}', "no number under step"),
        ('{"step": 1, "reward": [1]}', "reward is list, not a number"),
        ('{"step": 1, "reward": "\\u001b[2J"}', "reward is str, not a number"),
        ('{"step": 1, "timing": {"total": "x"}}', "total is str, not a number"),
        ('{"step": 1, "throughput": 3}', "throughput is int, not an object"),
    ],
)
def test_metrics_that_no_run_writes_are_refused(line: str, text: str, folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=rf"metrics\.jsonl:1 is damaged: .*{text}"):
        read_steps(folder / "metrics.jsonl")


WRONG_STEPS = {
    "cut off": '{"step": 1, "timing": {"to',
    "zeros": "\0" * 200,
    "of another kind": '"step"',
    "without seconds": '{"step": 1, "reward": 0.5}',
    "without a total": '{"step": 1, "timing": {"train": 1.0}}',
    "no total": '{"step": 1, "timing": {"total": null}}',
    "no seconds of a phase": '{"step": 1, "timing": {"total": 1.0, "train": null}}',
    "negative seconds": '{"step": 1, "timing": {"total": -1.0}}',
    "endless seconds": '{"step": 1, "timing": {"total": Infinity}}',
    "seconds that are no number": '{"step": 1, "timing": {"total": NaN}}',
    "larger than a float": '{"step": 1, "reward": 1' + "0" * 400 + ', "timing": {"total": 1.0}}',
}


@pytest.mark.parametrize("kind", WRONG_STEPS)
def test_a_resume_of_damaged_figures_is_one_message(
    kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a process starts, and not when the run ends."""
    (folder / "metrics.jsonl").write_text(f'{{"step": 1, "timing": {{"total": 1.0}}}}\n{WRONG_STEPS[kind]}\n')
    save(folder, 2)
    assert run("train") == 2
    error = capsys.readouterr().err
    assert "checkpointing.resume=auto  continues the figures of run, and run/metrics.jsonl:2 is damaged" in error
    assert "mend or remove that line, or choose another run_dir" in error
    assert "Traceback" not in error
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is damaged"):
        write_summary(folder, samples_per_step=1)
    RunLogger(folder, load_run_config(folder, [], is_trusted=True)).close()  # a new run drops them unread
    assert not (folder / "metrics.jsonl").read_text()


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", COMMANDS)
def test_names_of_a_folder_steer_no_terminal(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model's path, a step's reason, names of files and of checkpoints come from elsewhere."""
    values = yaml.safe_load((folder / "config.yaml").read_text())
    values["policy"]["model"]["path"] = "\x1b]0;title\x07\x1b[2J\r"
    values["\x1b[2J"] = "\x9b2J"
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "summary.json").write_text(json.dumps({"reason": "\x1b[2J\x9b2J\r"}))
    (folder / "rollouts" / "step_1.parquet").write_text("\x1b[2J")
    (folder / "rollouts" / "step_\x1b[2J.parquet").touch()
    for forged in ("step_\x1b[2J", "step_1_copy"):
        shutil.copytree(folder / STEP, folder / "checkpoints" / forged)
    run(name)
    printed = capsys.readouterr()
    assert not {"\x1b", "\x07", "\x9b", "\r"} & set(printed.out + printed.err)
    assert "Traceback" not in printed.err


def test_the_files_of_the_test_are_those_of_a_run(folder: Path) -> None:
    assert locate_rollouts_file(folder, 1) == folder / ROLLOUTS
    assert locate_figures_file(folder, 1) == folder / FIGURES
    assert build_log_path(folder / "logs", "driver") == folder / "logs/driver.log"
