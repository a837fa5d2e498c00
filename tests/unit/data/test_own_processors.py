"""Processors that a user wrote: NeMo RL's form is understood, and each mistake is one message."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_grpo.config.data_schema import DataConfig, TaskConfig
from megatron_grpo.config.errors import RunError
from megatron_grpo.data.datasets import AllTaskProcessedDataset
from megatron_grpo.data.loader import PromptLoader, PromptSampler, StreamLoader, add_waiting, iterate_batches
from megatron_grpo.data.processors import REFERENCE, TaskDataSpec
from megatron_grpo.data.specs import find_processor, find_processor_problems
from megatron_grpo.models.source import EOS, PAD
from megatron_grpo.prepare.models import make_tokenizer

ROOT = Path(__file__).parents[3]
SPEC = TaskDataSpec(task_name="math", apply_chat_template=False)
ROW = {"prompt": "1+1=", "answer": "2"}
TALK = [{"role": "system", "content": "Add.", "token_ids": [3]}, {"role": "user", "content": "1", "token_ids": [4, 5]}]


def nemo_rl(row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any, longest: int, idx: int) -> dict[str, Any]:
    """A processor as NeMo RL's documents write it."""
    return {
        "message_log": [{**turn, "token_ids": torch.tensor(turn["token_ids"])} for turn in TALK],
        "length": 3,
        "extra_env_info": {"ground_truth": "two"},
        "loss_multiplier": 1.0,
        "idx": idx,
        "task_name": spec.task_name,
    }


def prompt_of(process: Callable[..., Any], row: dict[str, Any], **options: bool) -> dict[str, Any]:
    dataset = AllTaskProcessedDataset([row], None, SPEC, {"math": (SPEC, process)}, 10, **options)
    return dict(dataset[0])


def change_fields(**changes: Any) -> Callable[..., Any]:
    def process(*arguments: Any) -> dict[str, Any]:
        fields = {**nemo_rl(*arguments), **changes}
        return {key: value for key, value in fields.items() if not isinstance(value, str) or value != "ABSENT"}

    return process


def picky(row: dict[str, Any], *more_arguments: Any) -> Any:
    return None if row["prompt"] == "no" else nemo_rl(row, *more_arguments)


