"""From files of prompts to batches: reading, processing and the resumable order."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_grpo.config.data_schema import DatasetConfig
from megatron_grpo.config.errors import ConfigError, RunError
from megatron_grpo.config.schema import DataConfig
from megatron_grpo.data.datasets import AllTaskProcessedDataset
from megatron_grpo.data.load_prompts import JoinedPrompts
from megatron_grpo.data.loader import PromptLoader, PromptSampler, StreamLoader
from megatron_grpo.data.processors import REFERENCE, DatumSpec, TaskDataSpec, math_data_processor

SPEC = TaskDataSpec(task_name="math", apply_chat_template=False)
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, number = code - 32."""
    vocab = {chr(code): code - 32 for code in range(32, 127)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=CHAT)


def ids(text: str) -> list[int]:
    return [ord(character) - 32 for character in text]


def test_columns_stay_as_they_are_beside_the_reference_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    spec = replace(SPEC, answer_key="ground_truth")
    row = {"prompt": "1+1=", "ground_truth": [1, 2], "answer": {"not": "the reference"}}
    info = math_data_processor(row, spec, tokenizer, 4, 0)["extra_env_info"]
    assert info == {"ground_truth": [1, 2], "answer": {"not": "the reference"}, REFERENCE: "[1, 2]"}
    del row["answer"]
    assert math_data_processor(row, spec, tokenizer, 4, 0)["extra_env_info"]["answer"] == [1, 2]


def test_a_plain_prompt_is_tokenised_as_it_is(tokenizer: PreTrainedTokenizerFast) -> None:
    datum = math_data_processor({"prompt": "1+1=", "answer": 2, "level": 3}, SPEC, tokenizer, 4, 7)
    assert datum == {
        "message_log": [{"role": "user", "content": "1+1=", "token_ids": ids("1+1=")}],
        "length": 4,
        "extra_env_info": {"answer": 2, "level": 3, REFERENCE: "2"},
        "loss_multiplier": 1.0,
        "idx": 7,
        "task_name": "math",
        "prompt": "1+1=",
    }


@pytest.mark.parametrize(
    ("prompt", "rendered"),
    [
        ("1+1=", "<system>Add.<user>1+1=<assistant>"),
        (
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Yes?"},
                {"role": "user", "content": "2"},
            ],
            "<system>Add.<user>Hi<assistant>Yes?<user>2<assistant>",
        ),
    ],
)
def test_a_chat_template_renders_the_conversation(
    tokenizer: PreTrainedTokenizerFast, prompt: str | list[dict[str, str]], rendered: str
) -> None:
    spec = TaskDataSpec(task_name="math", system_prompt="Add.")
    datum = math_data_processor({"prompt": prompt, "answer": "2"}, spec, tokenizer, 100, 0)
    assert datum["message_log"][0]["token_ids"] == ids(rendered)
    assert datum["prompt"] == prompt


def test_a_prompt_that_is_too_long_is_flagged(tokenizer: PreTrainedTokenizerFast) -> None:
    datum = math_data_processor({"prompt": "1+1=", "answer": "2"}, SPEC, tokenizer, 3, 0)
    assert datum["loss_multiplier"] == 0.0
    assert datum["length"] == 4


def test_a_missing_chat_template_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="apply_chat_template=false"):
        math_data_processor({"prompt": "1", "answer": "1"}, TaskDataSpec(task_name="math"), tokenizer, 9, 0)


def test_reward_functions_need_no_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    spec, row = replace(SPEC, answer_key=None), {"prompt": "1+1=", "level": 3}
    assert math_data_processor(row, spec, tokenizer, 4, 0)["extra_env_info"] == {"level": 3}


def test_the_dataset_chooses_the_processor_by_task(tokenizer: PreTrainedTokenizerFast) -> None:
    def shout(row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any, longest: int, idx: int) -> DatumSpec:
        return math_data_processor({**row, "prompt": row["prompt"] + "!"}, spec, tokenizer, longest, idx)

    rows = [{"prompt": "1", "answer": "1"}, {"prompt": "2", "answer": "2", "task_name": "loud"}]
    processors = {"math": (SPEC, math_data_processor), "loud": (SPEC, shout)}
    dataset = AllTaskProcessedDataset(rows, tokenizer, SPEC, processors, 10)
    assert len(dataset) == 2
    assert [(dataset[i]["prompt"], dataset[i]["task_name"], dataset[i]["idx"]) for i in range(2)] == [
        ("1", "math", 0),
        ("2!", "loud", 1),
    ]
    with pytest.raises(ValueError, match='row 1: no data processor for task_name "loud"'):
        AllTaskProcessedDataset(rows, tokenizer, SPEC, {"math": (SPEC, math_data_processor)}, 10)[1]


