"""A million rows on the whole way from the file to the batches, with a stop in between."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_grpo.config.compose import compose_typed
from megatron_grpo.config.schema import Config
from megatron_grpo.data.load_prompts import load_prompt_data
from megatron_grpo.data.loader import PromptLoader

ROWS, PROMPTS = 1_000_000, 1000


class CharacterTokenizer:
    """As much of a tokenizer as prompts need: a token a character."""

    eos_token_id = 0
    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def config_of(path: Path) -> Config:
    overrides = [f"data.train_path={path}", "data.val_path=null", "data.rows_rendered_at_start=1000"]
    config = compose_typed(["+exp=quickstart", f"grpo.num_prompts_per_step={PROMPTS}", *overrides]).config
    assert config is not None
    return config


def loader_of(config: Config) -> PromptLoader:
    loader = load_prompt_data(config, Path(), CharacterTokenizer()).loader
    assert isinstance(loader, PromptLoader)
    return loader


def count(visits: np.ndarray[Any, np.dtype[np.int64]], batch: list[Any]) -> None:
    assert [prompt["extra_env_info"]["number"] for prompt in batch] == [prompt["idx"] for prompt in batch]
    visits[[prompt["idx"] for prompt in batch]] += 1


@pytest.mark.slow
def test_each_row_is_visited_once_an_epoch_however_it_is_stopped(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = '{"prompt": "%d+1=", "answer": "%d", "number": %d}\n'
    with path.open("w") as file:
        file.writelines(row % (number, number + 1, number) for number in range(ROWS))
    config = config_of(path)
    stop_after = random.Random(1).randrange(1, ROWS // PROMPTS)
    visits = np.zeros(ROWS, dtype=np.int64)
    loader = loader_of(config)
    for steps, batch in enumerate(loader, start=1):
        count(visits, batch)
        if steps == stop_after:
            break
    state = json.loads(json.dumps(loader.state_dict()))
    assert visits.sum() == stop_after * PROMPTS
    resumed = loader_of(config)
    resumed.load_state_dict(state)
    for batch in resumed:
        count(visits, batch)
    assert resumed.epoch == 1
    assert (visits == 1).all()
    batches = iter(resumed)
    second = [prompt["idx"] for _ in range(3) for prompt in next(batches)]
    assert second != sorted(second)
    assert len(set(second)) == 3 * PROMPTS
