"""The shell scripts and container files are clean, and the wheel carries everything a run needs."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "launchers").iterdir()), *sorted((ROOT / "requirements").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_clean_and_executable(script: Path) -> None:
    process = subprocess.run([tool("shellcheck"), str(script)], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_container_files_are_clean(name: str) -> None:
    process = subprocess.run([tool("hadolint"), str(ROOT / "docker" / name)], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout


def test_local_launcher_passes_its_arguments_and_keeps_the_output(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHON": sys.executable, "RUN_DIR": str(tmp_path / "run")}
    command = [str(ROOT / "launchers" / "local.sh"), "grpo.max_num_step=3", "--cfg", "job"]
    process = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 2
    assert "did you mean grpo.max_num_steps?" in process.stdout
    assert (tmp_path / "run" / "output.log").read_text() == process.stdout


def test_the_slurm_script_refuses_to_run_outside_slurm() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    process = subprocess.run([str(ROOT / "launchers" / "slurm_pyxis.sbatch")], env=env, capture_output=True, text=True)
    assert process.returncode == 2
    assert process.stderr == "slurm_pyxis.sbatch: start it with sbatch\n"


def test_the_slurm_script_raises_the_limits_of_nodes() -> None:
    text = (ROOT / "launchers" / "slurm_pyxis.sbatch").read_text()
    function = text[text.index("raise_limits() {") : text.index("\n}\n", text.index("raise_limits() {")) + 3]
    highest = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for hard, expected in ((highest, min(highest, 65_535)), (2_000, 2_000)):
        limit = f"ulimit -Sn 100; ulimit -Hn {hard}; {function}raise_limits; ulimit -Sn"
        process = subprocess.run(["bash", "-euc", limit], capture_output=True, text=True)
        assert (process.stdout, process.stderr) == (f"{expected}\n", "")
    for call in ('head_node \\"', 'worker_node \\"'):
        assert f"$(declare -f raise_limits open_cache close_cache {call.split()[0]})" in text


def test_kernels_are_compiled_on_the_node_and_outlive_the_job(tmp_path: Path) -> None:
    text = (ROOT / "launchers" / "slurm_pyxis.sbatch").read_text()
    functions = text[text.index("open_cache() {") : text.index("\n}\n", text.index("close_cache() {")) + 3]
    # The folder on the node's disk is that of the user; the test has another one.
    functions = functions.replace("/tmp/megatron_grpo_$UID", str(tmp_path / "node"))
    names = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"CACHE_DIR": str(tmp_path / "shared"), "SLURM_JOB_ID": "7", "VLLM_CACHE_ROOT": "/mine"}
    (tmp_path / "shared").mkdir()

    def run_node(role: str, commands: str) -> str:
        script = f"{functions}open_cache; {commands}; close_cache {role!r}"
        process = subprocess.run(["bash", "-euc", script], env=env, capture_output=True, text=True)
        assert (process.returncode, process.stderr) == (0, "")
        assert not (tmp_path / "node").exists(), "nothing is left on the node"
        return process.stdout

    folders = run_node("first", 'mkdir "$TRITON_CACHE_DIR"; echo one >"$TRITON_CACHE_DIR/a"; echo "$VLLM_CACHE_ROOT"')
    assert folders == "/mine\n"
    run_node("last", 'mkdir -p "$TORCHINDUCTOR_CACHE_DIR"; echo two >"$TORCHINDUCTOR_CACHE_DIR/b"')
    run_node("", 'echo of no use >"$TRITON_CACHE_DIR/a"')
    assert run_node("", 'cat "$TRITON_CACHE_DIR/a" "$TORCHINDUCTOR_CACHE_DIR/b"') == "one\ntwo\n"
    assert sorted(path.name for path in (tmp_path / "shared").iterdir()) == ["kernels_first.tar", "kernels_last.tar"]


def test_the_wheel_carries_the_configuration_and_works_in_any_folder(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, because a build leaves folders behind
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("megatron_grpo", "conf", "kernels"):
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        "dist",
    ]
    subprocess.run([*build, "."], cwd=source, check=True, capture_output=True)
    (wheel,) = (source / "dist").glob("*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    assets = (ROOT / "megatron_grpo" / "observability" / "page" / "assets").iterdir()
    data = (ROOT / "megatron_grpo").rglob("*.yaml")
    for file in (*(ROOT / "megatron_grpo").rglob("*.py"), *assets, *data):
        assert (installed / file.relative_to(ROOT)).is_file(), file
    assert (installed / "megatron_grpo_kernels" / "__init__.py").is_file()
    code = (
        "from megatron_grpo import command; print(command.__file__); command.main(['+exp=quickstart', '--cfg', 'job'])"
    )
    env = {**os.environ, "PYTHONPATH": str(installed)}
    process = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(str(installed))
    assert "name: quickstart" in process.stdout


def tool(name: str) -> str:
    """A command that was installed beside the interpreter, or is on the path."""
    beside = Path(sys.executable).with_name(name)
    path = str(beside) if beside.exists() else shutil.which(name)
    assert path is not None, f"{name} is not installed"
    return path


def job(
    tmp_path: Path,
    *arguments: str,
    nodes: int,
    driver: str = "exit 0",
    check: str = "echo 0 links; exit",
    **variables: str,
) -> subprocess.Popen[str]:
    """The Slurm script in a job whose srun only records its commands, but runs `driver` and the `check` of $host."""
    folder, tools = tmp_path / "submit", tmp_path / "tools"
    for subfolder in (folder, tools):
        subfolder.mkdir(exist_ok=True)
    record, workers = tmp_path / "commands", tmp_path / "workers"
    workers.touch()
    names = "\n".join(f"node{number}" for number in range(nodes))
    scripts = {
        # The driver's end ends the other nodes, so it waits until they are recorded.
        "srun": f"""