def test_a_loss_multiplier_is_a_weight_of_at_most_one(tokenizer: PreTrainedTokenizerFast) -> None:
    def weigh(row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any, longest: int, idx: int) -> DatumSpec:
        datum = math_data_processor(row, spec, tokenizer, longest, idx)
        datum["loss_multiplier"] = (0.5, 1.5, -0.5, float("nan"))[idx]
        return datum

    rows = [{"prompt": "1", "answer": "1"}] * 4
    dataset = AllTaskProcessedDataset(rows, tokenizer, SPEC, {"math": (SPEC, weigh)}, 10)
    assert dataset[0]["loss_multiplier"] == 0.5
    for row, weight in ((1, r"1\.5"), (2, r"-0\.5"), (3, "nan")):
        with pytest.raises(ValueError, match=rf"row {row}: its .*weigh returned loss_multiplier={weight}: give"):
            dataset[row]


def test_a_chat_template_that_refuses_a_prompt_is_an_error_with_its_row(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        ValueError, match="row 3: the tokenizer's chat template refuses the prompt: roles must alternate"
    ):
        math_data_processor({"prompt": "1", "answer": "1"}, TaskDataSpec(task_name="math"), tokenizer, 9, 3)


class Numbered:
    """Rows 0..n-1, of which those in `too_long` are flagged."""

    def __init__(self, rows: int, too_long: tuple[int, ...] = ()) -> None:
        self.rows = rows
        self.too_long = too_long

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, idx: int) -> DatumSpec:
        return DatumSpec(
            message_log=[],
            length=0,
            extra_env_info={},
            loss_multiplier=0.0 if idx in self.too_long else 1.0,
            idx=idx,
            task_name="math",
        )


def make_loader(dataset: Numbered, *, seed: int = 1, shuffle: bool = True) -> PromptLoader:
    return PromptLoader(
        dataset, prompts_per_batch=3, order=PromptSampler([len(dataset)], [1.0], shuffle=shuffle, seed=seed)
    )


def epoch(loader: PromptLoader) -> list[list[int]]:
    return [[datum["idx"] for datum in batch] for batch in loader]


def test_an_epoch_visits_each_row_at_most_once_in_whole_batches() -> None:
    loader = make_loader(Numbered(11))
    batches = epoch(loader)
    assert [len(batch) for batch in batches] == [3, 3, 3]
    assert max(Counter(i for batch in batches for i in batch).values()) == 1
    assert loader.epoch == 1


