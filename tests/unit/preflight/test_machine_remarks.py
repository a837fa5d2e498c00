"""What is asked of nodes, logins, paths and recorded starts on this machine."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_grpo.config.paths import check_readable, check_writable
from megatron_grpo.config.schema import Config
from megatron_grpo.models.families import FAMILIES
from megatron_grpo.models.families.reading import parse_model_shape
from megatron_grpo.preflight import load, machine_checks, node_checks
from megatron_grpo.preflight.load import check_overrides, compose_config, find_recorded_run
from megatron_grpo.preflight.machine_checks import find_login_problems
from megatron_grpo.preflight.node_checks import (
    examine_node,
    find_delta_problems,
    find_node_remarks,
    read_cuda_release,
)
from megatron_grpo.run.directory import record_start
from megatron_grpo.verification.problem import SMALL as SIZES
from megatron_grpo.verification.problem import TINY
from tests.support.config_problems import problems_of
from tests.support.forked import as_ordinary_user

UNLIMITED = resource.RLIM_INFINITY


def make_config(gpus: int = 8, nodes: int = 1) -> Config:
    config = Config()
    config.cluster.gpus_per_node, config.cluster.num_nodes = gpus, nodes
    return config


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine that lacks nothing; the test may take from it."""
    values: dict[str, Any] = {"driver": "580.65.06", "files": 65_535, "locked": UNLIMITED, "shared": 2**34}
    limits = {resource.RLIMIT_NOFILE: "files", resource.RLIMIT_MEMLOCK: "locked"}
    monkeypatch.setattr(node_checks.resource, "getrlimit", lambda kind: (values[limits[kind]], UNLIMITED))
    monkeypatch.setattr(
        node_checks.os, "statvfs", lambda _: SimpleNamespace(f_blocks=values["shared"] // 4096, f_frsize=4096)
    )
    monkeypatch.setattr(node_checks, "read_cuda_release", lambda: 13)
    monkeypatch.setattr(node_checks, "query_gpus", lambda field: [values["driver"]] * (field == "driver_version"))
    return values


@pytest.mark.parametrize(
    ("lack", "nodes", "subject", "text"),
    [
        ({}, 2, None, ""),
        ({"driver": "575.57.08"}, 1, "NVIDIA driver 575", "CUDA 13, which needs driver 580 or newer"),
        ({"files": 1024}, 1, "open files 1024", "ulimit -n 65535"),
        ({"files": UNLIMITED}, 1, None, ""),
        ({"locked": 2**16}, 2, "locked memory 65536 bytes", "ulimit -l unlimited"),
        ({"locked": 2**16}, 1, None, ""),
        ({"shared": 2**26}, 1, "/dev/shm 0.1 GiB", "--shm-size=16g"),
    ],
)
def test_a_lack_is_remarked(
    lack: dict[str, Any], nodes: int, subject: str | None, text: str, machine: dict[str, Any]
) -> None:
    machine |= lack
    remarks = list(find_node_remarks(make_config(nodes=nodes)))
    assert [remark.subject for remark in remarks] == [subject] * (subject is not None)
    assert all(text in remark.text for remark in remarks)
    assert list(find_node_remarks(make_config(gpus=0, nodes=nodes))) == []


LACKING_GPUS = {"uuid": ["GPU-1", "GPU-2"], "memory.used": ["12 MiB", "9216 MiB"]}
LACKING_GPUS["ecc.errors.uncorrected.volatile.total"] = ["[N/A]", "3"]


def test_a_node_tells_what_it_lacks(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine["files"] = 1024
    monkeypatch.setattr(node_checks, "query_gpus", lambda field: LACKING_GPUS.get(field, []))
    problems, remarks = examine_node(make_config(gpus=8), None, [str(tmp_path), "/nowhere/model"])
    assert [(problem.subject, problem.text.partition(";")[0]) for problem in problems] == [
        ("/nowhere/model", "is not there"),
        ("cluster.gpus_per_node=8", "only 2 GPUs answer nvidia-smi"),
    ]
    assert [(remark.subject, remark.text.partition(";")[0]) for remark in remarks] == [
        ("open files 1024", "may be too few for sockets"),
        ("memory of GPU 1", "9.0 GiB of it is in use before the run starts"),
        ("memory of GPU 1", "has had 3 uncorrected memory errors since its last reset"),
    ]
    assert examine_node(make_config(gpus=2), None, [str(tmp_path)])[0] == []


@pytest.mark.parametrize(
    ("gpus", "deterministic", "installed", "refused"),
    [(8, False, False, True), (8, False, True, False), (8, True, False, False), (0, False, False, False)],
)
def test_delta_nets_on_gpus_need_their_kernels(
    gpus: int, deterministic: bool, installed: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(gpus=gpus)
    config.policy.deterministic, config.policy.model.path = deterministic, "qwen"
    shapes = [
        parse_model_shape({**SIZES, **TINY[family], "architectures": [FAMILIES[family].architecture]})
        for family in ("qwen3_next", "qwen3")
    ]
    monkeypatch.setattr(node_checks.importlib.util, "find_spec", lambda name: object() if installed else None)
    problems = [problem for shape in (*shapes, None) for problem in find_delta_problems(config, shape)]
    assert [problem.subject for problem in problems] == ["policy.model.path=qwen"] * refused
    assert all("pip install fla-core" in problem.text for problem in problems)


def test_the_release_of_cuda_is_torchs() -> None:
    release = torch.version.cuda
    assert read_cuda_release() == (None if release is None else int(release.partition(".")[0]))


VARIABLES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL", "NETRC")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(machine_checks, "_is_installed", lambda package: True)
    config = Config()
    config.logger.wandb.enabled = True
    return config


def test_wandb_without_a_login(config: Config) -> None:
    (problem,) = find_login_problems(config)
    assert problem.subject == "logger.wandb.enabled=True"
    assert "needs a login of api.wandb.ai" in problem.text
    config.logger.wandb.mode = "offline"
    assert not list(find_login_problems(config))


@pytest.mark.parametrize("setting", ["WANDB_API_KEY=abc", "WANDB_MODE=offline", "WANDB_MODE=disabled"])
def test_the_environment_has_a_login_or_needs_none(
    setting: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*setting.split("="))
    assert not list(find_login_problems(config))


def test_a_login_is_that_of_the_server(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password abc\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert not list(find_login_problems(config))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    (problem,) = find_login_problems(config)
    assert "wandb.example.org" in problem.text


GPUS = "cluster.gpus_per_node=8"


@pytest.fixture
def on_login_node(base_overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    layout = ["policy.parallel.data=4", "generation.parallel.data=4", "generation.parallel.pipeline=1"]
    return [*base_overrides, GPUS, "policy.parallel.pipeline=1", *layout]


def test_rows_files_and_environments_are_checked_without_gpus(
    on_login_node: list[str], rows: Path, tmp_path: Path
) -> None:
    assert list(problems_of(on_login_node)) == [GPUS]
    rows.write_text('{"question": "1?", "answer": "1"}\n' * 40)
    missing = f"data.val_path={tmp_path}/val.jsonl"
    texts = problems_of([*on_login_node, missing, "+env.math.options.tolerance=3"])
    assert texts[GPUS].startswith("this machine has no CUDA GPU")
    assert "has no column 'prompt'" in texts[str(rows)]
    assert texts[missing].startswith("no such file")
    assert texts["env.math.options.tolerance=3"].startswith("is not an option of MathEnvironment")


def test_layouts_models_and_rewards_are_checked_without_gpus(
    on_login_node: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "login_node_scores.py").write_text(
        "def score(completions, difficulty):\n    return [0.0 for _ in completions]\n"
    )
    function = "login_node_scores.score"
    wrong = ["checkpointing.resume=/nowhere/step_3", "policy.parallel.tensor=3"]
    texts = problems_of(
        [*on_login_node, *wrong, "env.math.type=reward_functions", f"env.math.reward_funcs=[{function}]"]
    )
    keys = {subject.partition("=")[0] for subject in texts}
    assert {"cluster.gpus_per_node", "checkpointing.resume", "policy.parallel.tensor", "env.math.reward_funcs"} <= keys
    assert "difficulty" in texts[f"env.math.reward_funcs={function}"]


def test_a_wrong_name_is_named_alone(on_login_node: list[str]) -> None:
    """Another file or environment may have been meant by it."""
    (subject,) = problems_of([*on_login_node, "data.trian_path=rows.jsonl", "+env.math.options.tolerance=3"])
    assert subject.startswith("data.trian_path")


LONG = "x" * 256


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may look into, as pytest's own may not be."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_files(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_readable(tmp_path / "file") is None
    assert check_readable(tmp_path / "nothing") == check_readable(tmp_path / "file" / "below") == "no such file"
    assert check_readable(tmp_path) == "is a folder, not a file"
    assert check_readable(tmp_path / LONG) == "cannot be read: File name too long"
    assert check_readable("a\0b") == "cannot be read: embedded null byte"
    assert check_readable(tmp_path, "folder") is None
    assert check_readable(tmp_path / "file", "folder") == "no such folder"
    assert check_readable(tmp_path / LONG, "folder") == "cannot be read: File name too long"


def test_what_belongs_to_somebody_else(open_folder: Path) -> None:
    (open_folder / "file").write_text("x")
    (open_folder / "file").chmod(0)
    (open_folder / "closed").mkdir(mode=0o700)
    assert as_ordinary_user(lambda: check_readable(open_folder / "file")) == "no permission to read it"
    assert as_ordinary_user(lambda: check_readable(open_folder / "closed", "folder")) == "no permission to read it"
    run_path = str(open_folder / "new" / "run")
    ((subject, text),) = as_ordinary_user(lambda: [(p.subject, p.text) for p in check_writable("run_dir", run_path)])
    assert (subject, text) == (f"run_dir={run_path}", f"no permission to write in {open_folder}")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("{tmp}/file/run", "{tmp}/file is not a folder"),
        ("{tmp}/dangling", "{tmp}/dangling is not a folder"),
        ("{tmp}/new/" + LONG, "cannot be made in {tmp}: File name too long"),
        ("{tmp}/" + "ü" * 200, "cannot be made in {tmp}: File name too long"),
        ("/proc/nowhere", "cannot be made in /proc: No such file"),
        ("a\0b", ": embedded null byte"),
    ],
)
def test_folders_that_cannot_be_made(tmp_path: Path, path: str, text: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.iterdir())
    (problem,) = check_writable("run_dir", path.format(tmp=tmp_path))
    assert text.format(tmp=tmp_path) in problem.text
    assert sorted(tmp_path.iterdir()) == before


def test_folders_that_can_be_made_are_not_made(tmp_path: Path) -> None:
    assert list(check_writable("run_dir", str(tmp_path / "a" / "b"))) == []
    assert list(check_writable("run_dir", str(tmp_path))) == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of PPO with settings of its own."""
    folder = tmp_path / "lr=0.1" / "run 1.5"
    folder.mkdir(parents=True)
    settings = ["ppo.max_num_steps=17", "ppo.seed=5", "checkpointing.save_period=3"]
    record_start(folder, compose_config(["+exp=quickstart_ppo", f"run_dir={folder}", *settings]))
    monkeypatch.setattr(load, "_check_machine", lambda checked, rewards, reach: None)
    return folder


def test_without_further_arguments_it_goes_on_as_it_began(run_dir: Path) -> None:
    checked = check_overrides([f"run_dir={run_dir}"])
    config = checked.require()
    assert (config.algorithm, config.name, config.run_dir) == ("ppo", "quickstart_ppo", str(run_dir))
    assert (config.ppo.max_num_steps, config.ppo.seed, config.checkpointing.save_period) == (17, 5, 3)
    (remark,) = checked.remarks
    assert remark.text == f"resumes with the configuration of its last start, {run_dir}/config.yaml, unchanged"


def test_changes_are_named(run_dir: Path) -> None:
    checked = check_overrides([f"run_dir={run_dir}/", "ppo.max_num_steps=19", "policy.optimizer.lr=0.5"])
    config = checked.require()
    assert (config.ppo.max_num_steps, config.policy.optimizer.lr, config.ppo.seed) == (19, 0.5, 5)
    assert checked.remarks[0].text.endswith(", and ppo.max_num_steps=19 policy.optimizer.lr=0.5")


def test_mistakes_in_changes_are_problems(run_dir: Path) -> None:
    for change in ("ppo.max_num_step=9", "ppo.max_num_steps=many"):
        assert check_overrides([f"run_dir={run_dir}", change]).problems[0].key == change.partition("=")[0]
    (run_dir / "config.yaml").write_text("policy: [")
    assert "is not valid YAML" in check_overrides([f"run_dir={run_dir}"]).problems[0].text


def test_a_recipe_composes_as_ever(run_dir: Path, tmp_path: Path) -> None:
    assert find_recorded_run(["+exp=quickstart_ppo", f"run_dir={run_dir}"]) is None
    assert find_recorded_run(["job=a.yaml", f"run_dir={run_dir}"]) is None
    assert find_recorded_run([f"run_dir={tmp_path}/new"]) is None
    assert find_recorded_run([f"run_dir={run_dir}"]) == run_dir


@pytest.mark.parametrize(
    ("overrides", "lacking", "named"),
    [
        ([], {"megatron.core", "vllm"}, ["Megatron-Core", "vLLM"]),
        ([], {"vllm"}, ["vLLM"]),
        (["debug.train=false"], {"megatron.core", "vllm"}, ["vLLM"]),
    ],
)
def test_a_package_that_a_run_cannot_do_without_is_missed_before_it_starts(
    overrides: list[str],
    lacking: set[str],
    named: list[str],
    base_overrides: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in an environment with `pip install .` alone."""
    installed = machine_checks._is_installed
    monkeypatch.setattr(machine_checks, "_is_installed", lambda package: package not in lacking and installed(package))
    problems = problems_of([*base_overrides, *overrides])
    assert [name for name in problems if name in ("Megatron-Core", "vLLM")] == named
    assert all("requirements/install_cpu.sh VENV" in problems[name] for name in named)