if [[ "$*" == *check_node* ]]; then
    for word in "$@"; do [[ $word == --nodelist=* ]] && host=${{word#*=}}; done
    {check}
fi
for _ in {{1..200}}; do
    [[ "$*" != *--nodelist=node0* || $(wc -l <{workers}) -ge ${{WORKERS:-{min(nodes - 1, 1)}}} ]] && break
    sleep 0.05
done
{{ flock 9; printf '%s\\0' "$@" >&9; printf '\\n\\0' >&9; }} 9>>{record}
[[ "$*" != *--nodelist=node0* ]] && echo >>{workers} && exit
{driver}""",
        "scontrol": f"""
[[ $3 = engine* ]] && echo engine0 && exit
[[ $1 = show ]] && echo '{names}' || echo "$@" >>{tmp_path / "requeued"}""",
    }
    for name, text in scripts.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HF_"))}
    env |= {"PATH": f"{tools}:{env['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[0-1]"}
    env |= {"SLURM_SUBMIT_DIR": str(folder), "HOME": str(tmp_path / "home"), "HEAD_IP": "10.0.0.1", **variables}
    command = [str(ROOT / "launchers" / "slurm_pyxis.sbatch"), *arguments]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def submit_job(
    tmp_path: Path, *arguments: str, nodes: int = 2, check: str = "echo 0 links; exit", **variables: str
) -> list[list[str]]:
    """The commands that the Slurm script gives to srun."""
    with job(tmp_path, *arguments, nodes=nodes, check=check, **variables) as script:
        _, errors = script.communicate(timeout=60)
    assert script.returncode == 0, errors
    record = (tmp_path / "commands").read_text()
    return [command.split("\0")[:-1] for command in record.split("\n\0")[:-1]]


def mounts_of(command: list[str]) -> list[str]:
    (mounts,) = [word.split("=", 1)[1] for word in command if word.startswith("--container-mounts=")]
    return mounts.split(",")


def test_what_a_run_writes_outlives_its_containers(tmp_path: Path) -> None:
    run, refit, data = tmp_path / "runs" / "one", tmp_path / "scratch" / "refit", tmp_path / "data"
    commands = submit_job(
        tmp_path,
        "+exp=quickstart",
        f"refit.directory={refit}",
        CONTAINER_IMAGE="image.sqsh",
        RUN_DIR=str(run),
        CONTAINER_MOUNTS=f"{data}:/data",
    )
    assert len(commands) == 2, "the other node, then the first"
    for command in commands:
        home = tmp_path / "home" / ".cache"
        folders = tmp_path / "submit", run, home / "huggingface", home / "megatron_grpo", refit
        expected = [f"{folder}:{folder}" for folder in folders]
        assert mounts_of(command) == [*expected, f"{data}:/data"]
        assert "--cpu-bind=none" in command
    assert run.is_dir(), "pyxis mounts what is there"
    assert f"run_dir={run}" in commands[1]


def test_a_folder_within_the_submission_folder_is_mounted_with_it(tmp_path: Path) -> None:
    models = tmp_path / "models"
    (command,) = submit_job(tmp_path, nodes=1, CONTAINER_IMAGE="image.sqsh", RUN_DIR="runs/one", HF_HOME=str(models))
    folders = tmp_path / "submit", models, tmp_path / "home" / ".cache" / "megatron_grpo"
    assert mounts_of(command) == [f"{folder}:{folder}" for folder in folders]
    assert f"run_dir={tmp_path / 'submit' / 'runs' / 'one'}" in command


def test_a_run_folder_that_would_not_be_mounted_is_refused(tmp_path: Path) -> None:
    with job(tmp_path, "run_dir=/scratch/one", nodes=1, CONTAINER_IMAGE="image.sqsh") as script:
        _, errors = script.communicate(timeout=60)
    assert script.returncode == 2
    assert "give RUN_DIR=/scratch/one, which is mounted and resumed, and not run_dir=/scratch/one" in errors


FAILING = """
case $host in
node1) echo starting; echo 7 of 8 GPUs answer; exit 1 ;;
node2) sleep 60 ;;
node3) echo 3 links; exit ;;
*) echo 4 links; exit ;;
esac"""


def read_hosts(command: list[str]) -> list[str]:
    (hosts,) = [word.partition("=")[2].split(",") for word in command if word.startswith("--nodelist=")]
    return hosts


def test_spares_replace_nodes_that_fail_their_check(tmp_path: Path) -> None:
    variables = {"PYTHON": sys.executable, "SPARES": "3", "CHECK_TIME": "2"}
    with job(tmp_path, nodes=6, check=FAILING, **variables) as script:
        output, errors = script.communicate(timeout=60)
    assert script.returncode == 0, errors
    commands = [command.split("\0")[:-1] for command in (tmp_path / "commands").read_text().split("\n\0")[:-1]]
    assert sorted(host for command in commands for host in read_hosts(command)) == ["node0", "node4", "node5"]
    assert "node node1 fails: 7 of 8 GPUs answer" in output
    assert "node node2 fails: did not answer within 2 s" in output
    assert "node node3 fails: 3 links of the network are up, and 4 on others" in output


def test_too_few_fit_nodes_end_the_job(tmp_path: Path) -> None:
    with job(tmp_path, nodes=6, check=FAILING, PYTHON=sys.executable, SPARES="2", CHECK_TIME="2") as script:
        _, errors = script.communicate(timeout=60)
    assert script.returncode == 1
    assert errors == "3 of 6 nodes are fit, and the run needs 4\n"
    assert not (tmp_path / "commands").exists()


def test_groups_of_a_heterogeneous_job_have_labels(tmp_path: Path) -> None:
    groups = {"SLURM_JOB_NODELIST_HET_GROUP_0": "node[0-1]", "SLURM_JOB_NODELIST_HET_GROUP_1": "engine[0-0]"}
    commands = submit_job(tmp_path, "+exp=quickstart", PYTHON=sys.executable, WORKERS="2", **groups)
    roles: dict[str, set[str]] = {}
    for command in commands:
        (group,) = [word for word in command if word.startswith("--het-group=")]
        roles.setdefault(group, set()).update(word for word in command if word.startswith("--labels="))
    label = "--labels=megatron-grpo-role"
    assert roles == {"--het-group=0": {f"{label}=training"}, "--het-group=1": {f"{label}=generation"}}


def test_each_job_of_an_array_has_a_seed_and_a_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    variables = {"RUN_DIR": str(run), "SEEDS": "7 11", "SLURM_ARRAY_TASK_ID": "1", "SEED_KEY": "ppo.seed"}
    (command,) = submit_job(tmp_path, "+exp=quickstart", nodes=1, PYTHON=sys.executable, **variables)
    assert command[-3:] == [f"run_dir={run}/seed_11", "+exp=quickstart", "ppo.seed=11"]


REQUEUED = "requeue 7\n"


def test_a_job_is_requeued_for_a_run_that_ended_for_lack_of_time(tmp_path: Path) -> None:
    """Before Slurm's signal, because its steps and saves take longer than the signal leaves."""
    run, record = tmp_path / "run", tmp_path / "requeued"
    driver = f"mkdir -p {run}; touch {run}/out_of_time"
    with job(tmp_path, nodes=1, driver=driver, PYTHON=sys.executable, RUN_DIR=str(run)) as script:
        script.communicate(timeout=60)
    assert script.returncode == 0
    assert record.read_text() == REQUEUED