def test_in_order_rows_come_as_they_are() -> None:
    assert epoch(make_loader(Numbered(11), shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_the_order_is_drawn_from_seed_and_epoch_alone() -> None:
    first, second = make_loader(Numbered(30)), make_loader(Numbered(30))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    orders = [epoch(first) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before), "the process's own random numbers are left alone"
    torch.manual_seed(5)
    assert [epoch(second) for _ in range(3)] == orders
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert epoch(make_loader(Numbered(30), seed=2)) not in orders


def test_prompts_that_are_too_long_are_left_out_and_counted() -> None:
    loader = make_loader(Numbered(8, too_long=(1, 4)), shuffle=False)
    assert epoch(loader) == [[0, 2, 3], [5, 6, 7]]
    assert loader.left_out == 2
    epoch(loader)
    assert loader.left_out == 2, "counted anew each epoch"


def test_rows_of_joined_sets_have_numbers_of_their_own() -> None:
    """Equal numbers would mean equal seeds of samples."""
    joined = JoinedPrompts([Numbered(5), Numbered(4)])
    assert [joined[number]["idx"] for number in range(9)] == list(range(9))


def test_an_epoch_without_a_batch_is_an_error() -> None:
    with pytest.raises(RunError, match=r"4 rows, of which 2 are left out"):
        epoch(make_loader(Numbered(4, too_long=(0, 1))))


@pytest.mark.parametrize("stop_after", range(1, 13))
def test_a_resumed_loader_continues_exactly(stop_after: int) -> None:
    """Stopped after any batch of three epochs of four batches each, mid-epoch or at its end."""
    dataset = Numbered(15, too_long=(2, 9))

    def batches(loader: PromptLoader, epochs: int, stop: int | None = None) -> list[tuple[int, list[int]]]:
        order: list[tuple[int, list[int]]] = []
        while loader.epoch < epochs:
            for batch in loader:
                order.append((loader.epoch, [datum["idx"] for datum in batch]))
                if len(order) == stop:
                    return order
        return order

    straight = batches(make_loader(dataset), 3)
    assert len(straight) == 12
    interrupted = make_loader(dataset)
    first = batches(interrupted, 3, stop_after)
    state = json.loads(json.dumps(interrupted.state_dict()))
    resumed = make_loader(dataset)
    resumed.load_state_dict(state)
    assert first + batches(resumed, 3) == straight
    unused = make_loader(dataset)
    unused.load_state_dict(state)
    again = make_loader(dataset)
    again.load_state_dict(json.loads(json.dumps(unused.state_dict())))
    assert first + batches(again, 3) == straight, "a loader that was resumed and saved without use is where it was"


def test_looking_at_the_position_does_not_move_it() -> None:
    looked_at, left_alone = make_loader(Numbered(11)), make_loader(Numbered(11))
    batches = []
    for _ in range(2):
        looked_at.state_dict()
        for batch in looked_at:
            looked_at.state_dict()
            batches.append([datum["idx"] for datum in batch])
    assert batches == epoch(left_alone) + epoch(left_alone)


def test_the_state_of_a_finished_epoch_begins_the_next_one() -> None:
    straight = make_loader(Numbered(9))
    epoch(straight)
    resumed = make_loader(Numbered(9))
    resumed.load_state_dict(straight.state_dict())
    assert epoch(resumed) == epoch(straight)


def test_the_state_of_other_data_is_an_error() -> None:
    with pytest.raises(ConfigError, match="has 10 rows, and had 9 when the checkpoint was written"):
        make_loader(Numbered(10)).load_state_dict(make_loader(Numbered(9)).state_dict())


def test_the_words_of_a_prompt_file_stand_around_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    spec = replace(SPEC, prompt="Level {level}: {}. Use \\boxed{{}}.")
    row = {"prompt": "1+1", "answer": "2", "level": 3}
    datum = math_data_processor(row, spec, tokenizer, 100, 0)
    assert datum["message_log"][0]["content"] == "Level 3: 1+1. Use \\boxed{}."
    assert datum["prompt"] == "1+1", "for reward functions the prompt is what the row has"
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    chat = replace(spec, apply_chat_template=True, prompt="say {}")
    rendered = math_data_processor({"prompt": talk, "answer": "2"}, chat, tokenizer, 100, 0)
    assert rendered["message_log"][0]["content"] == "<user>a<assistant>b<user>say c<assistant>"
    with pytest.raises(ValueError, match=r"row 4: data.prompt_file cannot be filled in: KeyError: 'grade'"):
        math_data_processor(row, replace(SPEC, prompt="{grade} {}"), tokenizer, 100, 4)


def test_a_template_of_ones_own_gets_variables_and_tools(tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}{{ style }}:{{ messages[-1].content }}"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    spec = TaskDataSpec(task_name="math", chat_template=template, chat_template_kwargs={"style": "dry"}, tools=tools)
    datum = math_data_processor({"prompt": "1+1", "answer": "2"}, spec, tokenizer, 100, 0)
    assert datum["message_log"][0]["content"] == "[add]dry:1+1"


def test_a_turn_that_the_assistant_has_begun_stays_open(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<assistant>"
        "{% endif %}"
    )
    begun = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "Let me see:"}]
    datum = math_data_processor({"prompt": begun, "answer": "2"}, TaskDataSpec(task_name="math"), tokenizer, 100, 0)
    assert datum["message_log"][0]["content"] == "<user>1+1</><assistant>Let me see:"


