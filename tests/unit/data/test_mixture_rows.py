"""Rows besides the prompts: demonstrated responses, and prompts with the hint of a policy that teaches itself."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.errors import ConfigError
from megatron_grpo.config.schema import Config
from megatron_grpo.data.load_prompts import PromptData, load_prompt_data
from megatron_grpo.models.source import VOCABULARY
from megatron_grpo.preflight.data_checks import check_prompt_files
from megatron_grpo.prepare.models import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(VOCABULARY, 64)


def write(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def compose(recipe: str, folder: Path, *overrides: str) -> Config:
    rows = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(20)]
    composed = compose_typed(
        [
            f"+exp={recipe}",
            *(f"data.train_path={write(folder / 'train.jsonl', rows)}", "data.val_path=null", "data.shuffle=false"),
            *("grpo.num_prompts_per_step=4", *overrides),
        ]
    )
    assert composed.config is not None, composed.problems
    return composed.config


def load(config: Config, tokenizer: PreTrainedTokenizerFast) -> PromptData:
    return load_prompt_data(config, Path(), tokenizer)


def test_demonstrations_are_read_as_those_of_fine_tuning(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    demonstrations = [{"prompt": f"{n}+2=", "solution": f"{n + 2}" * (40 if n == 2 else 1)} for n in range(3)]
    path = write(tmp_path / "demonstrations.jsonl", demonstrations)
    config = compose("quickstart_chord", tmp_path, f"chord.train_path={path}", "chord.response_key=solution")
    assert check_prompt_files(config)[0] == []
    data = load(config, tokenizer)
    texts = [[tokenizer.decode(message["token_ids"]) for message in row["message_log"]] for row in data.demonstrations]
    assert texts == [["0+2=", "2" + tokenizer.eos_token], ["1+2=", "3" + tokenizer.eos_token]], "one is too long"
    assert any("1 of the 3 rows" in note for note in data.notes)
    assert next(iter(data.loader))[0]["extra_env_info"]["answer"] == "1", "prompts are as ever"


def test_what_is_wrong_with_demonstrations_is_said_before_the_run(tmp_path: Path) -> None:
    path = write(tmp_path / "demonstrations.jsonl", [{"prompt": "1+2="}])
    config = compose("quickstart_chord", tmp_path, f"chord.train_path={path}", "chord.response_key=solution")
    ((problem, *_), _) = check_prompt_files(config)
    assert "has no column 'solution'" in problem.text
    config = compose("quickstart_chord", tmp_path, "chord.train_path=nothing.jsonl")
    assert [problem.key for problem in check_prompt_files(config)[0]] == ["chord.train_path"]


def test_hints_have_the_numbers_of_their_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    second = write(tmp_path / "more.jsonl", [{"prompt": "7+7=", "answer": "14"}] * 4)
    config = compose("quickstart_self_distillation", tmp_path)
    config.data.train_sets = {
        "a": DatasetConfig(path=str(tmp_path / "train.jsonl")),
        "b": DatasetConfig(path=str(second)),
    }
    data = load(config, tokenizer)
    hinted = data.hinted_prompts
    assert hinted is not None
    for prompt in itertools.chain.from_iterable(data.loader):
        (message,) = hinted[prompt["idx"]]["message_log"]
        expected = f"{prompt['extra_env_info']['answer']}={prompt['prompt']}"
        assert tokenizer.decode(message["token_ids"]) == expected


def test_a_hint_of_a_column_that_is_not_there_names_its_setting(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    config = compose("quickstart_self_distillation", tmp_path, 'distillation.hint_prompt="{} {solution}"')
    with pytest.raises(ConfigError, match=r"distillation\.hint_prompt cannot be filled in: KeyError: 'solution'"):
        load(config, tokenizer)