@pytest.mark.parametrize(
    ("driver", "code", "requeued"),
    [
        ("until [[ -e {run}/stop ]]; do sleep 0.05; done", 0, REQUEUED),
        ("until [[ -e {run}/stop ]]; do sleep 0.05; done; exit 3", 3, ""),
        ("until [[ -e {requeued} ]]; do sleep 0.05; done; exit 143", 143, REQUEUED),
    ],
    ids=["saves in time", "fails by itself", "does not save in time"],
)
def test_a_run_saves_before_its_job_is_requeued(tmp_path: Path, driver: str, code: int, requeued: str) -> None:
    run, record = tmp_path / "run", tmp_path / "requeued"
    record.touch()
    driver = driver.format(run=run, requeued=f"{tmp_path / 'asked'}")
    with job(tmp_path, nodes=1, driver=driver, PYTHON=sys.executable, RUN_DIR=str(run), SAVE_TIME="1") as script:
        while not (tmp_path / "commands").exists():
            time.sleep(0.05)
        script.send_signal(signal.SIGUSR1)
        if code == 143:  # Slurm ends the steps of a job that it requeues
            while not record.read_text():
                time.sleep(0.05)
            (tmp_path / "asked").touch()
        script.communicate(timeout=60)
    assert script.returncode == code
    assert record.read_text() == requeued