def test_a_long_prompt_is_cut_at_its_beginning_or_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    row = {"prompt": "1+1=", "answer": "2"}
    datum = math_data_processor(row, replace(SPEC, long_prompts="cut_left"), tokenizer, 3, 0)
    assert (datum["message_log"][0]["token_ids"], datum["length"], datum["loss_multiplier"]) == (ids("+1="), 3, 1.0)
    assert datum["message_log"][0]["content"] == "+1="
    with pytest.raises(ValueError, match=r"row 5: the prompt has 4 tokens, more than data.max_input_seq_length=3"):
        math_data_processor(row, replace(SPEC, long_prompts="error"), tokenizer, 3, 5)


def test_sets_are_mixed_by_their_weights() -> None:
    """Three sets of 8, 10 and 4 rows: once, half of it, two and a quarter times an epoch."""
    order = PromptSampler([8, 10, 4], [1.0, 0.5, 2.25], shuffle=True, seed=3)
    epochs = []
    for number in range(4):
        order.epoch = number
        epochs.append(Counter(order))
        assert sum(epochs[-1].values()) == len(order) == 8 + 5 + 9
    for visits in epochs:
        assert {visits[row] for row in range(8)} == {1}
        assert sum(visits[row] for row in range(8, 18)) == 5
        assert sorted(visits[row] for row in range(18, 22)) == [2, 2, 2, 3]
    assert {(epochs[0] + epochs[1])[row] for row in range(8, 18)} == {1}, "the other half in the next epoch"
    assert {sum(epochs, Counter())[row] for row in range(18, 22)} == {9}
    order.epoch = 0
    assert list(order) == list(PromptSampler([8, 10, 4], [1.0, 0.5, 2.25], shuffle=True, seed=3))


def test_a_row_that_its_processor_refuses_can_be_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    def picky(row: dict[str, Any], spec: TaskDataSpec, tokenizer: Any, longest: int, idx: int) -> DatumSpec:
        return math_data_processor({**row, "prompt": row["text"]}, spec, tokenizer, longest, idx)

    rows = [{"text": "1", "answer": "1"}, {"prompt": "2", "answer": "2"}]
    dataset = AllTaskProcessedDataset(rows, tokenizer, SPEC, {"math": (SPEC, picky)}, 10, skip_refused=True)
    assert [dataset[number]["loss_multiplier"] for number in range(2)] == [1.0, 0.0]
    name = f"{picky.__module__}.{picky.__qualname__}"
    assert dataset.refused == {1: f"row 1: its processor {name} raised KeyError: 'text'"}
    strict = AllTaskProcessedDataset(rows, tokenizer, SPEC, {"math": (SPEC, picky)}, 10)
    with pytest.raises(ValueError, match=r"row 1: its processor .*picky raised KeyError"):
        strict[1]


@pytest.mark.parametrize("stop_after", range(1, 9))
def test_a_resumed_stream_continues_exactly(tokenizer: PreTrainedTokenizerFast, stop_after: int) -> None:
    rows = [{"prompt": str(number % 10), "answer": str(number)} for number in range(13)]

    def make() -> StreamLoader:
        data = DataConfig(train_path="some/name", streaming=True, shuffle_buffer=5, apply_chat_template=False)
        process = AllTaskProcessedDataset([], tokenizer, SPEC, {"math": (SPEC, math_data_processor)}, 10)
        (config,) = data.training_sets.values()
        return StreamLoader(
            rows, config=config, data=data, environments={"math": "math"}, prompts=process, prompts_per_batch=3, seed=1
        )

    def batches(loader: StreamLoader, stop: int = 99) -> list[list[int]]:
        order: list[list[int]] = []
        while loader.epoch < 2:
            for batch in loader:
                order.append([datum["idx"] for datum in batch])
                if len(order) == stop:
                    return order
        return order

    straight = batches(make())
    assert len(straight) == 8
    assert all(len({idx for batch in straight[begin : begin + 4] for idx in batch}) == 12 for begin in (0, 4))
    assert straight[:4] != straight[4:]
    interrupted = make()
    first = batches(interrupted, stop_after)
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert first + batches(resumed) == straight
    with pytest.raises(ConfigError, match="a run with other data"):
        make().load_state_dict({"epoch": 0})


@pytest.mark.parametrize("weight", [0.01, 0.1, 0.5, 1.0, 2.25, 3.999])
def test_visits_are_known_before_the_order_is_drawn(weight: float) -> None:
    for rows in (1, 5, 40):
        order = PromptSampler([rows], [weight], shuffle=False, seed=3)
        assert DatasetConfig(weight=weight).count_visits(rows) == len(order) == len(list(order))
