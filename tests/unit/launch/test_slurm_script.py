"""The script of a Slurm job is the launcher's, with the settings of the launch, whatever signs they have."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_grpo.config.errors import ConfigError
from megatron_grpo.launch.launch_request import Request
from megatron_grpo.launch.slurm import SlurmTarget
from megatron_grpo.preflight.load import compose_config

ROOT = Path(__file__).parents[3]
LAUNCHER = (ROOT / "launchers" / "slurm_pyxis.sbatch").read_text()
LARGE = ("+exp=llama3_70b_slurm", "launch.generation_nodes=4", "launch.spares=1", "launch.slurm.partition=h100")


def make_request(*overrides: str, run_dir: str = "outputs/mine", folder: Path = Path("/home/me")) -> Request:
    """The request of a command line, without the checks of this machine."""
    return Request(compose_config(list(overrides)), overrides, run_dir, folder)


def render(*overrides: str, run_dir: str = "outputs/mine") -> str:
    return SlurmTarget().render(make_request(*overrides, run_dir=run_dir))


def split_script(script: str) -> tuple[str, str]:
    """The launcher's own text of a rendered script, and the inserted block."""
    head, tail = re.fullmatch(r"(.*\n#SBATCH --signal=[^\n]*?300\n)(.*)", LAUNCHER, flags=re.DOTALL).groups()
    assert script.startswith(head)
    assert script.endswith(tail)
    return head + tail, script[len(head) : len(script) - len(tail)]


def read_settings(script: str) -> tuple[list[str], dict[str, str], list[str]]:
    """Options, variables and arguments that Slurm and bash read from the inserted block."""
    block = split_script(script)[1]
    options = re.findall(r"^#SBATCH (.*)$", block.partition("\n\n")[0], flags=re.MULTILINE)
    show = 'printf "%s\\0" "$RUN_DIR" "$PYTHON" "$CONTAINER_IMAGE" "$SEEDS" "$@"'
    process = subprocess.run(["bash", "-euc", f"{block}\n{show}"], capture_output=True, check=True)
    run_dir, python, image, seeds, *arguments = process.stdout.decode().split("\0")[:-1]
    return options, {"RUN_DIR": run_dir, "PYTHON": python, "IMAGE": image, "SEEDS": seeds}, arguments


@pytest.mark.parametrize("overrides", [("+exp=quickstart",), LARGE], ids=["one node", "two groups"])
def test_the_plain_file_and_the_rendered_one_are_the_same_template(overrides: tuple[str, ...]) -> None:
    assert split_script(render(*overrides))[0] == LAUNCHER


@settings(max_examples=30)
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40))
def test_no_text_of_the_user_leaves_its_quotes(text: str) -> None:
    request = make_request("+exp=quickstart")
    odd = Request(request.config, ("+exp=quickstart", f"policy.model.path={text}"), f"outputs/{text}", request.folder)
    _, variables, arguments = read_settings(SlurmTarget().render(odd))
    assert arguments == ["+exp=quickstart", f"policy.model.path={text}"]
    assert variables["RUN_DIR"] == f"outputs/{text}"


@pytest.mark.parametrize("text", ["$(touch here)", "`id`", "a'b\"c", "two\nlines", "# no", "; exit", "-x", "\\"])
def test_shells_and_slurm_get_options_that_are_words(text: str) -> None:
    for key in ("partition", "account", "qos"):
        with pytest.raises(ConfigError, match=f"launch.slurm.{key}"):
            compose_config(["+exp=quickstart", f"launch.slurm.{key}={shlex.quote(text)}"])


def test_a_job_has_the_nodes_of_the_run_and_its_options() -> None:
    given_options = ("launch.slurm.account=team", "launch.time_limit_s=3601", "launch.slurm.save_s=600")
    options, variables, _ = read_settings(render("+exp=llama3_70b_slurm", *given_options, "launch.image=grpo.sqsh"))
    assert {"--nodes=8", "--gpus-per-node=8", "--account=team", "--time=61", "--signal=B:USR1@660"} <= {*options}
    assert variables["IMAGE"] == "grpo.sqsh"
    assert variables["PYTHON"] == "python3"


def test_engines_get_a_group_of_nodes_with_spares_of_its_own() -> None:
    options, _, _ = read_settings(render(*LARGE, 'launch.slurm.generation_options=["--partition=l40s"]'))
    at = options.index("hetjob")
    assert {"--nodes=5", "--partition=h100"} <= {*options[:at]}
    assert {"--nodes=5", "--partition=l40s", "--gpus-per-node=8", "--exclusive"} <= {*options[at:]}
    assert "--partition=h100" not in options[at:]


def test_seeds_make_an_array() -> None:
    options, variables, _ = read_settings(render("+exp=quickstart", "launch.seeds=[7,11]"))
    assert {"--array=0-1", "--output=slurm-%A_%a.out"} <= {*options}
    assert variables["SEEDS"] == "7 11"
