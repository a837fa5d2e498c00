"""Commands and settings that the documents show are taken by the programs, and links lead somewhere."""

import importlib
import re
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_grpo.config.job import read_job_file
from megatron_grpo.config.schema import Config
from megatron_grpo.preflight.load import compose_config
from tests.support.documents import DOCUMENTS, ROOT, Command, blocks, broken_links, commands, yaml_blocks

SHOWN = [command for document in DOCUMENTS for command in commands(document)]
OF_THE_READER = re.compile(r"\.\.\.|\b[A-Z]{2,}\b|<\w+>|recipes|exp=mine|\bsums")
"""What stands for something that the reader has."""
RECIPES_ALONE = {"--cfg", "job", "--check", "--help", "--version", "--json", "--search", "--html", "plan.html"}
RECIPES_ALONE |= {"--dry-run", "slurm", "kubernetes", "ray", "local"}


def of_module(*names: str) -> list[Command]:
    """The commands that start one of these modules."""
    return [command for command in SHOWN if command.words[0] in {f"megatron_grpo.{name}" for name in names}]


def test_commands_are_found() -> None:
    assert len(of_module("train")) > 10
    assert len(of_module("verify", "export", "refit_plan")) > 3
    assert len(of_module("plan")) > 3
    assert {"make", "sbatch"} <= {word for command in SHOWN for word in command.words}


@pytest.mark.parametrize("command", of_module("train", "refit_plan", "plan", "launch"), ids=str)
def test_recipes_and_keys_compose(command: Command) -> None:
    words = [word for word in command.words[1:] if word not in RECIPES_ALONE and not OF_THE_READER.search(word)]
    if any("exp=" in word for word in words):
        compose_config(words)


@pytest.mark.parametrize("command", [command for command in SHOWN if "sbatch" in command.words], ids=str)
def test_jobs_of_slurm_compose(command: Command) -> None:
    words = command.words[command.words.index("sbatch") + 1 :]
    script = next(index for index, word in enumerate(words) if not word.startswith("-"))
    assert (ROOT / words[script]).is_file()
    compose_config(words[script + 1 :])


@pytest.mark.parametrize(
    "command",
    [
        command
        for command in SHOWN
        if re.match(r"megatron_grpo\.(?!train$|refit_plan$|plan$|launch$)", command.words[0])
    ],
    ids=str,
)
def test_other_programs_know_their_options(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        importlib.import_module(command.words[0]).main(["--help"])
    usage = capsys.readouterr().out
    for word in command.words[1:]:
        name, equals, _ = word.partition("=")
        if not equals and (OF_THE_READER.search(word) or word.startswith("outputs/")):
            continue  # a folder or a name
        assert re.search(rf"(?<![\w-]){re.escape(name)}\b", usage), f"{word} is not in the usage"


@pytest.mark.parametrize(
    "command", [command for command in SHOWN if command.words[0].startswith("benchmarks/")], ids=str
)
def test_benchmarks_know_their_options(command: Command) -> None:
    source = (ROOT / command.words[0]).read_text()
    for word in command.words[1:]:
        if word.startswith("--"):
            name = word.partition("=")[0].removeprefix("--")
            assert re.search(rf"""["'](--)?{name.replace("-", "[-_]")}["']""", source), f"{word} is not an option"


@pytest.mark.parametrize("command", [command for command in SHOWN if "make" in command.words], ids=str)
def test_targets_of_make(command: Command) -> None:
    targets = [word for word in command.words[command.words.index("make") + 1 :] if "=" not in word and word != "..."]
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_settings_begin_with_a_section(document: Path, tmp_path: Path) -> None:
    text, _, jobs = document.read_text().partition("\n## Flat jobs\n")
    for settings in yaml_blocks(text):
        assert settings.keys() <= vars(Config()).keys()
    for number, block in enumerate(text for text in blocks(jobs) if re.match(r"\w+:", text)):  # a job's fields
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        assert read_job_file(str(file))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    assert broken_links(document, document.read_text()) == []


def test_a_broken_link_is_found() -> None:
    document = ROOT / "docs" / "refit.md"
    text = "[a](architecture.md) [b](gone.md) [c](architecture.md#the-files-of-a-step) [d](architecture.md#gone) [e](https://x.org)"
    assert broken_links(document, text) == ["gone.md", "architecture.md#gone"]
