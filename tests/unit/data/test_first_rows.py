"""Rows that are tokenised together are left out, refused and told as those that are looked at one by one."""

from dataclasses import replace
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.data import load_prompts as first_rows
from megatron_grpo.data.datasets import AllTaskProcessedDataset
from megatron_grpo.data.load_prompts import count_left_out
from megatron_grpo.data.processors import DatumSpec, TaskDataSpec, math_data_processor
from megatron_grpo.data.specs import find_processor

LONGEST = 12
CHAT = (
    "{% for m in messages %}{{ m.content }}{% if 'no' in m.content %}{{ raise_exception('no') }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, and none for others."""
    core = Tokenizer(models.WordLevel({chr(code): code - 32 for code in range(32, 127)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT)


def process_row(row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any, longest: int, idx: int) -> DatumSpec:
    """A user's processor, of which only it knows what it does."""
    return math_data_processor({**row, "prompt": row["prompt"] * 2}, spec, tokenizer, longest, idx)


def dataset_of(
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict[str, Any]],
    *,
    chat: bool = True,
    long_prompts: Literal["filter", "cut_left", "error"] = "filter",
    skip: bool = False,
) -> AllTaskProcessedDataset:
    spec = TaskDataSpec(task_name="math", apply_chat_template=chat, long_prompts=long_prompts)
    processors = {
        "math": (spec, math_data_processor),
        "gsm8k": (replace(spec, task_name="gsm8k"), find_processor("gsm8k")),
        "own": (replace(spec, task_name="own"), process_row),
    }
    return AllTaskProcessedDataset(rows, tokenizer, spec, processors, LONGEST, skip_refused=skip)


def outcome(dataset: AllTaskProcessedDataset, *, together: bool) -> tuple[int | str, dict[int, str]]:
    """How many rows are left out, or what is raised, and which were refused."""
    rows = range(len(dataset))
    try:
        if together:
            return count_left_out(dataset, len(dataset)), dataset.refused
        return sum(dataset[idx]["loss_multiplier"] == 0 for idx in rows), dataset.refused
    except ValueError as error:
        return str(error), dataset.refused


SHORT, LONG = {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+1=" * 5, "answer": "2"}
GSM8K = {"question": "1+1 = " * 3, "answer": "so #### 2", "task_name": "gsm8k"}
OWN = {"prompt": "1234567", "answer": "2", "task_name": "own"}
SETS = {
    "long": [SHORT, LONG, SHORT, GSM8K] * 3,
    "own": [SHORT, LONG, OWN, SHORT, LONG],
    "refused": [SHORT, LONG, {"prompt": "no", "answer": "2"}, {"question": "x", "task_name": "gsm8k"}, LONG],
    "no task": [LONG, {**SHORT, "task_name": "chess"}, LONG],
    "no tokens": [SHORT, LONG, {"prompt": "", "answer": "2"}],
}


@pytest.mark.parametrize("rows", SETS.values(), ids=SETS)
@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("long_prompts", ["filter", "cut_left", "error"])
@pytest.mark.parametrize("skip", [True, False])
def test_together_is_as_one_by_one(
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[dict[str, Any]],
    chat: bool,
    long_prompts: Literal["filter", "cut_left", "error"],
    skip: bool,
) -> None:
    monkeypatch.setattr(first_rows, "BATCH_ROWS", 3)
    sets = [dataset_of(tokenizer, rows, chat=chat, long_prompts=long_prompts, skip=skip) for _ in range(2)]
    assert outcome(sets[0], together=True) == outcome(sets[1], together=False)


def test_only_the_first_rows_are_looked_at_and_each_part_is_tokenised_once(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_rows, "BATCH_ROWS", 4)
    calls: list[int] = []
    encode = PreTrainedTokenizerFast.__call__

    def counted(self: PreTrainedTokenizerFast, text: Any, **options: Any) -> Any:
        calls.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counted)
    assert count_left_out(dataset_of(tokenizer, [SHORT, LONG] * 20), 10) == 5
    assert calls == [4, 4, 2]


def test_a_tokenizer_of_another_kind_gets_one_text_at_a_time() -> None:
    class Characters:
        chat_template = None

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            assert isinstance(text, str)
            return {"input_ids": list(text.encode())}

    dataset = dataset_of(Characters(), [SHORT, LONG], chat=False)  # type: ignore[arg-type]
    assert count_left_out(dataset, 2) == 1
