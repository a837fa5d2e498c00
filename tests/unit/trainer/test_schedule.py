"""Learning rates against schedules of transformers, ranges of tensors as boxes, end tokens of exports."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast, get_scheduler

from megatron_grpo.config.schema import OptimizerConfig
from megatron_grpo.models.hf_folder import write_hf_folder
from megatron_grpo.trainer.hf_export import find_end_tokens
from megatron_grpo.trainer.optimizer import Schedule, split_into_boxes
from tests.support.foreign_tokenizers import CHATML, byte_level

STEPS, WARMUP, LR = 40, 5, 1e-2


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize(
    ("style", "settings", "theirs"),
    [
        ("polynomial", {"decay_power": 2.0, "min_lr": 1e-3}, {"power": 2.0, "lr_end": 1e-3}),
        ("polynomial", {"min_lr": 1e-4}, {"lr_end": 1e-4}),
        ("cosine_with_restarts", {"decay_cycles": 3}, {"num_cycles": 3}),
        ("cosine_with_restarts", {}, {}),
        ("warmup_stable_decay", {"final_decay_steps": 8}, {"num_decay_steps": 8, "decay_type": "linear"}),
        ("warmup_stable_decay", {}, {"num_decay_steps": 4, "decay_type": "linear"}),
        ("linear", {}, {}),
        ("cosine", {}, {}),
    ],
)
def test_a_schedule_is_that_of_transformers(
    style: Any, settings: dict[str, Any], theirs: dict[str, Any], warmup: int
) -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{"max_lr": LR, "min_lr": settings.get("min_lr", 0.0)}])
    ours = Schedule(optimizer, OptimizerConfig(lr=LR, warmup_steps=warmup, decay_style=style, **settings), STEPS)
    adam = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=LR)
    expected = get_scheduler(
        style, adam, num_warmup_steps=warmup, num_training_steps=STEPS, scheduler_specific_kwargs=theirs
    )
    for step in range(1, STEPS + 1):
        ours.step(1)
        adam.step()
        expected.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected.get_last_lr()[0], abs=1e-12), step


def test_a_schedule_stays_at_its_end() -> None:
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    ours = Schedule(optimizer, OptimizerConfig(lr=LR, min_lr=1e-3, decay_style="polynomial"), STEPS)
    ours.step(STEPS + 7)
    assert optimizer.param_groups[0]["lr"] == 1e-3


SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]
HEADERS = "{% for m in messages %}{{ m.role + ':' + m.content + '<|eot_id|>' }}{% endfor %}"
NO_END = "{% for m in messages %}{{ m.role + ':' + m.content + '\\n' }}{% endfor %}"


def make_source(folder: Path, template: str | None, ends: list[str] | None) -> Path:
    """A folder of a base model, whose texts end with <|endoftext|>."""
    folder.mkdir()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(SPECIAL), eos_token="<|endoftext|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    number = tokenizer.convert_tokens_to_ids
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "eos_token_id": number("<|endoftext|>")}))
    if ends is not None:
        settings = {"eos_token_id": [number(end) for end in ends], "top_k": 20}
        (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("template", "run_template", "ends", "expected"),
    [
        (CHATML, None, ["<|endoftext|>"], ["<|endoftext|>", "<|im_end|>"]),  # supervised training of a base model
        (None, HEADERS, None, ["<|endoftext|>", "<|eot_id|>"]),  # a template of the run, and no generation_config.json
        (CHATML, HEADERS, ["<|im_end|>"], ["<|endoftext|>", "<|im_end|>", "<|eot_id|>"]),
        (CHATML, None, ["<|im_end|>"], None),
        (CHATML, NO_END, ["<|endoftext|>"], None),
        (None, None, ["<|endoftext|>"], None),
    ],
)
def test_an_export_ends_where_its_turns_end(
    tmp_path: Path, template: str | None, run_template: str | None, ends: list[str] | None, expected: list[str] | None
) -> None:
    """As transformers' generation reads the folder."""
    source, output = make_source(tmp_path / "source", template, ends), tmp_path / "export"
    end_tokens = find_end_tokens(source, run_template)
    write_hf_folder([("a", torch.zeros(2))], source, output, chat_template=run_template, end_tokens=end_tokens)
    if expected is None:
        assert end_tokens is None
        original, exported = (folder / "generation_config.json" for folder in (source, output))
        assert original.read_text() == exported.read_text()
        return
    settings, tokenizer = GenerationConfig.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    assert tokenizer.convert_ids_to_tokens(settings.eos_token_id) == expected
    assert settings.top_k == (20 if ends else GenerationConfig().top_k)


def test_a_folder_without_a_tokenizer_keeps_its_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert find_end_tokens(tmp_path, CHATML) is None


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (1, 3, 4), (3, 1, 2, 2)])
def test_boxes_hold_the_range_in_its_order(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(tensor.numel() + 1):
        for stop in range(start, tensor.numel() + 1):
            boxes = list(split_into_boxes(shape, start, stop))
            cut = [
                tensor[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))].reshape(-1)
                for offset, size in boxes
            ]
            assert torch.cat([tensor[:0].reshape(-1)[:0], *cut]).tolist() == list(range(start, stop))
            assert len(boxes) <= 2 * len(shape) - 1
