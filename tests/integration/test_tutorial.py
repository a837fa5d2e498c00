"""The commands of docs/tutorial.md, in their order, as a reader types them."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
RUNS = re.compile(
    r"make|megatron_grpo\.(?:train(?!.*--check)|evaluate|report|export|verify|plan|refit_plan)|read_rollouts|^ls out"
)
"""Commands that take long, or that need the result of such a command."""


class Reader:
    """A shell in a folder with the files of a clone that the commands name."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.has_failed = folder, False
        for name in ("launchers", "tests"):
            (folder / name).symlink_to(ROOT / name)
        # The clone's Python is this one, with what `make quickstart` would install.
        self.env = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        self.env["PYTHON"] = sys.executable

    def type(self, block: str) -> str:
        """Run a block; return what it printed."""
        block = block.replace("make quickstart", "python -m megatron_grpo.train +exp=quickstart")
        process = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=self.folder, env=self.env, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=590)  # fmt: skip
        self.has_failed = process.returncode != 0
        assert not self.has_failed, f"{block}\n{process.stdout}"
        return process.stdout


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return Reader(tmp_path_factory.mktemp("clone"))


def name_block(block: str) -> str:
    """Name a block by its last command."""
    return re.sub(r"\W+", "_", block.strip().splitlines()[-1])[:50]


def drop_lines(block: str, dropped: re.Pattern[str]) -> str:
    """Drop the commands of a block that match."""
    commands = re.findall(
        r"(?:[^\n]*<<'END'\n.*?^END\n|(?:[^\n]*\\\n)*[^\n]*\n)", block, flags=re.DOTALL | re.MULTILINE
    )
    return "".join(command for command in commands if not dropped.search(command))


def test_commands_are_found() -> None:
    assert len(BLOCKS) >= 10
    quick: Sequence[str] = [drop_lines(block, RUNS) for block in BLOCKS]
    assert sum(bool(block) for block in quick) >= 4
    assert "megatron_grpo.new" in "".join(quick)
    assert "last_digit" in "".join(quick)


def test_quick_commands_run(tmp_path: Path) -> None:
    """Those that train nothing: the folder, its rows, its reward, the checks."""
    reader, printed = Reader(tmp_path), ""
    for block in filter(None, (drop_lines(block, RUNS) for block in BLOCKS)):
        if "policy.model.path=outputs" not in block:
            printed += reader.type(block)
    assert printed.count("configuration is fine: sums") >= 3
    assert printed.count("3 passed") == 2


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS, ids=name_block)
def test_every_command_runs(block: str, reader: Reader) -> None:
    if reader.has_failed:
        pytest.skip("an earlier command failed")
    printed = reader.type(block)
    if "run_dir=outputs/first" in block:
        before, after = map(float, re.findall(r"held-out accuracy ([\d.]+) -> ([\d.]+)", printed)[-1])
        assert after > before + 0.2
