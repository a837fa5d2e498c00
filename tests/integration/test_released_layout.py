"""A whole run on a released layout whose tokenizer class is not that of its tokenizer.json: every text is right."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.released_rewards import NOTES
from tests.integration.runs import TrainingRun
from tests.integration.whole_runs import complete, read_options
from tests.support.released.table import BY_NAME
from tests.support.released.weights import write_model

OPTIONS = read_options("released_layout")

pytestmark = pytest.mark.slow

R1_LLAMA = BY_NAME["r1_distill_llama"]
STEPS = 3
ROWS = [f"How many of the {2000 + row} cats\n  are in the hat? 它们有几只？ {row}" for row in range(12)]


def test_three_steps_see_the_texts_of_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-R1's distillation into Llama: prompts decode to the rows' text, rewards read what was sampled."""
    notes = tmp_path / "notes.jsonl"
    monkeypatch.setenv(NOTES, str(notes))
    rows = "".join(json.dumps({"prompt": text, "answer": "1"}) + "\n" for text in ROWS)
    (tmp_path / "rows.jsonl").write_text(rows)
    run = complete(
        TrainingRun(
            tmp_path / "run",
            "prepare.name=null",
            f"policy.model.path={write_model(R1_LLAMA, tmp_path / 'model')}",
            f"data.train_path={tmp_path / 'rows.jsonl'}",
            "data.val_path=null",
            "data.task_name=cats",
            "data.apply_chat_template=true",
            "data.max_input_seq_length=160",
            "~env.addition",
            *OPTIONS["three_steps_see_the_texts_of_the_rows"],
            f"grpo.max_num_steps={STEPS}",
            "grpo.num_prompts_per_step=4",
            "grpo.num_generations_per_prompt=4",
            "logger.rollouts=all",
        ),
        400,
    )
    prompts = [R1_LLAMA.render([{"role": "user", "content": text}]) for text in ROWS]
    sampled: Counter[str] = Counter()
    for step in range(1, STEPS + 1):
        for row in run.rollouts(step):
            ids, (begin, *_) = row["token_ids"], row["spans"][0]
            prompt = prompts[row["prompt_idx"]]
            assert ids[:begin] == R1_LLAMA.ids(prompt)
            assert R1_LLAMA.truth.decode(ids[:begin], skip_special_tokens=False) == prompt
            assert ROWS[row["prompt_idx"]] in prompt
            is_ended = ids[-1] == R1_LLAMA.id(R1_LLAMA.end)
            sampled[R1_LLAMA.truth.decode(ids[begin : len(ids) - is_ended], skip_special_tokens=False)] += 1
    counter = Counter(json.loads(line)["completion"] for line in notes.read_text().splitlines())
    assert counter == sampled
