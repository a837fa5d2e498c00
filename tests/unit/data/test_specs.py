"""The files that prompts are made with, looked at before a run."""

from pathlib import Path

import pytest

from megatron_grpo.config.data_schema import DataConfig, TaskConfig
from megatron_grpo.data.specs import find_spec_problems


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("Think first.", "has neither {} nor a {column}"),
        ("Put it in \\boxed{{}}.", "has neither {} nor a {column}"),
        ("Solve {", "has a brace too many"),
        ("Solve {} in \\boxed{{}}.", None),
        ("Level {level}", None),
    ],
)
def test_the_words_of_a_prompt_file_have_a_place_for_the_row(tmp_path: Path, words: str, reason: str | None) -> None:
    file = tmp_path / "words.txt"
    file.write_text(words)
    data = DataConfig(prompt_file=str(file), tasks={"math": TaskConfig(prompt_file=str(file))})
    problems = list(find_spec_problems(data))
    keys = [f"{section}.prompt_file={file}" for section in ("data", "data.tasks.math")]
    assert [problem.subject for problem in problems] == ([] if reason is None else keys)
    assert all(reason is not None and reason in problem.text for problem in problems)


def test_a_processor_of_ones_own_may_use_the_words_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text("Think first.")
    assert not list(find_spec_problems(DataConfig(prompt_file=str(file), processor="my_data.riddles")))