def test_the_documented_processor_makes_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = (ROOT / "docs" / "data.md").read_text().partition("### A function of your own")[2]
    (tmp_path / "documented_rows.py").write_text(section.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    config = DataConfig(processor="documented_rows.riddles", apply_chat_template=False)
    assert list(find_processor_problems(config)) == []
    tokenizer = make_tokenizer({**{chr(code): code for code in range(32, 127)}, EOS: 0, PAD: 1, "<unk>": 2}, 99)
    datum = find_processor(config.processor)({"riddle": "Who?", "solution": "I"}, SPEC, tokenizer, 99, 7)
    assert datum["message_log"][0]["content"] == "A riddle: Who?"
    assert datum["message_log"][0]["token_ids"] == [ord(letter) for letter in "A riddle: Who?"]
    assert (datum["extra_env_info"]["answer"], datum["idx"]) == ("i", 7)


def test_a_processor_of_nemo_rl_gives_what_ours_give() -> None:
    assert prompt_of(nemo_rl, ROW) == {
        "message_log": TALK,
        "length": 3,
        "extra_env_info": {"ground_truth": "two", "answer": "two", REFERENCE: "two"},
        "loss_multiplier": 1.0,
        "idx": 0,
        "task_name": "math",
        "prompt": "1+1=",
    }


def test_further_fields_of_a_processor_reach_the_environment() -> None:
    prompt = prompt_of(change_fields(level="hard", __extra__={"source": "web", "ground_truth": "lost"}), ROW)
    assert prompt["extra_env_info"] == {
        "level": "hard",
        "source": "web",
        "ground_truth": "two",
        "answer": "two",
        REFERENCE: "two",
    }


def test_what_a_processor_leaves_open() -> None:
    bare = change_fields(task_name="ABSENT", length="ABSENT", idx="ABSENT", extra_env_info=None)
    datum = prompt_of(bare, {"question": "1+1", "answer": 2})
    assert (datum["prompt"], datum["task_name"], datum["length"], datum["idx"]) == ("Add.1", "math", 3, 0)
    assert datum["extra_env_info"] == {"answer": 2, REFERENCE: "2"}
    assert prompt_of(change_fields(prompt="as it says"), ROW)["prompt"] == "as it says"
    assert prompt_of(change_fields(message_log=[], loss_multiplier=0), ROW)["loss_multiplier"] == 0.0


MISTAKES = {
    "returned NoneType, not a DatumSpec": lambda *_: None,
    "raised ZeroDivisionError: ": lambda *_: 1 // 0,
    "raised StopIteration": lambda *_: next(iter(())),
    "raised ValueError: invalid literal": lambda *_: int("x"),
    "returned no message_log, only": change_fields(message_log="ABSENT"),
    "returned no loss_multiplier, only": change_fields(loss_multiplier="ABSENT"),
    "returned loss_multiplier=None": change_fields(loss_multiplier=None),
    r"returned loss_multiplier=tensor\(\[1, 1\]\)": change_fields(loss_multiplier=torch.tensor([1, 1])),
    "returned dict as message_log": change_fields(message_log={}),
    r"returned no token_ids in message_log\[0\]": change_fields(message_log=[{"role": "user", "content": "1"}]),
    "that are not a flat list": change_fields(message_log=[{"role": "user", "token_ids": torch.tensor([[1, 2]])}]),
    "returned a message_log without tokens": change_fields(message_log=[]),
    "returned list as extra_env_info": change_fields(extra_env_info=[1]),
    "returned task_name='chess', which is not an environment": change_fields(task_name="chess"),
    "returned int as prompt": change_fields(prompt=3),
}


@pytest.mark.parametrize("reason", MISTAKES)
def test_a_mistake_is_one_message_with_row_and_processor(reason: str) -> None:
    process = MISTAKES[reason]
    with pytest.raises(ValueError, match=rf"^row 0: its processor {__name__}\..* {reason}"):
        prompt_of(process, ROW)
    assert prompt_of(process, ROW, skip_refused=True)["loss_multiplier"] == 0.0, "data.bad_rows=skip leaves it out"


@pytest.mark.parametrize("bad_rows", ["fail", "skip"])
def test_a_stream_treats_processors_as_files_do(bad_rows: Any) -> None:
    data = DataConfig(train_path="some/name", streaming=True, bad_rows=bad_rows, shuffle=False, processor="my.picky")
    (config,) = data.training_sets.values()
    loader = StreamLoader(
        [ROW, {"prompt": "no"}, ROW],
        config=config,
        data=data,
        environments={"math": "math"},
        prompts=AllTaskProcessedDataset([], None, SPEC, {"math": (SPEC, picky)}, 10),
        prompts_per_batch=2,
        seed=1,
    )
    if bad_rows == "fail":
        with pytest.raises(RunError, match=r"^some/name, row 1: its processor .*picky returned NoneType"):
            list(loader)
    else:
        assert [[datum["idx"] for datum in batch] for batch in loader] == [[0, 2]]
        assert loader.left_out == 1


@pytest.mark.parametrize("waiting", [[0, 1], [1], [0, 2, 1]])
@pytest.mark.parametrize("bad_rows", ["fail", "skip"])
def test_a_processor_that_refuses_a_row_only_at_a_resume(waiting: list[int], bad_rows: str) -> None:
    """Rows that wait to be loaded again are treated as rows that are loaded for the first time."""
    rows = [ROW, {"prompt": "no"}, *[ROW] * 4]
    prompts = AllTaskProcessedDataset(rows, None, SPEC, {"math": (SPEC, picky)}, 10, skip_refused=bad_rows == "skip")
    first, resumed = (
        PromptLoader(data, prompts_per_batch=2, order=PromptSampler([6], [1.0], shuffle=False, seed=1))
        for data in (replace(prompts, task_data_processors={"math": (SPEC, nemo_rl)}), prompts)
    )
    assert [len(batch) for batch in islice(first, 2)] == [2, 2]
    resumed.load_state_dict(add_waiting(first.state_dict(), waiting))
    if bad_rows == "fail":
        with pytest.raises(RunError, match=r"^row 1: its processor .*picky returned NoneType.*; data\.bad_rows=skip"):
            list(iterate_batches(resumed, max_num_epochs=1))
    else:
        drawn = [datum["idx"] for batch in iterate_batches(resumed, max_num_epochs=1) for datum in batch]
        expected = [*(row for row in waiting if row != 1), 4, 5]
        assert drawn == expected[: len(expected) // 2 * 2]


def test_a_task_name_of_null_is_none() -> None:
    for process in (nemo_rl, change_fields(task_name=None)):
        assert prompt_of(process, {**ROW, "task_name": None})["task_name"] == "math"


def test_a_processor_that_cannot_be_imported_is_found_before_the_run() -> None:
    data = DataConfig(processor="no_mod.f", tasks={"math": TaskConfig(processor="json.JSON"), "code": TaskConfig()})
    assert [
        (processor_problem.subject, processor_problem.text.partition(":")[0])
        for processor_problem in find_processor_problems(data)
    ] == [
        ("data.processor=no_mod.f", "cannot be imported"),
        ("data.tasks.math.processor=json.JSON", "cannot be imported"),
    ]
    assert not list(find_processor_problems(replace(data, processor="json.loads", tasks={})))