@pytest.mark.parametrize(
    ("of_name", "own_address", "expected"),
    [("10.1.0.5", "172.17.0.1 10.1.0.5", "10.1.0.5"), ("127.0.1.1", "fe80::1 10.1.0.5", "10.1.0.5"), ("", "", "")],
    ids=["resolved", "loopback", "none"],
)
def test_nodes_meet_at_the_address_of_the_first_name(
    tmp_path: Path, of_name: str, own_address: str, expected: str
) -> None:
    answers = {"getent": f"{of_name}     STREAM node0\n{of_name}     DGRAM" if of_name else "", "hostname": own_address}
    for name, text in answers.items():
        (tmp_path / name).write_text(f"#!/bin/bash\nprintf '{text}\\n'\n")
        (tmp_path / name).chmod(0o755)
    script = (ROOT / "launchers" / "slurm_pyxis.sbatch").read_text()
    function = script[script.index("first_address() {") :].partition("\n}\n")[0] + "\n}\nfirst_address"
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.run(["bash", "-c", function], env=env, capture_output=True, text=True, check=False)
    assert process.stdout.strip() == expected


def test_every_node_removes_the_folder_of_its_ray(tmp_path: Path) -> None:
    """The other nodes' Ray takes the folder of the head's."""
    for command in submit_job(tmp_path, PYTHON=sys.executable):
        script = command[command.index("-c") + 1]
        assert 'rm -rf "$temp"' in script
        assert "/tmp/ray_7" in command
